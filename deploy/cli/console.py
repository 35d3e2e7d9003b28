"""The console of all commands: the two outputs, progress, and how errors and interrupts end a command."""

import difflib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.markup import escape

from deploy.run.what_is import CONFIGS as CONFIGS
from deploy.run.what_is import shipped
from speculative.errors import TruespecError

_UNBROKEN = 100_000  # columns
_WHOLE = 1000  # letters of a command's first sentence


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
        return super().convert(shipped(str(value)) or value, param, ctx)


a_file = click.Path(path_type=Path, dir_okay=False)
a_config = _ConfigPath(path_type=Path)
key_option = click.option(
    "--api-key-file", type=a_file, help="Read the server's API key from this file instead of TRUESPEC_API_KEY."
)
concurrency_option = click.option(
    "--concurrency", type=click.IntRange(min=1), default=16, help="Keep this many requests in flight."
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
    """Commands that end so. Help shows the first sentence of each, whole; a mistyped name gets the near ones."""

    headings: Mapping[str, Sequence[str]] = {}
    """Names of commands under their headings in the help; without any, all are under `Commands`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, heading by heading."""
        for heading, names in (self.headings or {"Commands": self.list_commands(ctx)}).items():
            found = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(_WHOLE)) for name, command in found])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command that is named; a mistyped one is an error that names the near ones."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            near = difflib.get_close_matches(name, known)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The commands are {', '.join(known)}."
            raise click.UsageError(f"There is no command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


def progress_printer() -> Callable[[str], None]:
    """Prints what is going on, with the seconds since the start, to standard error."""
    began = time.monotonic()

    def report(message: str) -> None:
        err.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {escape(message)}")

    return report


def say(text: str, on: Console = out) -> None:
    """Print a line as it is, brackets and all; what reads a pipe gets it unbroken."""
    on.print(text, markup=False, soft_wrap=True)
