"""`octavo generate`: prompts in, texts out, for shells and scripts. It does not know how a model answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from octavo.cli.flags import flags_of
from octavo.cli.model_flags import model_argument, model_flags
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.cli.session import Answer

DEFAULT_MAX_TOKENS = 256


@click.command()
@model_argument
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be repeated.")
@click.option(
    "-f",
    "--prompt-file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file whose text is a prompt; may be repeated.",
)
@click.option(
    "--chat", "as_chat", is_flag=True, help="Ask each prompt as a chat message, through the model's chat template."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt, one a line.")
@flags_of(SamplingParams, unset=True)
@model_flags
@click.pass_context
def generate(
    context: click.Context,
    /,
    model: str,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    as_chat: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Let MODEL continue each prompt, all of them at once. Without -p and -f the prompt is read from standard input.

    The text goes to standard output, one line of statistics to standard error. MODEL is a directory, a .gguf file, an
    alias such as smollm2, or a hub id.
    """
    from octavo.cli.loading import check_flags, check_sampling, load_checked
    from octavo.cli.session import Session

    check_sampling(values)
    flags = check_flags(values)
    texts = read_prompts(prompts, files)
    opened = load_checked(model, flags)
    encoded = [
        opened.encode_chat([{"role": "user", "content": text}]) if as_chat else opened.encode(text) for text in texts
    ]
    params = [opened.sampling_params(values, len(token_ids), DEFAULT_MAX_TOKENS) for token_ids in encoded]
    stream = len(texts) == 1 and not as_json
    with Session(opened.loaded) as session:
        answers = session.answer(encoded, params, lambda _, text: click.echo(text, nl=False) if stream else None)
    if as_json:
        for text, answer in zip(texts, answers, strict=True):
            click.echo(json.dumps(answer_object(text, answer), ensure_ascii=False))
    elif stream:
        click.echo()
    else:
        show_answers(texts, answers)
    click.echo(f"octavo: {statistics(answers)}", err=True)
    context.exit(exit_code(answers))


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Those of -p, then those of -f, else the one on standard input, each without a last line end.

    Raises UsageError where there is none, or no text.
    """
    found = [*prompts]
    for path in files:
        with path.open(encoding="utf-8") as file:
            found.append(read_text(file, str(path)))
    if not found:
        if sys.stdin.isatty():
            raise click.UsageError("there is no prompt: give -p TEXT, -f FILE or text on standard input")
        found.append(read_text(sys.stdin, "standard input"))
    if not all(found):
        raise click.UsageError("a prompt is empty: give -p TEXT, -f FILE or text on standard input")
    return found


def read_text(file: TextIO, name: str) -> str:
    """All of a file but a line end at its end, which editors and `echo` put there."""
    try:
        return file.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 text: {error}") from error


def show_answers(texts: Sequence[str], answers: Sequence[Answer]) -> None:
    """Several answers, each under the beginning of its prompt."""
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True), 1):
        start = " ".join(text.split())
        click.echo(f"--- {number}: {start[:60]}{'...' if len(start) > 60 else ''}")
        click.echo(answer.text)


def answer_object(prompt: str, answer: Answer) -> dict[str, object]:
    """What --json prints for one prompt."""
    found: dict[str, object] = {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "error": answer.error,
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": answer.num_output_tokens,
            "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
        },
        "time_to_first_token_s": round(answer.first_token_s, 6),
        "total_s": round(answer.total_s, 6),
    }
    if answer.scored_tokens:
        found["logprobs"] = [
            {
                "token_id": scored.sampled.token_id,
                "logprob": scored.sampled.logprob,
                "top_logprobs": [
                    {"token_id": other.token_id, "logprob": other.logprob} for other in scored.sampled.top_logprobs
                ],
            }
            for scored in answer.scored_tokens
        ]
    return found


def statistics(answers: Sequence[Answer]) -> str:
    """One line: tokens in, those that the cache answered, tokens out, times."""
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_cached_tokens = sum(answer.num_cached_tokens for answer in answers)
    num_output_tokens = sum(answer.num_output_tokens for answer in answers)
    total_s = max(answer.total_s for answer in answers)
    line = (
        f"{num_prompt_tokens} prompt tokens ({num_cached_tokens} cached), {num_output_tokens} new tokens in "
        f"{total_s:.2f} s; first token after {min(answer.first_token_s for answer in answers):.3f} s"
    )
    if len(answers) > 1:
        return f"{len(answers)} prompts, {line}, {num_output_tokens / total_s:.1f} tokens/s together"
    speed = answers[0].tokens_per_s
    return line if speed is None else f"{line}, then {speed:.1f} tokens/s"


def exit_code(answers: Sequence[Answer]) -> int:
    """0 when every prompt has its answer; an error of one prompt is told on standard error."""
    for answer in answers:
        if answer.error:
            click.echo(f"octavo: {answer.error}", err=True)
    if any(answer.was_interrupted for answer in answers):
        return 130
    return 1 if any(answer.finish_reason in ("error", "abort") for answer in answers) else 0
