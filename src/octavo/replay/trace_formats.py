"""What a line of each kind of trace means. It knows no file and no cache; `read_trace` joins it with `lines`.

Formats: `mooncake` (JSONL: timestamp, input_length, output_length, hash_ids), `weka` (one JSON document a session),
`lmcache` (JSONL: input and output as text), `talks` (JSONL: messages), `text` (lines that begin with who speaks, talks
parted by a line of dashes), `lengths` (CSV with a header), `record` (what `octavo serve --record` writes).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any
from zlib import crc32

from octavo.errors import ConfigError
from octavo.replay.generated import PREFIX, generate
from octavo.replay.lines import BadLines, NumberedLine, TraceError, read_lines, trace_files
from octavo.replay.recording import requests_of
from octavo.replay.trace import KEY_BYTES, TraceRequest, token_array

Tokenize = Callable[[str], Sequence[int]]
FORMATS = ("auto", "mooncake", "weka", "lmcache", "talks", "text", "lengths", "record")
_MAX_TOKENS = 1 << 26
_MAX_SECONDS = 1e12
_SPEAKER = re.compile(r"(system|user|human|assistant|ai|bot)\s*:\s*(.*)", re.IGNORECASE)
_ANSWERS = ("assistant", "ai", "bot")
# column names of the known length files -> what they mean
_PROMPT_COLUMNS = ("num_prefill_tokens", "contexttokens", "request tokens", "input_tokens", "prompt_tokens")
_OUTPUT_COLUMNS = ("num_decode_tokens", "generatedtokens", "response tokens", "output_tokens", "completion_tokens")
_TIME_COLUMNS = ("timestamp", "arrival_s", "arrival_time")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    trace_format: str = "auto"
    hash_block_tokens: int = 512  # tokens behind one hash id of a Mooncake line
    hash_ids_are_chained: bool = True  # False: an id names a block's content, whatever stands before it
    tokenize: Tokenize | None = None  # for traces of text; None: by the letter, see `rough_tokens`
    limit: int | None = None  # requests, at most
    only_first_turns: bool = False  # of lengths, where each row of a talk holds those above it


def rough_tokens(text: str) -> list[int]:
    """Token ids without a model: one for every four characters, by content. Counts are rough, prefixes are exact."""
    return [crc32(text[start : start + 4].encode("utf-8", "replace")) for start in range(0, len(text), 4)]


def read_trace(source: str, bad: BadLines, options: ReadOptions | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace, one by one as the file has them; of a folder of sessions, in the order of arrival.

    Raises TraceError for a line that cannot be read (unless `bad` skips it), ConfigError for no file.
    """
    options = options or ReadOptions()
    files = [] if source.startswith(PREFIX) else trace_files(source)
    if not files and options.only_first_turns:
        raise ConfigError(f"{source} has no turns that follow each other row by row; leave --turns first out")
    if not files:
        found = generate(source)
    elif len(files) == 1:
        found = _read_file(files[0], bad, options)
    else:  # sessions side by side: each file is one, and they are small
        each = [list(_read_file(file, bad, options)) for file in files]
        found = iter(sorted((one for of_file in each for one in of_file), key=lambda one: one.arrival_s))
    for count, request in enumerate(found):
        if options.limit is not None and count >= options.limit:
            return
        yield request


def _read_file(name: str, bad: BadLines, options: ReadOptions) -> Iterator[TraceRequest]:
    lines = read_lines(name, bad)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{name} has no line; give a trace")
    kind = options.trace_format if options.trace_format != "auto" else guess_format(first)
    everything = _chain(first, lines)
    if options.only_first_turns and kind != "lengths":
        raise ConfigError(f"{name} is of format {kind}; --turns first is for files of lengths: leave it out")
    if kind == "lengths":
        found = _read_lengths(everything, bad)
        yield from _first_turns(found) if options.only_first_turns else found
    elif kind == "weka":
        yield from _read_weka(everything, bad)
    elif kind == "text":
        yield from _read_text(everything, bad, options)
    elif kind == "record":
        yield from requests_of(lines)
    else:
        parse = {"mooncake": _mooncake, "lmcache": _lmcache, "talks": _talk}[kind]
        first_time: float | None = None
        for line in everything:
            try:
                requests = parse(json.loads(line.text), options)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                bad.found(line.name, line.number, _reason(error, kind))
                continue
            if first_time is None and requests:
                first_time = requests[0].arrival_s if kind == "lmcache" else 0.0
            for request in requests:
                yield request if not first_time else _shifted(request, first_time)


def _chain(first: NumberedLine, rest: Iterator[NumberedLine]) -> Iterator[NumberedLine]:
    yield first
    yield from rest


def guess_format(first: NumberedLine) -> str:
    """By the first line. Raises TraceError for one that is none of them."""
    text = first.text
    if not text.startswith("{"):
        names = [name.strip().lower() for name in text.split(",")]
        if any(name in _PROMPT_COLUMNS for name in names):
            return "lengths"
        if _SPEAKER.match(text):
            return "text"
        raise TraceError(
            f"{first.name} begins with {text[:60]!r}, which is no trace that is known: expected JSON lines (Mooncake, "
            f"LMCache, talks), a WEKA session, or CSV with a column {' or '.join(_PROMPT_COLUMNS)}; say which it is "
            "with --format"
        )
    marks = {'"octavo_record"': "record", '"hash_id_scope"': "weka", '"hash_ids"': "mooncake"}
    marks |= {'"messages"': "talks", '"conversations"': "talks", '"input"': "lmcache"}
    head = text[:100_000]
    for mark, kind in marks.items():
        if mark in head:
            return kind
    raise TraceError(
        f"{first.name} begins with a JSON object that is of no known trace; known are lines with hash_ids (Mooncake), "
        "with input and output (LMCache), with messages (talks), and WEKA sessions"
    )


def _reason(error: Exception, kind: str) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON ({error.msg} at character {error.pos})"
    if isinstance(error, KeyError):
        return f"it has no field {error.args[0]!r}, which a line of a {kind} trace has"
    return str(error) or type(error).__name__


def _count(value: Any, name: str, least: int = 0) -> int:
    number = int(value)
    if number != float(value) or not least <= number <= _MAX_TOKENS:
        raise ValueError(f"{name} is {value}; it must be a whole number from {least} to {_MAX_TOKENS}")
    return number


def _arrival(seconds: float) -> float:
    if not -_MAX_SECONDS <= seconds <= _MAX_SECONDS:  # also what is no number
        raise ValueError(f"it arrives at {seconds} s; that must be a number of seconds up to {_MAX_SECONDS:g}")
    return seconds


def _shifted(request: TraceRequest, first_s: float) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s - first_s)


def _mooncake(line: dict[str, Any], options: ReadOptions) -> list[TraceRequest]:
    prompt = _count(line["input_length"], "input_length", 1)
    output = _count(line.get("output_length", 1), "output_length")
    ids, size = line["hash_ids"], options.hash_block_tokens
    if not isinstance(ids, list):
        raise TypeError(f"hash_ids is {ids!r}; it must be a list")
    if len(ids) > -(-prompt // size):
        prompt = len(ids) * size  # ids of a chat template that the length leaves out
    if not options.hash_ids_are_chained:
        ids = _chained(ids)
    elif len(set(ids)) != len(ids):
        raise ValueError(
            "hash_ids names a block twice, so ids are not of whole prefixes; if they are of each block's own content, "
            "say --hash-ids plain"
        )
    time = line.get("timestamp", 0)  # milliseconds; nanoseconds since 1970 where it is a text
    arrival = _arrival(int(time) / 1e9 if isinstance(time, str) else float(time) / 1e3)
    tenant, namespace = str(line.get("tenant", "")), str(line.get("namespace", ""))
    priority = int(line.get("priority", 0))
    return [TraceRequest(arrival, prompt, output, ids, size, tenant=tenant, namespace=namespace, priority=priority)]


def _chained(ids: list[Any]) -> list[bytes]:
    """Names of prefixes, from names of the blocks in them."""
    parent, names = b"", []
    for one in ids:
        parent = blake2b(str(one).encode(), digest_size=KEY_BYTES, key=parent).digest()
        names.append(parent)
    return names


def _read_weka(lines: Iterator[NumberedLine], bad: BadLines) -> Iterator[TraceRequest]:
    first = next(lines)
    text = "\n".join([first.text, *(line.text for line in lines)])
    try:
        document = json.loads(text)
        size, session = _count(document["block_size"], "block_size", 1), str(document["id"])
        requests = list(document["requests"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        bad.found(first.name, first.number, _reason(error, "weka"))
        return
    namespace = session if document.get("hash_id_scope") == "local" else ""
    found = []
    for index, one in enumerate(_with_subagents(requests)):
        try:
            prompt, output = _count(one["in"], "in", 1), _count(one.get("out", 0), "out")
            if one["hash_ids"]:
                ids = one["hash_ids"][: -(-prompt // size)]
                prompt = min(prompt, len(ids) * size)
                found.append(
                    TraceRequest(
                        _arrival(float(one["t"])),
                        prompt,
                        output,
                        ids,
                        size,
                        tenant=session,
                        namespace=namespace,
                        session=session,
                    )
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            bad.found(first.name, first.number, f"request {index}: {_reason(error, 'weka')}")
    yield from sorted(found, key=lambda request: request.arrival_s)


def _with_subagents(requests: list[Any]) -> Iterator[Any]:
    """A subagent's requests stand inside the entry of the agent that started it."""
    for one in requests:
        if isinstance(one, dict) and isinstance(one.get("requests"), list):
            yield from _with_subagents(one["requests"])
        else:
            yield one


def _lmcache(line: dict[str, Any], options: ReadOptions) -> list[TraceRequest]:
    tokenize = options.tokenize or rough_tokens
    prompt, output = token_array(tokenize(line["input"])), token_array(tokenize(line.get("output", "")))
    if not prompt:
        raise ValueError("input is empty")
    arrival = _arrival(int(line["timestamp"]) / 1e6)
    session = str(line.get("session_id", ""))
    return [TraceRequest(arrival, len(prompt), len(output), (), 0, prompt, output, tenant=session, session=session)]


def _talk(line: dict[str, Any], options: ReadOptions) -> list[TraceRequest]:
    """A talk: a request for each answer, which begins with all that was said before."""
    tokenize = options.tokenize or rough_tokens
    messages = line.get("messages") or line.get("conversations") or []
    session, arrival = str(line.get("id", "")), _arrival(float(line.get("timestamp", 0.0)))
    found, said = [], token_array([])
    for message in messages:
        role = str(message.get("role", message.get("from", "")))
        text = str(message.get("content", message.get("value", "")))
        if role in ("assistant", "gpt", "bot") and said:
            answer = token_array(tokenize(text))
            prompt = said[:]
            tenant = str(line.get("tenant", session))
            found.append(
                TraceRequest(arrival, len(prompt), len(answer), (), 0, prompt, answer, tenant=tenant, session=session)
            )
            arrival = _arrival(arrival + float(line.get("think_s", 0.0)))
        said += token_array(tokenize(text if role in ("assistant", "gpt", "bot") else f"{role}: {text}\n"))
    if not found:
        raise ValueError("the talk has no answer (a message of the role assistant after another one)")
    return found


def _read_text(lines: Iterator[NumberedLine], bad: BadLines, options: ReadOptions) -> Iterator[TraceRequest]:
    """`User: ...` and `Assistant: ...`, each with the lines that follow it; a line of dashes ends a talk."""
    said: list[dict[str, str]] = []
    number, first = 0, None

    def talk() -> Iterator[TraceRequest]:
        try:
            yield from _talk({"id": str(number), "messages": said}, options)
        except ValueError as error:
            bad.found(first.name if first else "", first.number if first else 0, str(error))

    for line in lines:
        speaks = _SPEAKER.match(line.text)
        if not line.text.strip("-"):
            yield from talk()
            said, number, first = [], number + 1, None
        elif speaks is not None:
            first = first or line
            role = "assistant" if speaks[1].lower() in _ANSWERS else speaks[1].lower()
            said.append({"role": role, "content": speaks[2]})
        elif said:
            said[-1]["content"] += "\n" + line.text
        else:
            bad.found(
                line.name, line.number, f"nobody speaks: {line.text[:60]!r} does not begin with User: or the like"
            )
    if said:
        yield from talk()


def _read_lengths(lines: Iterator[NumberedLine], bad: BadLines) -> Iterator[TraceRequest]:
    header = next(lines)
    names = [name.strip().lower() for name in next(csv.reader([header.text]))]
    prompt_at = _column(names, _PROMPT_COLUMNS, header)
    output_at = _column(names, _OUTPUT_COLUMNS, header)
    time_at = next((names.index(name) for name in _TIME_COLUMNS if name in names), None)
    start_s: float | None = None
    for line in lines:
        try:
            values = next(csv.reader([line.text]))
            prompt = _count(values[prompt_at], names[prompt_at])
            output = _count(values[output_at], names[output_at])
            arrival = 0.0 if time_at is None else _arrival(_seconds(values[time_at]))
        except (ValueError, IndexError) as error:
            bad.found(line.name, line.number, str(error) if isinstance(error, ValueError) else "columns are missing")
            continue
        if start_s is None:
            start_s = arrival
        yield TraceRequest(arrival - start_s, max(1, prompt), output)


def _first_turns(rows: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Those whose prompt cannot hold the row above and its answer. (A talk that begins with that much is lost.)"""
    before = 0
    for row in rows:
        if not before or row.num_prompt_tokens < before:
            yield row
        before = row.num_prompt_tokens + row.num_output_tokens


def _column(names: list[str], known: tuple[str, ...], header: NumberedLine) -> int:
    for name in known:
        if name in names:
            return names.index(name)
    raise TraceError(f"{header.name} has no column {' or '.join(known)}; its columns are {', '.join(names)}")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()[:26]).replace(tzinfo=UTC).timestamp()


def mooncake_line(request: TraceRequest, hash_ids: Sequence[int]) -> str:
    """A request as a line of a Mooncake trace."""
    line: dict[str, object] = {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": list(hash_ids),
    }
    if request.tenant:
        line["tenant"] = request.tenant
    if request.namespace:
        line["namespace"] = request.namespace
    if request.priority:
        line["priority"] = request.priority
    return json.dumps(line)
