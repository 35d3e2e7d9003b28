"""The console of all commands: the two outputs, progress, and how errors and interrupts end a command."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.markup import escape

from speculative.errors import TruespecError

CONFIGS = Path(__file__).parents[1] / "configs"

_UNBROKEN = 100_000  # columns


def console(stream: TextIO, *, stderr: bool = False) -> Console:
    """Breaks lines at the width of a terminal; in a log, a pipe or a file, where rich would take 80 columns, every line
    and every row of a table stays whole."""
    return Console(stderr=stderr, highlight=False, emoji=False, width=None if stream.isatty() else _UNBROKEN)


err = console(sys.stderr, stderr=True)
out = console(sys.stdout)

INTERRUPTED = 128 + signal.SIGINT  # what shells expect of a command that ^C ended


class _ConfigPath(click.Path):
    """A file, or the name of a configuration that comes with truespec: a file of that name goes first, a folder does
    not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The file, as click reads it, or ours."""
        shipped = CONFIGS / f"{value}.yaml"
        is_name = (
            os.path.dirname(value) in ("", "recipes")
            and (not os.path.exists(value) or os.path.isdir(value))
            and shipped.is_file()
        )
        return super().convert(shipped if is_name else value, param, ctx)


a_file = click.Path(path_type=Path, dir_okay=False)
a_config = _ConfigPath(path_type=Path)
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


class MainCommand(click.Command):
    """Reports our own errors in one line, and ends quietly when interrupted; anything else is a bug and keeps its
    traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TruespecError as error:
            raise Failure(str(error)) from error
        except KeyboardInterrupt:
            say("Interrupted.", err)
            raise click.exceptions.Exit(INTERRUPTED) from None


class MainGroup(MainCommand, click.Group):
    """Commands that end so."""


def progress_printer() -> Callable[[str], None]:
    """Prints what is going on, with the seconds since the start, to standard error."""
    began = time.monotonic()

    def report(message: str) -> None:
        err.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {escape(message)}")

    return report


def say(text: str, on: Console = out) -> None:
    """Print a line as it is, brackets and all; what reads a pipe gets it unbroken."""
    on.print(text, markup=False, soft_wrap=True)
