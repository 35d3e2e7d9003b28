"""Checks the command lines of ours that documents and manifests show, without running them."""

import importlib
import importlib.util
import shlex
from collections.abc import Iterator, Sequence

import click

from deploy.cli.main import main

_SHELL = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"}


def in_shell(text: str) -> Iterator[list[str]]:
    """The words after each `truespec` in lines of shell, and those from the module on of each `python -m tools.…`;
    continued lines are joined, comments left out."""
    for line in (one for one in text.replace("\\\n", " ").splitlines() if "truespec" in one or "-m tools." in one):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words = list(lexer)
        for start, word in enumerate(words):
            program = word.rpartition("/")[2]
            is_tool = program == "python" and " ".join(words[start + 1 : start + 3]).startswith("-m tools.")
            if (program == "truespec" or is_tool) and _may_begin(words[:start]):
                rest = words[start + (2 if is_tool else 1) :]
                end = next((index for index, other in enumerate(rest) if other in _SHELL), len(rest))
                yield rest[:end]


def _may_begin(before: Sequence[str]) -> bool:
    """Whether a command can stand here: first, after variables, after `--` or a shell's operator, after `$`."""
    return all("=" in word for word in before) or before[-1] in _SHELL | {"--", "$"}


def fault(words: Sequence[str], *, whole: bool = True) -> str | None:
    """What is wrong with the words that `in_shell` finds; None where the command line takes them.

    Args:
        words: of the command line. Values are not converted, so placeholders may stand for them.
        whole: required options and arguments must be there; without it the mention of a command is enough.
    """
    command: click.Command = main
    rest = list(words)
    if rest and rest[0].startswith("tools."):
        try:
            command = _tool(rest.pop(0))
        except ModuleNotFoundError as error:
            return f"there is no module {error.name}"
    context = click.Context(command, info_name="truespec" if command is main else command.name)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        if found is None:
            return f"there is no command {rest[0]!r}"
        command, context, rest = found, click.Context(found, context, info_name=rest[0]), rest[1:]
    if isinstance(command, click.Group) and whole and not rest:
        return f"{context.command_path} wants a command"
    try:
        values, left, _ = command.make_parser(context).parse_args(rest)
    except click.BadOptionUsage as error:  # an option without its value
        return f"{context.command_path}: {error.format_message()}" if whole else None
    except click.UsageError as error:
        return f"{context.command_path}: {error.format_message()}"
    if left:
        return f"{context.command_path}: one word too many: {left[0]!r}"
    for option in command.params:
        value = values.get(option.name or "")
        given = isinstance(value, str | list | tuple | bool)  # click marks what is missing by an object of its own
        if whole and option.required and not given and not option.envvar:
            return f"{context.command_path}: {option.name} is missing"
        if isinstance(option.type, click.Choice) and isinstance(value, str) and value not in option.type.choices:
            return f"{context.command_path}: {value!r} is no {option.name}"
    return None


def _tool(module: str) -> click.Command:
    """The command that `python -m MODULE` runs."""
    place = importlib.util.find_spec(module)
    package = place is not None and place.submodule_search_locations is not None
    found = importlib.import_module(f"{module}.__main__" if package else module).main
    assert isinstance(found, click.Command)
    return found
