"""What all commands share: the two consoles, progress, and how errors and interrupts end a command."""

import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from speculative.errors import TruespecError

CONFIGS = Path(__file__).parents[1] / "configs"

err = Console(stderr=True, highlight=False, emoji=False)
out = Console(highlight=False, emoji=False)

_INTERRUPTED = 128 + signal.SIGINT  # what shells expect of a command that ^C ended

a_file = click.Path(path_type=Path, dir_okay=False)
key_option = click.option(
    "--api-key-file", type=a_file, help="Read the server's API key from this file instead of TRUESPEC_API_KEY."
)
concurrency_option = click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Keep this many requests in flight.",
)


class Failure(click.ClickException):
    """The command ran and its result is a failure; the message says what failed."""

    exit_code = 1


class MainGroup(click.Group):
    """Reports our own errors in one line, and ends quietly when interrupted; anything else is a bug and keeps its
    traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TruespecError as error:
            raise Failure(str(error)) from error
        except KeyboardInterrupt:
            say("Interrupted.", err)
            raise click.exceptions.Exit(_INTERRUPTED) from None


def progress_printer() -> Callable[[str], None]:
    """Prints what is going on, with the seconds since the start, to standard error."""
    began = time.monotonic()

    def report(message: str) -> None:
        err.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {escape(message)}")

    return report


def say(text: str, on: Console = out) -> None:
    """Print a line as it is, brackets and all; what reads a pipe gets it unbroken."""
    on.print(text, markup=False, soft_wrap=True)


def command_line() -> str:
    """The command line of this process, as a shell reads it."""
    return shlex.join(["truespec", *sys.argv[1:]])
