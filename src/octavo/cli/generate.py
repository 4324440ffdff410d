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
from octavo.core.sampling_params import MAX_BRANCHES, SamplingParams

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
@click.option(
    "--beams",
    type=click.IntRange(1, MAX_BRANCHES),
    metavar="K",
    help="Search for the most likely text with a beam search of this width, instead of drawing.",
)
@click.option(
    "--show-memory", is_flag=True, help="Draw the block tables of the branches (--n, --best-of, --beams) as they grow."
)
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
    show_memory: bool,
    **values: Any,
) -> None:
    """Let MODEL continue each prompt, all of them at once. Without -p and -f the prompt is read from standard input.

    The text goes to standard output, one line of statistics to standard error. MODEL is a directory, a .gguf file, an
    alias such as smollm2, or a hub id.
    """
    from octavo.cli.loading import check_flags, check_sampling, load_checked
    from octavo.cli.memory_screen import memory_screen
    from octavo.cli.session import Session

    read_branches(values, show_memory)
    check_sampling(values)
    flags = check_flags(values)
    texts = read_prompts(prompts, files)
    opened = load_checked(model, flags)
    encoded = [
        opened.encode_chat([{"role": "user", "content": text}]) if as_chat else opened.encode(text) for text in texts
    ]
    params = [opened.sampling_params(values, len(token_ids), DEFAULT_MAX_TOKENS) for token_ids in encoded]
    stream = len(texts) == 1 and params[0].n == 1 and not as_json

    def hear(_: int, text: str) -> None:
        if stream:
            click.echo(text, nl=False)

    with Session(opened.loaded) as session, memory_screen(wanted=show_memory) as on_memory:
        answers = session.answer(encoded, params, hear, on_memory)
    if as_json:
        for text, answer in zip(texts, answers, strict=True):
            click.echo(json.dumps(answer_object(text, answer), ensure_ascii=False))
    elif stream:
        click.echo()
    else:
        show_answers(texts, answers)
    click.echo(f"octavo: {statistics(answers)}", err=True)
    for line in branch_statistics(answers):
        click.echo(f"octavo: {line}", err=True)
    context.exit(exit_code(answers))


def read_branches(values: dict[str, Any], show_memory: bool) -> None:
    """Turn --beams into what it stands for. Raises UsageError for flags that contradict each other."""
    beams = values.pop("beams")
    if beams is not None:
        if values["best_of"] is not None:
            raise click.UsageError("--beams and --best-of exclude each other: the width of a beam search is --beams")
        if values["n"] is not None and values["n"] > beams:
            raise click.UsageError(f"--n is {values['n']}; a beam search gives as many texts as --beams ({beams})")
        values.update(use_beam_search=True, best_of=beams)
    if show_memory and max(values["n"] or 1, values["best_of"] or 1) == 1:
        raise click.UsageError("--show-memory draws branches: give --n, --best-of or --beams above 1")


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
    for number, (text, first) in enumerate(zip(texts, answers, strict=True), 1):
        start = " ".join(text.split())
        for branch, answer in enumerate(first.all, 1):
            of_it = f".{branch}" if first.others else ""
            score = "" if answer.score is None else f" (score {answer.score:.4f})"
            click.echo(f"--- {number}{of_it}: {start[:60]}{'...' if len(start) > 60 else ''}{score}")
            click.echo(answer.text)


def answer_object(prompt: str, answer: Answer) -> dict[str, object]:
    """What --json prints for one prompt: its first answer, and with several `answers`, all of them."""
    found: dict[str, object] = {
        "prompt": prompt,
        **choice_object(answer),
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": answer.num_generated_tokens,
            "total_tokens": answer.num_prompt_tokens + answer.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
        },
        "time_to_first_token_s": round(min(one.first_token_s for one in answer.all), 6),
        "total_s": round(max(one.total_s for one in answer.all), 6),
    }
    if answer.sharing is not None:
        found["branches"] = {
            "peak_saved_blocks": answer.sharing.peak_saved_blocks,
            "peak_blocks": answer.sharing.peak_blocks,
        }
    if answer.others:
        found["answers"] = [choice_object(one) for one in answer.all]
    return found


def choice_object(answer: Answer) -> dict[str, object]:
    """What is said of one answer."""
    found: dict[str, object] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "error": answer.error,
    }
    if answer.score is not None:
        found["score"] = answer.score
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
    """One line: tokens in, those that the cache answered, tokens out, times. `answers`: the first of each prompt."""
    every = [one for answer in answers for one in answer.all]
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_cached_tokens = sum(answer.num_cached_tokens for answer in answers)
    num_new_tokens = sum(answer.num_generated_tokens for answer in answers)
    total_s = max(answer.total_s for answer in every)
    line = (
        f"{num_prompt_tokens} prompt tokens ({num_cached_tokens} cached), {num_new_tokens} new tokens in "
        f"{total_s:.2f} s; first token after {min(answer.first_token_s for answer in every):.3f} s"
    )
    if len(every) == 1 and answers[0].sharing is None:
        speed = answers[0].tokens_per_s
        return line if speed is None else f"{line}, then {speed:.1f} tokens/s"
    counted = f"{len(answers)} prompts, " if len(answers) > 1 else ""
    counted += f"{len(every)} answers, " if len(every) > len(answers) else ""
    return f"{counted}{line}, {num_new_tokens / total_s:.1f} tokens/s together"


def branch_statistics(answers: Sequence[Answer]) -> list[str]:
    """One line for each prompt with several branches: the blocks that sharing saved."""
    from octavo.cli.branch_view import peak_of

    shared = [(number, answer.sharing) for number, answer in enumerate(answers, 1) if answer.sharing is not None]
    where = "prompt {}: " if len(answers) > 1 else ""
    return [f"{where.format(number)}branches saved {peak_of(sharing)}" for number, sharing in shared]


def exit_code(answers: Sequence[Answer]) -> int:
    """0 when every prompt has its answers; an error of one is told on standard error."""
    every = [one for answer in answers for one in answer.all]
    for answer in every:
        if answer.error:
            click.echo(f"octavo: {answer.error}", err=True)
    if any(answer.was_interrupted for answer in every):
        return 130
    return 1 if any(answer.finish_reason in ("error", "abort") for answer in every) else 0
