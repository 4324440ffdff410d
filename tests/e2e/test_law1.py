"""Law 1 on the default serving path: native kernels, SmolLM2 in Q4_1, int8 weights and bf16 KV. Bitwise on logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.sampling_params import SamplingParams
from octavo.engine.tokenizer import Tokenizer
from octavo.kernels.native import NativeOps
from octavo.models.loader import CausalLM, load_model, open_model
from tests.e2e import law1_cases as cases
from tests.e2e import law1_families as families
from tests.e2e.law1_engine import GREEDY, Answer, Engine, Ids, assert_same, with_tokens

TEXT = (
    "The lighthouse keeper had counted the ships for thirty years, writing each one down in a ledger with a steel pen. "
    "On the first morning of winter no ship came, nor on the second, and on the third he opened the ledger at its very "
    "first page and began to read the names aloud, one after the other, as if they could be called back. By noon the "
    "fog had lifted, and far out, where sea and sky were the same grey, something moved, slowly, towards the harbour."
)
PROMPT_TOKENS = 100


@pytest.fixture(scope="module")
def prompt(smollm2_path: Path) -> Ids:
    metadata = open_model(smollm2_path).tokenizer_source.gguf_metadata
    assert metadata is not None
    ids = Tokenizer.from_gguf_metadata(metadata).encode(TEXT)[:PROMPT_TOKENS]
    assert len(ids) == PROMPT_TOKENS
    return ids


def loader(path: Path, num_threads: int = 2, weights_dtype: str = "int8") -> Callable[..., Engine]:
    ops = NativeOps(num_threads)
    model: CausalLM = load_model(open_model(path), ops, weights_dtype)
    return lambda kv_format="bf16", **settings: Engine(model, ops, kv_format, **settings)


@pytest.fixture(scope="module")
def make(smollm2_path: Path) -> Callable[..., Engine]:
    return loader(smollm2_path)


@pytest.fixture(scope="module")
def expected(make: Callable[..., Engine], prompt: Ids) -> Answer:
    return cases.cold(make, prompt)


def test_cold_again(make: Callable[..., Engine], prompt: Ids, expected: Answer) -> None:
    assert_same(cases.cold(make, prompt), expected, "cold again")


def test_warm(make: Callable[..., Engine], prompt: Ids, expected: Answer) -> None:
    cases.warm(make, prompt, expected)


@pytest.mark.parametrize("offset", range(16))
def test_warm_at_every_offset_within_a_block(
    make: Callable[..., Engine], prompt: Ids, expected: Answer, offset: int
) -> None:
    cases.warm_at_offset(make, prompt, expected, 64 + offset)


def test_a_fully_cached_prompt(make: Callable[..., Engine], prompt: Ids) -> None:
    """All but the last token come from the cache, the last block by copy."""
    whole = prompt[:96]
    engine = make()
    first, again = engine.ask("first", whole), engine.ask("again", whole)
    assert again.final is not None
    assert again.final.num_cached_tokens == 95
    assert engine.num_copies == 1
    assert engine.rows_of("again")[0][1:] == (95, 1)
    assert_same(again, first, "fully cached")


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 64, 512])
def test_chunks(make: Callable[..., Engine], prompt: Ids, expected: Answer, num_tokens: int) -> None:
    cases.in_chunks(make, prompt, expected, num_tokens)


@pytest.mark.parametrize("num_requests", [1, 3, 32])
def test_batch_with_strangers(make: Callable[..., Engine], prompt: Ids, expected: Answer, num_requests: int) -> None:
    cases.among_strangers(make, prompt, expected, num_requests)


def test_after_preemption(make: Callable[..., Engine], prompt: Ids) -> None:
    params = with_tokens(GREEDY, 40)
    cases.after_preemption(make, prompt[:60], params, cases.cold(make, prompt[:60], params))


@pytest.mark.parametrize("num_before", [2, 13])
def test_fork(make: Callable[..., Engine], prompt: Ids, num_before: int) -> None:
    """Inside a block (101 tokens in the blocks), and at its end (112)."""
    cases.after_a_fork(make, prompt, num_before)


def test_without_kv_cache(make: Callable[..., Engine], prompt: Ids, expected: Answer) -> None:
    cases.without_kv_cache(make, prompt, expected)


def test_all_at_once(make: Callable[..., Engine], prompt: Ids, expected: Answer) -> None:
    cases.all_at_once(make, prompt, expected)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads(smollm2_path: Path, prompt: Ids, expected: Answer, num_threads: int) -> None:
    """The others run on two threads."""
    other = loader(smollm2_path, num_threads)
    assert_same(cases.cold(other, prompt), expected, f"{num_threads} threads")
    cases.in_chunks(other, prompt, expected, 7)
    cases.among_strangers(other, prompt, expected, 3)


@pytest.mark.parametrize("block_size", [32, 64])
def test_block_sizes(make: Callable[..., Engine], prompt: Ids, expected: Answer, block_size: int) -> None:
    def other(**settings: object) -> Engine:
        return make(block_size=block_size, **settings)

    assert_same(cases.cold(other, prompt), expected, f"blocks of {block_size}")
    cases.warm(other, prompt, expected)
    cases.warm_at_offset(other, prompt, expected, block_size + 16)
    cases.warm_at_offset(other, prompt, expected, block_size + 19)


def test_sampling_does_not_depend_on_the_company(make: Callable[..., Engine], prompt: Ids) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.2, top_p=0.95, min_p=0.01, frequency_penalty=0.3, logprobs=2)
    alone = cases.cold(make, prompt, params, seed=17)
    engine = make()
    engine.ask("warm-up", prompt[:70], GREEDY)
    engine.add("stranger", cases.other_ids(5, 30, 40_000), SamplingParams(max_tokens=20), seed=17)
    engine.add("target", prompt, params, seed=17)
    engine.add("other seed", prompt, params, seed=18)
    engine.run()
    assert_same(engine.answers["target"], alone, "sampled")
    assert engine.answers["other seed"].token_ids != alone.token_ids
    assert len(set(alone.token_ids)) > 1


def test_f32_kv(make: Callable[..., Engine], prompt: Ids, expected: Answer) -> None:
    def other(**settings: object) -> Engine:
        return make("f32", **settings)

    kept = cases.cold(other, prompt)
    assert kept.logits[0].tobytes() != expected.logits[0].tobytes(), "f32 KV is another format, and shows"
    cases.warm_at_offset(other, prompt, kept, 73)
    cases.in_chunks(other, prompt, kept, 7)
    cases.among_strangers(other, prompt, kept, 3)


@pytest.mark.parametrize("weights_dtype", ["bf16", pytest.param("f32", marks=pytest.mark.large)])
def test_other_weights(smollm2_path: Path, prompt: Ids, expected: Answer, weights_dtype: str) -> None:
    make = loader(smollm2_path, 2, weights_dtype)
    found = cases.cold(make, prompt)
    assert found.logits[0].tobytes() != expected.logits[0].tobytes(), "another weights dtype shows"
    cases.warm_at_offset(make, prompt, found, 73)
    cases.in_chunks(make, prompt, found, 7)
    cases.among_strangers(make, prompt, found, 3)
    cases.without_kv_cache(make, prompt, found)
    assert_same(cases.cold(loader(smollm2_path, 1, weights_dtype), prompt), found, "one thread")


@pytest.mark.large
@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kv_format", tuple(FORMAT_BYTES))
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_dtype(smollm2_path: Path, prompt: Ids, weights_dtype: str, kv_format: str, block_size: int) -> None:
    load = loader(smollm2_path, 2, weights_dtype)
    if FORMAT_BYTES[kv_format].tail_format is not None:  # several KV groups
        settings = {"block_size": block_size, "num_blocks": 256}
        families.gauntlet(lambda **more: load(kv_format, **{**settings, **more}), prompt, offsets=range(13, 99, 17))
    else:
        cases.gauntlet(lambda **settings: load(kv_format, block_size=block_size, **settings), prompt)


def test_int4_kv(make: Callable[..., Engine], prompt: Ids, expected: Answer) -> None:
    """Keys are quantised as their tile fills: hits, chunks and company see the same."""

    def other(**settings: object) -> Engine:
        return make("int4", **{"num_blocks": 192, **settings})

    kept = cases.cold(other, prompt)
    assert kept.logits[0].tobytes() != expected.logits[0].tobytes(), "int4 KV is another format, and shows"
    families.warm_at_offset(other, prompt, kept, 73)
    cases.in_chunks(other, prompt, kept, 7)
    families.fork(other, prompt, 3)
    families.in_a_crowd(other, prompt, kept)


@pytest.mark.large
@pytest.mark.parametrize("num_threads", [1, 4])
def test_every_case_on_other_numbers_of_threads(smollm2_path: Path, prompt: Ids, num_threads: int) -> None:
    cases.gauntlet(loader(smollm2_path, num_threads), prompt)
