"""A conversation's messages and what its turns took from the cache."""

from __future__ import annotations

from typing import Any

from octavo.cli.session import INTERRUPTED, Answer
from octavo.cli.talk import Talk, Turn


def answer(text: str = "yes", **more: Any) -> Answer:
    values: dict[str, Any] = {
        "text": text,
        "token_ids": (1, 2, 3),
        "scored_tokens": (),
        "finish_reason": "stop",
        "stop_reason": None,
        "error": None,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 30,
        "num_output_tokens": 3,
        "first_token_s": 0.5,
        "total_s": 1.5,
    }
    return Answer(**{**values, **more})


def test_messages_hold_the_history_in_order() -> None:
    talk = Talk("be brief", [Turn("one?", answer("1")), Turn("two?", answer("2"))])
    assert talk.messages("three?") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "three?"},
    ]
    talk.start_over()
    assert talk.messages("again?") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "again?"}]
    talk.start_over("")
    assert talk.messages("again?") == [{"role": "user", "content": "again?"}]


def test_stats_tell_the_cached_tokens_of_each_turn() -> None:
    assert Talk().stats() == ["no turns yet"]
    talk = Talk("", [Turn("one?", answer(num_cached_tokens=0)), Turn("two?", answer())])
    first, second = talk.stats()
    assert first.startswith("turn 1: 40 prompt tokens, 0 of them cached (0%), 3 new")
    assert second.startswith("turn 2: 40 prompt tokens, 30 of them cached (75%), 3 new")
    assert second.endswith("first token after 0.500 s, 2.0 tokens/s")


def test_speed_is_of_the_tokens_after_the_first() -> None:
    assert answer().tokens_per_s == 2.0
    assert answer(num_output_tokens=1).tokens_per_s is None
    assert answer(total_s=0.5).tokens_per_s is None
    assert answer(finish_reason=INTERRUPTED).was_interrupted
    assert not answer().was_interrupted
