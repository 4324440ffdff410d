"""The walks that watch the core at work: paging, sharing and radix. Which blocks there are is what the core decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.engine_core import EngineCore
from octavo.planner.comparisons import Comparisons
from octavo.planner.lengths import Lengths
from octavo.planner.plan import Plan
from octavo.planner.tables import show_bytes
from octavo.planner.walks.trace import Seen, Watcher
from octavo.planner.walks.walk import Part, Picture, Table, Walk, Words

SYSTEM = (
    "You are the assistant of a small library. Answer in one short sentence, name a book where you can, and say so "
    "when you do not know. Be friendly, and never invent a title."
)
TURNS = (
    "Which book would you give to somebody who likes the sea?",
    "Is there a shorter one?",
    "Who wrote it, and when?",
    "What else did this author write?",
    "Which of these should I read first?",
)
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 12, 60


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a walk takes place: a core, how text becomes tokens for it, and whether a model really runs."""

    core: EngineCore
    encode: Callable[[str], list[int]]
    is_live: bool

    @property
    def words(self) -> str:
        if self.is_live:
            return "The model ran: these are the block tables of the engine at work."
        return (
            "The engine's own scheduler and block manager ran, with an executor that computes nothing: the blocks are "
            "those that a real run gets."
        )


def stand_in_encode(text: str) -> list[int]:
    """A token for each word; the same word is the same token."""
    return [1 + sum(index * ord(letter) for index, letter in enumerate(word, 1)) % 49_000 for word in text.split()]


def paging(plan: Plan, ground: Ground) -> Walk:
    """Blocks as they are needed, wherever they lie."""
    prompts = [ground.encode(" ".join([text] * count)) for text, count in ((TURNS[0], 3), (SYSTEM, 1), (TURNS[3], 6))]
    watcher = Watcher(ground.core)
    before = ground.core.status()
    seen = watcher.run(prompts, LONG_ANSWER_TOKENS, "paging")
    size = before.block_size
    reserved = plan.geometry.max_context
    rows = [_held(index, each, size, plan, reserved) for index, each in enumerate(seen)]
    waste = [{"block_size": candidate, **_waste(seen, candidate)} for candidate in (1, 16, 32, 64, 128, 256)]
    parts: list[Part] = [
        Words(
            "A cache that must lie in one piece is reserved for the longest text that a request might become, and "
            "most of it stays empty. Paged, it lies in blocks of a fixed number of tokens, which are taken as the text "
            "grows; a block table says which block holds which tokens. Blocks that follow each other in a text need "
            "not follow each other in memory."
        ),
        Words(ground.words),
        Picture(
            f"Block tables of three requests that ran side by side (blocks of {size} tokens)",
            [f"request {index}: {_table(each.table)}" for index, each in enumerate(seen)],
        ),
        Table(f"What each held at its end, against {reserved:,} tokens reserved", rows),
        Table("What other sizes of a block would leave empty", waste),
        Words(
            "The last block of a request is half empty on average, whatever the size: larger blocks waste more, and "
            "share less of a prefix; smaller ones need longer tables. 16 is the usual choice."
        ),
    ]
    return Walk("Paging", tuple(parts))


def _held(index: int, seen: Seen, size: int, plan: Plan, reserved: int) -> dict[str, object]:
    tokens = seen.prompt_tokens + len(seen.output) - 1
    return {
        "request": index,
        "tokens": tokens,
        "blocks": len(seen.table),
        "empty_slots": len(seen.table) * size - tokens,
        "paged_bytes": plan.cache.of(len(seen.table) * size),
        "contiguous_bytes": plan.cache.of(reserved),
        "contiguous_used_share": tokens / reserved,
    }


def _waste(seen: Sequence[Seen], size: int) -> dict[str, object]:
    lengths = Lengths(tuple(each.prompt_tokens + len(each.output) - 1 for each in seen))
    slots = sum(-(-length // size) * size for length in lengths.totals)
    return {"slots": slots, "empty_slots": slots - sum(lengths.totals), "used_share": sum(lengths.totals) / slots}


def sharing(plan: Plan, ground: Ground) -> Walk:
    """One prefix for many."""
    system = ground.encode(SYSTEM)
    prompts = [[*system, *ground.encode(turn)] for turn in TURNS[:4]]
    watcher = Watcher(ground.core)
    first = watcher.run(prompts[:1], ANSWER_TOKENS, "first")
    others = watcher.run(prompts[1:], ANSWER_TOKENS, "others")
    seen = [*first, *others]
    size = ground.core.status().block_size
    common = sum(each.hit_tokens for each in others)
    table = Comparisons(plan).prefix_sharing()
    whole = len(system) // size
    distinct = len({block for each in seen for block in each.table[:whole]})
    parts: list[Part] = [
        Words(
            "Requests that begin alike need not keep, or compute, their beginning twice. Blocks that are full and "
            "computed are found by their tokens; a request takes a reference to them and writes behind them. Where a "
            "match ends inside a block, that part of the block is copied."
        ),
        Words(ground.words),
        Picture(
            f"Four requests behind one system prompt of {len(system)} tokens ([n] was there already)",
            [f"request {index}: {_table(each.table, each.num_attached)}" for index, each in enumerate(seen)],
        ),
        Table(
            "What was found and what was computed",
            [
                {
                    "request": index,
                    "prompt_tokens": each.prompt_tokens,
                    "hit_tokens": each.hit_tokens,
                    "computed_tokens": each.computed_tokens,
                    "blocks_copied_in_part": len(each.copied),
                }
                for index, each in enumerate(seen)
            ],
        ),
        Words(
            f"The system prompt fills {whole} blocks, and the four requests hold {distinct} blocks for it together; "
            f"{common} tokens were found instead of computed."
        ),
        Table("The same for many users", [table]),
        Words(
            f"{table['users']} users behind {table['prefix_tokens']:,} tokens: "
            f"{show_bytes(table['kv_bytes_without_sharing'])} without sharing, "
            f"{show_bytes(table['kv_bytes_shared'])} with it."
        ),
    ]
    return Walk("Sharing prefixes", tuple(parts))


def radix(plan: Plan, ground: Ground) -> Walk:
    """A talk of five turns: each finds the one before."""
    watcher = Watcher(ground.core)
    text = ground.encode(SYSTEM)
    rows, lines = [], []
    total_hit = total_prompt = 0
    for number, turn in enumerate(TURNS, 1):
        text = [*text, *ground.encode(turn)]
        (seen,) = watcher.run([text], ANSWER_TOKENS, f"turn{number}")
        rows.append(
            {
                "turn": number,
                "prompt_tokens": seen.prompt_tokens,
                "hit_tokens": seen.hit_tokens,
                "computed_tokens": seen.computed_tokens,
                "hit_share": seen.hit_tokens / seen.prompt_tokens,
                "prefill_saved_multiply_adds": plan.work.prefill(seen.prompt_tokens)
                - plan.work.prefill(max(1, seen.prompt_tokens - seen.hit_tokens)),
            }
        )
        lines.append(f"turn {number}: {_table(seen.table, seen.num_attached)}")
        total_hit, total_prompt = total_hit + seen.hit_tokens, total_prompt + seen.prompt_tokens
        text = [*text, *seen.output]
    parts: list[Part] = [
        Words(
            "Cached blocks hang in a tree: a node is a block, and its path from the root is the text before it. A new "
            "request walks down as far as its tokens agree. Each turn of a talk begins with all turns before it, so it "
            "walks down to the end of the last one, and computes what is new."
        ),
        Words(ground.words),
        Picture("The path of each turn ([n] was found in the tree)", lines),
        Table("Hit and computed, turn by turn", rows),
        Words(
            f"Of {total_prompt} prompt tokens in five turns {total_hit} were found: {total_hit / total_prompt:.0%}. "
            f"Without the tree all {total_prompt} would have been computed. Only full blocks hang in it: the last, "
            "unfilled one of a turn is computed again with the next."
        ),
        Words(
            "When the pool is full, blocks that nobody holds are given up from the leaves on, the least recently used "
            "first: what begins many texts stays longest."
        ),
    ]
    return Walk("The radix tree", tuple(parts))


def _table(blocks: Sequence[int], attached: int = 0) -> str:
    return " ".join(f"[{block}]" if index < attached else str(block) for index, block in enumerate(blocks))
