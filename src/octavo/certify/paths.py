"""The ways through the engine that every setting is measured on. Data only: what runs when, and how it is cut.

cold: each piece of the text alone, from an empty cache. prefix_hit: a piece whose beginning another text has left in
the cache, to the middle of a block. batched: several pieces at once, cut where steps are full. chunked: in small steps
that end inside blocks. long: one text as long as the certificate goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.config import SchedulerConfig

PATHS = ("cold", "prefix_hit", "batched", "chunked", "long")
PIECE_TOKENS = 512
COMPARED_PIECES = 2  # of the first ones, which run on every path
BATCHED_PIECES = 4
_CHUNK_TOKENS = 43
_LOGITS_NUMBERS = 1 << 25  # of one step, at most: memory of models with large vocabularies
_MOST_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Text:
    """A request; texts of the same name begin alike on all paths, so their logits are comparable by position."""

    name: str
    token_ids: Sequence[int]
    first_heard: int | None = 0  # the first position whose logits are compared; None: of none


@dataclass(frozen=True, slots=True)
class Path:
    name: str
    config: SchedulerConfig
    rounds: tuple[tuple[Text, ...], ...]  # texts of a round run together; the next waits for their end

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for texts in self.rounds for text in texts)


def step_tokens(vocab_size: int) -> int:
    return max(64, min(_MOST_STEP_TOKENS, _LOGITS_NUMBERS // vocab_size))


def paths_of(token_ids: Sequence[int], max_model_len: int, vocab_size: int) -> tuple[Path, ...]:
    """max_model_len: of the long path; a shorter text makes it shorter. The last piece may be short."""
    size = min(PIECE_TOKENS, max_model_len - 1)
    pieces = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    texts = [Text(f"piece {index}", piece) for index, piece in enumerate(pieces) if len(piece) > 1]
    compared, step = texts[:COMPARED_PIECES], step_tokens(vocab_size)
    rounds = [(one,) for text in compared for one in _after_a_stranger(text, vocab_size)]
    batched = texts[:BATCHED_PIECES]
    long = Text("piece 0", token_ids[: max_model_len - 1])

    def path(name: str, rounds: Sequence[tuple[Text, ...]], num_seqs: int = 1, tokens: int = step) -> Path:
        most = max(len(text.token_ids) for texts in rounds for text in texts)
        config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=tokens,
            max_model_len=most + 1,
            enable_prefix_caching=name == "prefix_hit",
        )
        return Path(name, config, tuple(rounds))

    return (
        path("cold", [(text,) for text in texts]),
        path("prefix_hit", rounds, 2, PIECE_TOKENS),
        path("batched", [tuple(batched)], len(batched), step * 3 // 4),
        path("chunked", [(text,) for text in compared], 1, min(step, _CHUNK_TOKENS)),
        path("long", [(long,)]),
    )


def _after_a_stranger(text: Text, vocab_size: int) -> tuple[Text, Text]:
    """A text that begins like this one, and goes on otherwise from the middle of a block; then this one."""
    hit = max(1, min(len(text.token_ids) // 2 // 16 * 16 + 5, len(text.token_ids) - 1))
    other = (text.token_ids[hit] + 1) % vocab_size
    stranger = Text(f"before {text.name}", [*text.token_ids[:hit], other], None)
    return stranger, Text(text.name, text.token_ids, hit)
