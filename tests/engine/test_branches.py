"""Requests for several answers, through the asynchronous engine: which deltas come, when, and with what counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.seeds import branch_seed
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import GenerationDelta, GenerationRequest, merge_deltas
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import CapacityError
from tests.engine.engine_case import PacedExecutor, SayingExecutor, new_engine, tokens_of

PROMPT = tokens_of("a prompt of some length")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from tests.engine.engine_case import tiny_tokenizer

    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(engine: AsyncEngine, main: Coroutine[Any, Any, Any]) -> Any:
    async def around() -> Any:
        engine.start()
        try:
            return await main
        finally:
            status = (await engine.status()).core
            assert (status.running, status.waiting, status.used_blocks) == (0, 0, 0)
            await engine.shutdown(5)

    return asyncio.run(around())


async def read(engine: AsyncEngine, params: SamplingParams, *, every_token: bool = True) -> list[GenerationDelta]:
    generation = await engine.submit([GenerationRequest("r", PROMPT, params, every_token=every_token)])
    deltas = []
    while not generation.finished:
        deltas += [delta for _, delta in await generation.take()]
    return deltas


def answers(deltas: list[GenerationDelta]) -> list[GenerationDelta]:
    of_branch: dict[int, list[GenerationDelta]] = {}
    for delta in deltas:
        of_branch.setdefault(delta.branch, []).append(delta)
    for pieces in of_branch.values():
        assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return [merge_deltas(of_branch[branch]) for branch in range(len(of_branch))]


@pytest.mark.parametrize("every_token", [True, False])
def test_each_answer_is_that_of_a_separate_request(tokenizer: Tokenizer, every_token: bool) -> None:
    engine = new_engine(tokenizer)

    async def main() -> None:
        deltas = await read(engine, SamplingParams(max_tokens=12, n=3, seed=7), every_token=every_token)
        found = answers(deltas)
        assert len(found) == 3
        assert every_token or len(deltas) == 3
        for branch, answer in enumerate(found):
            (alone,) = answers(await read(engine, SamplingParams(max_tokens=12, seed=branch_seed(7, branch))))
            assert (answer.text, answer.token_ids) == (alone.text, alone.token_ids)
            assert (answer.num_prompt_tokens, answer.num_output_tokens) == (len(PROMPT), 12)
        assert sorted(delta.open_branches for delta in deltas if delta.finish_reason) == [0, 1, 2]
        assert max(delta.num_generated_tokens for delta in deltas) == 36
        sharing = [delta.sharing for delta in deltas if delta.sharing is not None]
        assert len(sharing) == 1
        assert sharing[0].peak_saved_blocks == 4, "two blocks of prompt, one of them unfilled, for two more branches"

    run(engine, main())


@pytest.mark.parametrize("max_tokens", [3, 60])
def test_a_stop_string_ends_one_answer(tokenizer: Tokenizer, max_tokens: int) -> None:
    """Also where another ends in the same step."""
    engine = new_engine(tokenizer)
    stops = tuple("aeiouAEIOU0123")

    async def main() -> None:
        reasons = set()
        for seed in range(12):
            reasons |= await compare(seed)
        assert reasons == {"stop", "length"} if max_tokens == 3 else {"stop"}

    async def compare(seed: int) -> set[str | None]:
        found = answers(await read(engine, SamplingParams(max_tokens=max_tokens, n=4, seed=seed, stop=stops)))
        assert len(found) == 4
        for branch, answer in enumerate(found):
            one = SamplingParams(max_tokens=max_tokens, seed=branch_seed(seed, branch), stop=stops)
            (alone,) = answers(await read(engine, one))
            assert (answer.text, answer.finish_reason) == (alone.text, alone.finish_reason)
        return {answer.finish_reason for answer in found}

    run(engine, main())


@pytest.mark.parametrize("every_token", [True, False])
def test_the_best_come_at_the_end_in_order(tokenizer: Tokenizer, every_token: bool) -> None:
    engine = new_engine(tokenizer)

    async def main() -> None:
        every = []
        for branch in range(5):
            params = SamplingParams(max_tokens=6, seed=branch_seed(2, branch), n=1, best_of=2)
            (chosen,) = await read(engine, params)
            assert chosen.score is not None
            alone = SamplingParams(max_tokens=6, seed=branch_seed(2, branch))
            every.append((await read(engine, alone), branch))
        deltas = await read(engine, SamplingParams(max_tokens=6, seed=2, n=2, best_of=5), every_token=every_token)
        assert [(delta.branch, delta.open_branches) for delta in deltas] == [(0, 1), (1, 0)]
        first, second = deltas
        assert first.score is not None
        assert second.score is not None
        assert first.score >= second.score
        texts = {merge_deltas(pieces).text for pieces, _ in every}
        assert {first.text, second.text} <= texts
        assert first.num_generated_tokens == second.num_generated_tokens == 30
        assert first.scored_tokens == (), "log-probabilities that chose are not shown unless they were asked for"

    run(engine, main())


def test_a_beam_search_comes_whole(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer)

    async def main() -> None:
        params = SamplingParams(max_tokens=8, n=2, best_of=3, use_beam_search=True)
        deltas = await read(engine, params)
        assert [(delta.branch, delta.open_branches, delta.finish_reason) for delta in deltas] == [
            (0, 1, "length"),
            (1, 0, "length"),
        ]
        for delta in deltas:
            assert tokenizer.decode(delta.token_ids) == delta.text
            assert len(delta.token_ids) == delta.num_output_tokens == 8
            assert delta.num_generated_tokens == 24
        assert deltas[1].sharing is not None
        status = await engine.status()
        assert dict(status.finished)["length"] == 2
        assert status.core.branch_peak_saved_blocks > 0

    run(engine, main())


def test_an_abort_ends_every_answer(tokenizer: Tokenizer) -> None:
    executor = PacedExecutor(SayingExecutor("x" * 500))
    engine = new_engine(tokenizer, executor, max_model_len=2000, num_blocks=400)

    async def main() -> None:
        generation = await engine.submit([GenerationRequest("r", PROMPT, SamplingParams(max_tokens=900, n=3))])
        await generation.take()
        (memory,) = await engine.branch_memory("r")
        assert len(memory.tables) == 3
        assert await engine.abort("r")
        deltas = []
        while not generation.finished:
            deltas += [delta for _, delta in await generation.take()]
        assert sorted(delta.branch for delta in deltas if delta.finish_reason == "abort") == [0, 1, 2]
        assert await engine.branch_memory() == ()
        assert not await engine.abort("r")

    run(engine, main())


def test_what_cannot_fit_is_refused(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, num_blocks=8)

    async def main() -> None:
        with pytest.raises(CapacityError, match=r"1 shared KV blocks \+ 4 x 4 = 17"):
            await engine.submit([GenerationRequest("r", PROMPT, SamplingParams(max_tokens=50, n=4))])

    run(engine, main())


def test_scores_of_the_prompt_come_with_the_first_answer(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer)

    async def main() -> None:
        first, second = answers(await read(engine, SamplingParams(max_tokens=2, n=2, prompt_logprobs=1)))
        assert [score.token_id for score in first.prompt_scores] == PROMPT[1:]
        assert second.prompt_scores == ()

    run(engine, main())


def test_an_id_may_be_used_again_at_once(tokenizer: Tokenizer) -> None:
    """The core tells the end of a request that a stop string ended with its next step: not to the next of that name."""
    engine = new_engine(tokenizer, SayingExecutor("Hello, world."))

    async def main() -> None:
        for _ in range(20):
            (answer,) = answers(await read(engine, SamplingParams(max_tokens=60, stop=("wor",))))
            assert (answer.text, answer.finish_reason) == ("Hello, ", "stop")

    run(engine, main())


def test_each_step_tells_what_branches_hold(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer)
    seen = []

    async def main() -> None:
        requests = [
            GenerationRequest("plain", PROMPT, SamplingParams(max_tokens=20)),
            GenerationRequest("samples", PROMPT, SamplingParams(max_tokens=6, n=3)),
        ]
        generation = await engine.submit(requests, on_memory=seen.append)
        while not generation.finished:
            await generation.take()

    run(engine, main())
    assert len(seen) == 5, "after each step but the last, which frees all"
    assert {memory.request_id for (memory,) in seen} == {"samples"}
    assert {len(memory.tables) for (memory,) in seen} == {3}
