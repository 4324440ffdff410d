"""`octavo generate` on a tiny model: where prompts come from, what is printed where, and what the flags do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from tests.cli.conftest import CommandLine, Ended

GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "12", "--kv-cache-memory", "8MiB", "--threads", "1")
PROMPT = "The quick brown fox"


def objects(ended: Ended) -> list[dict[str, Any]]:
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_the_text_is_the_engines(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("generate", tiny_model, "-p", PROMPT, *GREEDY)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny_model), kv_cache_memory=8 << 20) as llm:
        (expected,) = llm.generate(PROMPT, params)
    assert ended.code == 0
    assert ended.out == expected.text + "\n"
    assert re.fullmatch(
        r"octavo: \d+ prompt tokens \(0 cached\), 12 new tokens in [\d.]+ s; first token after [\d.]+ s"
        r"(, then [\d.]+ tokens/s)?\n",  # a reader that is slower than the model gets all at once
        ended.err,
    )


def test_a_prompt_comes_from_flag_file_or_standard_input(
    tiny_model: Path, tmp_path: Path, command_line: CommandLine
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    by_flag = command_line("generate", tiny_model, "-p", PROMPT, *GREEDY)
    by_file = command_line("generate", tiny_model, "-f", tmp_path / "prompt.txt", *GREEDY)
    by_pipe = command_line("generate", tiny_model, *GREEDY, stdin=PROMPT + "\n")
    assert by_flag.out == by_file.out == by_pipe.out
    assert len(by_flag.out) > 1


def test_several_prompts_are_answered_in_order(tiny_model: Path, command_line: CommandLine) -> None:
    prompts = ["one", "two words", "and three words"]
    flags = [part for prompt in prompts for part in ("-p", prompt)]
    alone = [objects(command_line("generate", tiny_model, "-p", prompt, "--json", *GREEDY))[0] for prompt in prompts]
    ended = command_line("generate", tiny_model, *flags, "--json", *GREEDY)
    together = objects(ended)
    assert [answer["prompt"] for answer in together] == prompts
    assert [answer["token_ids"] for answer in together] == [answer["token_ids"] for answer in alone]
    assert ended.err.startswith("octavo: 3 prompts, ")
    plain = command_line("generate", tiny_model, *flags, *GREEDY).out
    assert plain == "".join(
        f"--- {number}: {answer['prompt']}\n{answer['text']}\n" for number, answer in enumerate(together, 1)
    )


def test_json_says_everything(tiny_model: Path, command_line: CommandLine) -> None:
    (answer,) = objects(command_line("generate", tiny_model, "-p", PROMPT, "--json", "--logprobs", "2", *GREEDY))
    assert answer["prompt"] == PROMPT
    assert answer["finish_reason"] == "length"
    assert answer["error"] is None
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 < answer["time_to_first_token_s"] <= answer["total_s"]
    assert [scored["token_id"] for scored in answer["logprobs"]] == answer["token_ids"]
    assert all(scored["top_logprobs"][0]["token_id"] == scored["token_id"] for scored in answer["logprobs"])
    assert all(len(scored["top_logprobs"]) == 2 for scored in answer["logprobs"])


def test_a_shared_beginning_is_cached_and_can_be_turned_off(tiny_model: Path, command_line: CommandLine) -> None:
    prompt = "A cache keeps what was computed, so that the same words need not be read twice. " * 3
    flags = ("-p", prompt + "one", "-p", prompt + "two", "--json", *GREEDY)
    shared = objects(command_line("generate", tiny_model, *flags))
    apart = objects(command_line("generate", tiny_model, *flags, "--no-enable-prefix-caching"))
    uncached = objects(command_line("generate", tiny_model, *flags, "--no-kv-cache"))
    assert [answer["token_ids"] for answer in shared] == [answer["token_ids"] for answer in apart]
    assert [answer["token_ids"] for answer in shared] == [answer["token_ids"] for answer in uncached]
    assert shared[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    assert apart[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert uncached[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_sampling_flags_reach_the_sampler(tiny_model: Path, command_line: CommandLine) -> None:
    common = ("generate", tiny_model, "-p", PROMPT, "--json", "--kv-cache-memory", "8MiB", "--max-tokens", "8")

    def tokens(*flags: str) -> list[int]:
        return objects(command_line(*common, *flags))[0]["token_ids"]  # type: ignore[no-any-return]

    seeded = tokens("--seed", "7", "--ignore-eos")
    assert tokens("--seed", "7", "--ignore-eos") == seeded
    assert tokens("--seed", "8", "--ignore-eos") != seeded
    greedy = tokens("--temperature", "0", "--ignore-eos")
    assert tokens("--top-k", "1", "--ignore-eos") == greedy
    assert set(tokens("--logit-bias", "100:100", "--ignore-eos", "--temperature", "0")) == {100}
    (stopped,) = objects(command_line(*common, "--temperature", "0", "--stop-token-id", str(greedy[2])))
    assert len(stopped["token_ids"]) <= 3
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", greedy[len(stopped["token_ids"]) - 1])


def test_chat_goes_through_the_template(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    common = ("generate", tiny_model, "-p", PROMPT, "--json", *GREEDY)
    (plain,), (chat,) = objects(command_line(*common)), objects(command_line(*common, "--chat"))
    assert chat["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    (tmp_path / "template.jinja").write_text("{{ messages[0]['content'] }}")
    (bare,) = objects(command_line(*common, "--chat", "--chat-template", tmp_path / "template.jinja"))
    assert bare["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    (tmp_path / "broken.jinja").write_text("{% for")
    ended = command_line(*common, "--chat", "--chat-template", tmp_path / "broken.jinja")
    assert ended.code == 1
    assert "chat template is broken at line 1" in ended.err
    (tmp_path / "empty.jinja").write_text("\n")
    ended = command_line(*common, "--chat", "--chat-template", tmp_path / "empty.jinja")
    assert ended.code == 1
    assert "empty.jinja is empty" in ended.err


def test_what_cannot_be_had_is_one_sentence(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for arguments, code, words in (
        (("-p", "word " * 600), 1, ["512 tokens", "prompt of"]),
        (("-p", "x", "--max-tokens", "600"), 1, ["512"]),
        (("-p", "x", "--max-tokens", "0"), 1, ["--max-tokens is 0", "at least 1"]),
        (("-p", "x", "--temperature", "-1"), 1, ["--temperature is -1.0", "at least 0"]),
        (("-p", "x", "--max-model-len", "513"), 1, ["513", "512"]),
        (("-p", "x", "--kv-cache-memory", "1KiB"), 1, ["1024", "--kv-cache-memory"]),
        (("-p", "x", "--kv-cache-memory", "900TB"), 1, ["900000000000000", "--kv-cache-memory"]),
        (("-p", "x", "--instruction-set", "sse9"), 1, ["sse9", "portable"]),
        (("-p", "x", "--logit-bias", "many"), 2, ["'many' is not a token id and a bias"]),
        (("-f", str(tmp_path / "bytes")), 2, ["not UTF-8"]),
        (("-p", "x", "-p", ""), 2, ["a prompt is empty"]),
    ):
        ended = command_line("generate", tiny_model, *arguments)
        assert ended.code == code, (arguments, ended)
        assert ended.out == ""
        assert ended.err.startswith("octavo: ")
        assert len(ended.err.splitlines()) == 1, ended.err
        for word in words:
            assert word in ended.err, (word, ended.err)
