"""The `octavo` command: knows its subcommands, and turns every way to end into a sentence and an exit code.

0: done. 1: an error, told in one sentence. 2: wrong usage. 130: Ctrl-C. 141: the reader of the output went away.
It does not know what the commands do; they load what they need when they run, so that `--help` is quick.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from octavo.cli.calibrate import calibrate
from octavo.cli.calibrate_cost import calibrate_cost
from octavo.cli.certify import certify
from octavo.cli.chat import chat
from octavo.cli.compress import compress
from octavo.cli.convert import convert
from octavo.cli.doctor import doctor
from octavo.cli.explain import explain
from octavo.cli.generate import generate
from octavo.cli.models import models
from octavo.cli.plan import plan
from octavo.cli.pull import pull
from octavo.cli.replay import replay
from octavo.cli.serve import serve
from octavo.errors import OctavoError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
DEBUG_KEY = "octavo.debug"


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from octavo.cli.versions import octavo_version

        click.echo(f"octavo {octavo_version()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def octavo(context: click.Context, debug: bool) -> None:
    """Serve language models with a KV cache that is paged, shared by prefix and accounted for to the byte."""
    context.meta[DEBUG_KEY] = debug


for _command in (
    serve,
    chat,
    generate,
    convert,
    plan,
    calibrate,
    certify,
    compress,
    replay,
    calibrate_cost,
    explain,
    pull,
    models,
    doctor,
):
    octavo.add_command(_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; gives the exit code and raises nothing that is an expected way to end."""
    context: click.Context | None = None
    try:
        with octavo.make_context("octavo", list(arguments)) as context:
            octavo.invoke(context)
            sys.stdout.flush()
        return 0
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.exceptions.NoArgsIsHelpError as help_wanted:
        click.echo(help_wanted.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "octavo"
        _say(f"{error.format_message()} (`{path} --help` lists what can be given)", error, context)
        return EXIT_USAGE
    except (KeyboardInterrupt, click.exceptions.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (OctavoError, click.ClickException) as error:
        _say(str(error), error, context)
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        _say(
            f"memory ran out{reason}; lower --kv-cache-memory, take a smaller model or end other programs",
            error,
            context,
        )
    except ModuleNotFoundError as error:
        _say(f"the installation is not complete ({error}); install octavo again with `pip install .`", error, context)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _say(f"{error.strerror or error}{where}", error, context)
    return EXIT_ERROR


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    sys.exit(run(sys.argv[1:]))


def _say(message: str, error: BaseException, context: click.Context | None) -> None:
    if context is not None and context.meta.get(DEBUG_KEY):
        traceback.print_exception(error)
    click.echo(f"octavo: {message}", err=True)


if __name__ == "__main__":
    main()
