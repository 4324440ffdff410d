"""`octavo chat`: a conversation on the terminal, or with lines from a pipe. It does not know how a model answers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.flags import flags_of
from octavo.cli.model_flags import model_argument, model_flags
from octavo.cli.prompt_reader import read_message
from octavo.cli.talk import Talk, Turn
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError

if TYPE_CHECKING:
    from octavo.cli.loading import OpenModel
    from octavo.cli.prompt_reader import ReadLine
    from octavo.cli.session import Session
    from octavo.core.status import CoreStatus

HELP = """\
/help          this
/stats         for each turn: prompt tokens, those of them that the cache answered, speed; then the cache itself
/back [N]      take the last turn back, or the last N
/branch        list the turns and the branches of the conversation
/branch N [NAME]
               go on behind turn N in a new branch; what was said since stays in the old one
/switch NAME   go on in another branch
/reset         forget the conversation
/system TEXT   start over with TEXT as the system prompt; without TEXT, show it
/quit          leave (as Ctrl-D does)
Ctrl-C         stop the answer
A line that ends with \\ goes on in the next; \"\"\" begins and ends a text of several lines."""
OF_SEVERAL_ANSWERS = ("n", "best_of", "length_penalty", "early_stopping")  # a chat has one at a time


@click.command()
@model_argument
@click.option("--system", default="", help="The system prompt.", metavar="TEXT")
@model_flags
@flags_of(SamplingParams, unset=True, without=OF_SEVERAL_ANSWERS)
def chat(model: str, system: str, **values: Any) -> None:
    """Talk with MODEL. The history of the conversation stays in the KV cache: only what is new is computed.

    MODEL is a directory, a .gguf file, an alias such as smollm2, or a hub id.
    """
    from octavo.cli.loading import check_flags, check_sampling, load_checked
    from octavo.cli.prompt_reader import terminal_line_reader
    from octavo.cli.session import Session

    check_sampling(values)
    opened = load_checked(model, check_flags(values))
    opened.require_chat_template()
    with Session(opened.loaded) as session:
        if sys.stdin.isatty():
            click.echo(f"{opened.name}: /help lists what can be typed, Ctrl-D leaves", err=True)
        Chat(opened, session, system, values).run(terminal_line_reader())


class Chat:
    """The loop of a conversation: reads messages, runs commands, streams answers."""

    def __init__(self, opened: OpenModel, session: Session, system: str, sampling: dict[str, Any]) -> None:
        self._opened = opened
        self._session = session
        self._sampling = sampling
        self._talk = Talk(system)

    def run(self, read_line: ReadLine) -> None:
        """Until /quit or the end of the input."""
        while True:
            try:
                message = read_message(read_line)
            except EOFError:
                break
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D or /quit leaves)", err=True)
                continue
            if message in ("/quit", "/exit"):
                return
            if message.startswith("/") and "\n" not in message:
                click.echo(self._command(message))
            elif message:
                self._answer(message)
        if sys.stdin.isatty():
            click.echo()

    def _command(self, message: str) -> str:
        name, _, rest = message.partition(" ")
        match name:
            case "/help":
                return HELP
            case "/stats":
                return "\n".join([*self._talk.stats(), cache_line(self._session.status().core)])
            case "/back":
                return self._talk.back(rest.strip() or "1")
            case "/branch" if rest.strip():
                return self._talk.branch(*rest.split(maxsplit=1))
            case "/branch":
                return "\n".join(self._talk.outline())
            case "/switch":
                return self._talk.switch(rest.strip())
            case "/reset":
                self._talk.start_over()
                return "the conversation starts over"
            case "/system" if rest.strip():
                self._talk.start_over(rest.strip())
                return "the conversation starts over with this system prompt"
            case "/system":
                return self._talk.system or "no system prompt"
            case _:
                return f"there is no command {name}; /help lists them"

    def _answer(self, message: str) -> None:
        """One turn. A message that cannot be answered is dropped: the conversation goes on as if it was not said."""
        try:
            prompt = self._opened.encode_chat(self._talk.messages(message))
            params = self._opened.sampling_params(self._sampling, len(prompt))
            (answer,) = self._session.answer([prompt], [params], lambda _, text: click.echo(text, nl=False))
        except InvalidRequestError as error:
            click.echo(f"octavo: {error} (/back takes a turn back, /reset starts over)", err=True)
            return
        click.echo(" [stopped]" if answer.was_interrupted else "")
        if answer.error:
            click.echo(f"octavo: {answer.error}", err=True)
        if answer.finish_reason == "length":
            click.echo("[the answer was cut: --max-tokens, or the end of the context]", err=True)
        self._talk.turns.append(Turn(message, answer))


def cache_line(core: CoreStatus) -> str:
    """The cache at a glance."""
    return (
        f"KV cache: {core.num_blocks} blocks x {core.block_size}: {core.used_blocks} used, {core.cached_blocks} "
        f"cached, {core.free_blocks} free; {core.hit_tokens} of {core.queries_tokens} prompt tokens were hits"
    )
