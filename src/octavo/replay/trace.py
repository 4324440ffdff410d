"""One request of a trace, whatever file it came from. It knows no file, no cache and no model."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

TOKEN_BYTES = 4
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Its text is known as token ids, as ids of token blocks, or only by its length.

    `block_ids` name whole prefixes: equal ids mean that everything up to the end of the block is equal. The last block
    may be filled in part. `after` is set where the trace says that a request was sent when an earlier one of the same
    session had been answered, so long after it.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[Hashable] = ()  # one for each `block_tokens` of the prompt; empty: nothing is known to repeat
    block_tokens: int = 0
    prompt_token_ids: array[int] | None = None  # array('I')
    output_token_ids: array[int] | None = None
    tenant: str = ""  # who sent it; tenants of one namespace share what they have in common
    namespace: str = ""  # requests of different namespaces share nothing
    session: str = ""
    priority: int = 0  # lower is more urgent

    @property
    def total_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def token_array(token_ids: Sequence[int]) -> array[int]:
    return array("I", token_ids)


def block_keys(token_ids: array[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """Chained digests of the blocks of a text, the last one filled in part where the text ends inside it."""
    text, width, keys = token_ids.tobytes(), block_size * TOKEN_BYTES, []
    for start in range(0, len(text), width):
        parent = blake2b(text[start : start + width], digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)
    return keys
