"""Token ids that tell nothing but which texts begin alike: a keyed function of a token and all tokens before it.

Equal beginnings keep equal ids, and tokens that follow the same text keep the order that the radix tree puts them in,
so a cache decides the same with masked ids. Nothing else can be told without the key: after different beginnings the
same token has unrelated ids. (What follows one and the same text: the distances between ids tell distances between
tokens up to a secret factor of 64 to 191 and noise.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from hashlib import blake2b

_STATE_BYTES, _PAD_BYTES = 16, 12
MAX_TOKEN = (1 << 24) - 1  # of a real model
RESERVED = 256  # ids from the end, for tokens that end a text
_TOP = (1 << 32) - RESERVED
State = bytes


class TokenMask:
    """A state stands for a text. Immutable; one key is one recording's."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def begin(self, namespace: str) -> State:
        """The empty text. Namespaces have nothing to do with each other."""
        return blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=28, key=self._key).digest()

    def name(self, text: str) -> str:
        """A keyed name for a namespace; that of no namespace stays empty."""
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12, key=self._key).hexdigest() if text else ""

    @staticmethod
    def extend(state: State, token: int) -> State:
        """The text with one token more."""
        return blake2b(token.to_bytes(4, "little"), digest_size=28, key=state[:_STATE_BYTES]).digest()

    @staticmethod
    def mask(state: State, token: int) -> int:
        """The id of a token that follows this text."""
        assert 0 <= token <= MAX_TOKEN, f"token id {token} is beyond {MAX_TOKEN}"
        pad = state[_STATE_BYTES:]
        scale = 64 + pad[0] % 128
        place = int.from_bytes(token.to_bytes(3, "little"), "big")  # as bytes are compared: the lowest first
        noise = blake2b(token.to_bytes(4, "little"), digest_size=2, key=pad).digest()
        room = _TOP - scale * (MAX_TOKEN + 1)
        at = int.from_bytes(pad[1:9], "little") % room + place * scale + int.from_bytes(noise, "little") % scale
        return int.from_bytes(at.to_bytes(4, "big"), sys.byteorder)

    def mask_text(self, state: State, tokens: Iterable[int]) -> tuple[list[int], list[State]]:
        """Ids of tokens that follow a text, and the states after each of them."""
        ids, states = [], []
        for token in tokens:
            ids.append(self.mask(state, token))
            state = self.extend(state, token)
            states.append(state)
        return ids, states
