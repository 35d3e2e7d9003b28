"""Counts the lines of "The engine in 15 minutes" of docs/architecture.md, with the private helpers that they call.

`python -m tools.reading_path` writes the number into the page, `--check` reports whether it is current.

Counted are lines that are not blank, docstrings and comments among them: of each file its docstring, of a class its
docstring, fields and constructor, and whole functions and methods. Functions, methods and classes whose names begin
with an underscore count where counted lines mention them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click

from speculative.errors import TruespecError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_SECTION = re.compile(r"^## The engine in 15 minutes\n.*?(?=^## )", re.M | re.S)
_STEP = re.compile(r"^\d+\. .*?(?=^\S|\Z)", re.M | re.S)
_COUNT = re.compile(r"(?<=that they call, )[\d,]+(?= lines)")
_IMPORT_ROOT = "speculative."

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


class ReadingPathError(TruespecError):
    """A step of the page names a file or a symbol that does not exist."""


class Symbol(NamedTuple):
    """A function or class of a module, or a method of one of its classes."""

    path: Path
    node: Definition
    owner: ast.ClassDef | None = None

    @property
    def unread(self) -> list[Function]:
        """Methods of a class, apart from its constructor."""
        if isinstance(self.node, Function):
            return []
        return [part for part in self.node.body if isinstance(part, Function) and part.name != "__init__"]

    def lines(self) -> set[tuple[Path, int]]:
        """Lines that are not blank, by file and number."""
        skipped = {line for part in self.unread for line in _span(part)}
        text = self.path.read_text(encoding="utf-8").splitlines()
        return {(self.path, line) for line in _span(self.node) if line not in skipped and text[line - 1].strip()}


def _span(node: Definition) -> range:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return range(first, (node.end_lineno or node.lineno) + 1)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def symbols(path: Path) -> list[Symbol]:
    """List the functions, classes and methods of a module; those at its top come first."""
    top = [Symbol(path, node) for node in _tree(path).body if isinstance(node, Definition)]
    return top + [
        Symbol(path, part, own.node)
        for own in top
        if isinstance(own.node, ast.ClassDef)
        for part in own.node.body
        if isinstance(part, Function)
    ]


def named_symbols(page: str) -> list[Symbol]:
    """List the symbols that the steps name in bold, each after its file.

    Raises:
        ReadingPathError: a file or a symbol does not exist, or a file is named without a symbol.
    """
    section = _SECTION.search(page)
    if section is None:
        raise ReadingPathError("docs/architecture.md has no section 'The engine in 15 minutes'.")
    found, path = list[Symbol](), ROOT
    for bold in re.findall(r"\*\*(.+?)\*\*", "".join(_STEP.findall(section[0])), re.S):
        names = re.findall(r"`([^`]+)`", bold)
        for place, name in enumerate(names):
            if not name.endswith(".py"):
                found.append(_find(path, name))
                continue
            path = ROOT / name if "/" in name else path.with_name(name)
            if not path.exists() or all(after.endswith(".py") for after in names[place + 1 : place + 2]):
                raise ReadingPathError(f"A step names {name}, which does not exist, or no symbol of it.")
    return found


def _find(path: Path, name: str) -> Symbol:
    owner, _, own_name = name.rpartition(".")
    for symbol in symbols(path) if path.is_file() else ():
        if symbol.node.name == own_name and owner in ("", symbol.owner.name if symbol.owner else ""):
            return symbol
    raise ReadingPathError(f"{path.name} has no {name}.")


def with_private_helpers(named: list[Symbol]) -> list[Symbol]:
    """Add the private helpers that the symbols mention, and those that these mention."""
    found = dict.fromkeys(named)
    waiting = list(named)
    while waiting:
        new = [helper for helper in _mentioned(waiting.pop()) if helper not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)


def _mentioned(symbol: Symbol) -> Iterator[Symbol]:
    """Yield the private helpers of the same module, or imported from another one, that a symbol mentions."""
    imported = {
        alias.name: ROOT / (node.module.replace(".", "/") + ".py")
        for node in _tree(symbol.path).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_IMPORT_ROOT)
        for alias in node.names
    }
    parts = [part for part in ast.iter_child_nodes(symbol.node) if part not in symbol.unread]
    for node in (inner for part in parts for inner in ast.walk(part)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.startswith("_") and not name.startswith("__"):
            candidates = [own for own in symbols(imported.get(name, symbol.path)) if own.node.name == name]
            same_class = [own for own in candidates if own.owner is symbol.owner]
            yield from same_class or candidates


def count_lines(page: str) -> int:
    """Count the lines of the symbols that a page names, of their files' docstrings and of their private helpers."""
    named = named_symbols(page)
    counted = set().union(*(symbol.lines() for symbol in with_private_helpers(named)))
    docstrings = (ast.get_docstring(_tree(path)) or "" for path in {symbol.path for symbol in named})
    return len(counted) + sum(bool(line.strip()) for text in docstrings for line in text.splitlines())


def written_count(page: str) -> int:
    """Return the number of lines that a page gives.

    Raises:
        ReadingPathError: it gives none.
    """
    given = _COUNT.search(page)
    if given is None:
        raise ReadingPathError("docs/architecture.md lacks 'with the private helpers that they call, N lines'.")
    return int(given[0].replace(",", ""))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; fail if the page gives another number.")
def main(check: bool) -> None:
    """Write the length of the reading path into docs/architecture.md."""
    try:
        page = PAGE.read_text(encoding="utf-8")
        counted, written = count_lines(page), written_count(page)
    except ReadingPathError as error:
        raise click.ClickException(str(error)) from error
    if check and counted != written:
        click.echo(f"The page says {written} lines, and there are {counted}; run python -m tools.reading_path.")
        sys.exit(1)
    if not check:
        PAGE.write_text(_COUNT.sub(f"{counted:,}", page, count=1), encoding="utf-8")
    click.echo(f"reading path: {counted} lines")


if __name__ == "__main__":
    main()
