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


def test_back_takes_turns_back() -> None:
    talk = Talk("", [Turn("one?", answer("1")), Turn("two?", answer("2")), Turn("three?", answer("3"))])
    assert talk.back("1") == "back before: three? (2 turns left)"
    assert talk.back("9") == "/back 9: there are 2 turns to take back; /back takes one, /back N takes N"
    assert talk.back("x").startswith("/back x: ")
    assert talk.back("2") == "back before: one? (0 turns left)"
    assert talk.turns == []
    assert talk.back("1").startswith("/back 1: there are 0 turns")


def test_branches_share_their_beginning_and_go_on_apart() -> None:
    first, second, third = (Turn(f"{word}?", answer(word)) for word in ("one", "two", "three"))
    talk = Talk("", [first, second])
    assert talk.branch("1") == "in the new branch b2, behind turn 1; /switch goes to another one"
    talk.turns.append(third)
    assert talk.turns == [first, third]
    assert talk.outline()[:4] == [
        "branch b2, 2 turns:",
        "  1  one?",
        "  2  three?",
        "branch main, 2 turns, the first 1 of them the same",
    ]
    assert talk.stats()[0] == "branch b2:"
    assert talk.branch("0", "fresh").startswith("in the new branch fresh")
    assert talk.turns == []
    assert talk.switch("main") == "in the branch main, behind turn 2"
    assert talk.turns == [first, second]
    assert talk.switch("b2") == "in the branch b2, behind turn 2"
    assert talk.turns == [first, third]
    assert talk.branch("1").startswith("in the new branch b3")
    talk.start_over()
    assert (talk.name, talk.turns, talk.others) == ("main", [], {})


def test_branches_that_cannot_be_had_change_nothing() -> None:
    talk = Talk("", [Turn("one?", answer("1"))])
    assert talk.branch("2") == "/branch 2: give the number of a turn, from 0 (the beginning) to 1"
    assert talk.branch("x").startswith("/branch x: ")
    assert talk.branch("1", "two words") == "'two words' cannot be the name of a branch; give it one word"
    assert talk.branch("1", "main") == "there is a branch main already; /switch main goes there"
    assert talk.switch("main") == "this is the branch main"
    assert talk.switch("other") == "there is no branch 'other'; there are main"
    assert (talk.name, len(talk.turns), talk.others) == ("main", 1, {})
