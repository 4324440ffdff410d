"""Messages from lines: single ones, continued ones, blocks, and every way that input can end."""

from __future__ import annotations

import pytest

from octavo.cli.prompt_reader import FIRST_PROMPT, NEXT_PROMPT, ReadLine, read_message


def lines(*texts: str, prompts: list[str] | None = None) -> ReadLine:
    left = iter(texts)

    def read(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


def test_a_line_is_a_message() -> None:
    read = lines("  hello there ", "", "again")
    assert [read_message(read) for _ in range(3)] == ["hello there", "", "again"]
    with pytest.raises(EOFError):
        read_message(read)


def test_a_backslash_goes_on_in_the_next_line() -> None:
    prompts: list[str] = []
    assert read_message(lines("one \\", "two\\", "three", prompts=prompts)) == "one \ntwo\nthree"
    assert prompts == [FIRST_PROMPT, NEXT_PROMPT, NEXT_PROMPT]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (['"""', "one", "", "  two\\", '"""'], "one\n\n  two\\"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        (['"""', '"""'], ""),
        (['"""', "/quit", '"""'], "/quit"),
    ],
)
def test_three_quotes_begin_and_end_a_block(given: list[str], message: str) -> None:
    read = lines(*given, "after")
    assert read_message(read) == message
    assert read_message(read) == "after"


@pytest.mark.parametrize(("given", "message"), [(["one\\"], "one"), (['"""', "one", "two"], "one\ntwo"), (['"""'], "")])
def test_the_end_of_input_ends_a_half_written_message(given: list[str], message: str) -> None:
    read = lines(*given)
    assert read_message(read) == message
    with pytest.raises(EOFError):
        read_message(read)
