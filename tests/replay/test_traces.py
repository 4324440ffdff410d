"""Trace files: each format, gzip, standard input, damaged lines, and the way back to Mooncake's."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.replay.lines import BadLines, TraceError, read_lines, trace_files
from octavo.replay.trace import TraceRequest
from octavo.replay.trace_formats import ReadOptions, mooncake_line, read_trace, rough_tokens
from tests.replay.trace_files import mooncake, write_lines


def read(path: Path, bad: BadLines | None = None, **options: object) -> list[TraceRequest]:
    return list(read_trace(str(path), bad or BadLines(), ReadOptions(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake(tmp_path: Path, packed: bool) -> None:
    lines = [mooncake([0, 1, 2], length=1100, time_ms=1500), mooncake([0, 5])]
    first, second = read(write_lines(tmp_path / "t", lines, packed=packed))
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (1.5, 1100, 5)
    assert (list(first.block_ids), first.block_tokens, list(second.block_ids)) == ([0, 1, 2], 512, [0, 5])


def test_mooncake_goes_out_as_it_came_in(tmp_path: Path) -> None:
    lines = [mooncake([0, 1, 2], length=1100, time_ms=1500), {**mooncake([0, 5]), "tenant": "a"}]
    requests = read(write_lines(tmp_path / "t", lines))
    assert [json.loads(mooncake_line(one, list(one.block_ids))) for one in requests] == lines  # type: ignore[arg-type]


def test_ids_of_blocks_alone_are_chained_when_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", [mooncake([7, 7, 8]), mooncake([7, 8])])
    with pytest.raises(TraceError, match=r"line 1: hash_ids names a block twice.*--hash-ids plain"):
        read(path)
    first, second = read(path, hash_ids_are_chained=False)
    assert len(set(first.block_ids)) == 3
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] not in first.block_ids


def test_weka(tmp_path: Path) -> None:
    inner = {"t": 6.0, "in": 64, "out": 2, "hash_ids": [9]}
    document = {
        "id": "s1",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {"t": 0.5, "in": 130, "out": 7, "hash_ids": [1, 2, 3]},
            {"t": 1.0, "type": "subagent", "requests": [inner]},
            {"t": 5.0, "in": 200, "out": 7, "hash_ids": [1, 2]},
        ],
    }
    first, second, third = read(write_lines(tmp_path / "t.json", [document]))
    assert (first.num_prompt_tokens, first.block_tokens, first.namespace, first.tenant) == (130, 64, "s1", "s1")
    assert second.num_prompt_tokens == 128, "no more tokens than the blocks that are named"
    assert (third.arrival_s, list(third.block_ids)) == (6.0, [9]), "a subagent's requests come when they were sent"


def test_a_folder_of_sessions_is_read_by_arrival(tmp_path: Path) -> None:
    for name, at in (("a.json", [0.0, 9.0]), ("b.json", [4.0])):
        requests = [{"t": t, "in": 64, "out": 1, "hash_ids": [1]} for t in at]
        write_lines(tmp_path / name, [{"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}])
    assert [one.namespace for one in read(tmp_path)] == ["a.json", "b.json", "a.json"]


def test_lmcache(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 5_000_000, "input": "How are you?", "output": "Well", "session_id": "s"},
        {"timestamp": 7_500_000, "input": "How are you? Well. And", "output": "", "session_id": "s"},
    ]
    first, second = read(write_lines(tmp_path / "t", lines))
    assert (first.arrival_s, second.arrival_s, first.tenant) == (0.0, 2.5, "s")
    assert first.prompt_token_ids is not None
    assert second.prompt_token_ids is not None
    assert second.prompt_token_ids[:3] == first.prompt_token_ids, "four letters a token: the prefix is the same"
    whole = read(tmp_path / "t", tokenize=lambda text: list(text.encode()))
    assert [one.num_prompt_tokens for one in whole] == [12, 22]


def test_talks(tmp_path: Path) -> None:
    talk = {
        "id": "t1",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": "Bye"},
        ],
    }
    first, second = read(write_lines(tmp_path / "t", [talk]), tokenize=lambda text: list(text.encode()))
    assert first.prompt_token_ids is not None
    assert first.output_token_ids is not None
    assert second.prompt_token_ids is not None
    said = first.prompt_token_ids + first.output_token_ids
    assert second.prompt_token_ids[: len(said)] == said


def test_text(tmp_path: Path) -> None:
    lines = ["User: Hello", "there", "Assistant: Hi", "User: Bye", "Assistant: Bye", "---", "Human: One", "AI: Two"]
    first, second, third = read(write_lines(tmp_path / "t", lines), tokenize=lambda text: list(text.encode()))
    assert bytes(list(first.prompt_token_ids or [])) == b"user: Hello\nthere\n"
    assert bytes(list(first.output_token_ids or [])) == b"Hi"
    assert bytes(list(second.prompt_token_ids or [])) == b"user: Hello\nthere\nHiuser: Bye\n"
    assert (first.session, third.session, bytes(list(third.output_token_ids or []))) == ("0", "1", b"Two")
    bad = BadLines(skip=True)
    assert len(read(write_lines(tmp_path / "t", ["User: alone", "---", *lines]), bad)) == 3
    assert "has no answer" in bad.reasons[0]


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", "74,18,92,4.1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,74,18"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,74,18,92,chat"),
    ],
)
def test_lengths(tmp_path: Path, header: str, row: str) -> None:
    (request,) = read(write_lines(tmp_path / "t", [header, row]))
    assert (request.num_prompt_tokens, request.num_output_tokens, request.arrival_s) == (74, 18, 0.0)
    assert not request.block_ids


def test_first_turns_of_talks(tmp_path: Path) -> None:
    """A row holds the talk so far, or begins another one."""
    rows = ["290,905", "1402,711", "2497,918", "41,950", "238,787", "1045,742", "60,5", "60,5"]
    path = write_lines(tmp_path / "t", ["num_prefill_tokens,num_decode_tokens", *rows])
    assert [one.num_prompt_tokens for one in read(path, only_first_turns=True)] == [290, 41, 238, 60, 60]
    assert [one.num_prompt_tokens for one in read(path, only_first_turns=True, limit=2)] == [290, 41]
    assert len(read(path)) == 8


def test_only_lengths_have_turns_row_by_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format mooncake; --turns first is for files of lengths"):
        read(write_lines(tmp_path / "t", [mooncake([0])]), only_first_turns=True)
    with pytest.raises(ConfigError, match="leave --turns first out"):
        list(read_trace("generate:sharegpt", BadLines(), ReadOptions(only_first_turns=True)))


def test_times_of_lengths_count_from_the_first(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.680,7,1", "2023-11-16 18:16:50.995,7,1"]
    assert read(write_lines(tmp_path / "t", lines))[1].arrival_s == pytest.approx(64.315)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "it is no JSON"),
        ('{"input_length": 5, "hash_ids"', "it is no JSON"),
        ({"output_length": 1, "hash_ids": [1]}, "no field 'input_length'"),
        (mooncake([1], length=0), "input_length is 0; it must be a whole number from 1"),
        (mooncake([1], length=-7), "input_length is -7"),
        ({"input_length": 512, "hash_ids": "x"}, "hash_ids is 'x'; it must be a list"),
        ({"input_length": 1e300, "hash_ids": [1]}, "input_length is"),
        ('{"input_length": 5, "hash_ids": [1], "timestamp": 1e400}', "it arrives at inf s"),
        ('{"input_length": 5, "hash_ids": [1], "timestamp": NaN}', "it arrives at nan s"),
        ({"input_length": 10**12, "hash_ids": [1]}, "input_length is 1000000000000"),
        ({"input_length": 5, "hash_ids": [[1]]}, "unhashable"),
        ("[" * 100_000, "it is no JSON|nest|recursion|object"),
    ],
)
def test_a_bad_line_is_named_and_passed_over_when_told(tmp_path: Path, line: object, reason: str) -> None:
    path = write_lines(tmp_path / "t", [mooncake([1]), line, mooncake([2])])
    with pytest.raises(TraceError, match=rf"t, line 2: .*({reason}).*--bad-lines skip"):
        read(path)
    bad = BadLines(skip=True)
    assert [list(one.block_ids) for one in read(path, bad)] == [[1], [2]]
    assert bad.count == 1
    assert bad.reasons[0].startswith("t, line 2: ")


def test_bad_lines_are_counted_but_not_all_kept(tmp_path: Path) -> None:
    bad = BadLines(skip=True)
    read(write_lines(tmp_path / "t", [mooncake([1]), *(["{"] * 500)]), bad)
    assert bad.count == 500
    assert len(bad.reasons) < 50


def test_what_is_no_trace_is_refused_with_what_is_one(tmp_path: Path) -> None:
    for line in ("some words", {"colour": "red"}):
        with pytest.raises(TraceError, match="Mooncake"):
            read(write_lines(tmp_path / "t", [line]))
    with pytest.raises(TraceError, match="has no line"):
        read(write_lines(tmp_path / "t", []))
    with pytest.raises(ConfigError, match="there is no trace"):
        trace_files(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty folder"):
        trace_files(str(tmp_path / "empty"))


def test_a_gzip_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", [mooncake([n]) for n in range(5000)], packed=True)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(TraceError, match="is cut off or damaged after line"):
        read(path)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(json.dumps(mooncake([1])).encode() + b"\n\xff\xfe\n" + json.dumps(mooncake([2])).encode())
    bad = BadLines(skip=True)
    assert len(read(path, bad)) == 2
    assert "no UTF-8 text" in bad.reasons[0]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (json.dumps(mooncake([1])) + "\n").encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert [list(one.block_ids) for one in read_trace("-", BadLines())] == [[1]]


def test_lines_come_as_they_are_written() -> None:
    """Streaming: a line is handed on before the next one has been read."""

    class Slow(io.RawIOBase):
        def __init__(self) -> None:
            self.sent = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            self.sent += 1
            assert self.sent < 50, "everything is read before anything is handed on"
            line = (json.dumps(mooncake([self.sent])) + "\n").encode()
            buffer[: len(line)] = line
            return len(line)

    lines = read_lines("t", BadLines(), io.BufferedReader(Slow()))
    assert [json.loads(next(lines).text)["hash_ids"] for _ in range(3)] == [[1], [2], [3]]


def test_rough_tokens_are_the_same_in_every_process() -> None:
    assert rough_tokens("abcdefgh") == [3984772369, 137591733]
