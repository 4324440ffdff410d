"""Stop strings: found across pieces, held back as little as can be, the same however text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.stop_strings import StopChecker
from octavo.errors import InvalidRequestError


def run(stop: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """All the text that was sent, and the stop string."""
    checker = StopChecker(stop, include)
    sent = ""
    for piece in pieces:
        text, matched = checker.push(piece)
        sent += text
        if matched is not None:
            return sent, matched
    return sent + checker.flush(), None


def test_a_stop_string_is_found_across_pieces() -> None:
    assert run(("END",), ["abE", "N", "Dxyz"]) == ("ab", "END")
    assert run(("END",), ["abE", "N", "Dxyz"], include=True) == ("abEND", "END")


def test_only_what_may_become_a_stop_string_is_held() -> None:
    checker = StopChecker(("\n\nUser:",))
    assert checker.push("hello\n") == ("hello", None)
    assert checker.push("x") == ("\nx", None)
    assert checker.push("\n\n\nUs") == ("\n", None)
    assert checker.push("e") == ("", None)
    assert checker.push("ful") == ("\n\nUseful", None)
    assert checker.flush() == ""


def test_flush_gives_what_was_held() -> None:
    checker = StopChecker(("END",))
    assert checker.push("the EN") == ("the ", None)
    assert checker.flush() == "EN"
    assert checker.flush() == ""


def test_the_one_that_ends_first_wins_and_then_the_longest() -> None:
    assert run(("abc", "ab"), ["xabc"]) == ("x", "ab")
    assert run(("c", "bcd"), ["abcd"]) == ("ab", "c")
    assert run(("c", "abc", "bc"), ["xabc"]) == ("x", "abc")
    assert run(("zz", "yy"), ["a yy zz"]) == ("a ", "yy")


def test_a_stop_string_that_repeats_itself() -> None:
    assert run(("aab",), ["a", "a", "a", "b"]) == ("a", "aab")
    assert run(("ababc",), list("abababc")) == ("ab", "ababc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty string at place 1"):
        StopChecker(("a", ""))


def test_without_stop_strings_all_is_sent_at_once() -> None:
    assert StopChecker(()).push("anything") == ("anything", None)


LETTERS = st.text("ab\n", max_size=30)


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4), LETTERS, st.booleans(), st.data())
def test_the_cut_into_pieces_changes_nothing(stops: list[str], text: str, include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop = tuple(stops)
    sent, matched = run(stop, pieces, include)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(stop)]
    if not ends:
        assert (sent, matched) == (text, None)
        return
    longest = max((one for one in stop if text[: ends[0]].endswith(one)), key=len)
    assert matched == longest
    assert sent == (text[: ends[0]] if include else text[: ends[0] - len(longest)])


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), LETTERS)
def test_what_is_held_is_the_longest_beginning_of_a_stop_string(stops: list[str], text: str) -> None:
    checker = StopChecker(tuple(stops))
    sent, matched = checker.push(text)
    if matched is None:
        beginnings = {one[:length] for one in stops for length in range(1, len(one))}
        expected = max((b for b in beginnings if text.endswith(b)), key=len, default="")
        assert text == sent + expected
        assert checker.flush() == expected
