"""Spans of the members of a JSON text, so that one can be cut out and every other byte stays as it was."""

import json
import re
from collections.abc import Collection
from typing import NamedTuple

_decode = json.JSONDecoder().raw_decode
_skip = re.compile(r"[ \t\r\n]*").match


class Member(NamedTuple):
    """A member of an object: its key, and where in the text the key starts and the value starts and ends."""

    key: str
    start: int
    value: int
    end: int


class Edit(NamedTuple):
    """A stretch of the text, and what replaces it."""

    start: int
    end: int
    text: str


def past_blanks(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    found = _skip(text, at)
    return found.end() if found else at


def members(text: str, at: int) -> list[Member]:
    """The members of the object whose brace is at `at`.

    Raises:
        ValueError: there is no object, or it is broken.
    """
    found: list[Member] = []
    at = past_blanks(text, at + 1) if text[at : at + 1] == "{" else _fail(text, at)
    while text[at : at + 1] != "}":
        key, end = _decode(text, at)
        colon = past_blanks(text, end)
        if not isinstance(key, str) or text[colon : colon + 1] != ":":
            _fail(text, colon)
        value = past_blanks(text, colon + 1)
        _, end = _decode(text, value)
        found.append(Member(key, at, value, end))
        at = _next_item(text, end, "}")
    return found


def items(text: str, at: int) -> list[int]:
    """Return where the items of the array start whose bracket is at `at`; none where there is no array.

    Raises:
        ValueError: it is broken.
    """
    if text[at : at + 1] != "[":
        return []
    found: list[int] = []
    at = past_blanks(text, at + 1)
    while text[at : at + 1] != "]":
        found.append(at)
        _, end = _decode(text, at)
        at = _next_item(text, end, "]")
    return found


def _next_item(text: str, at: int, closing: str) -> int:
    at = past_blanks(text, at)
    if text[at : at + 1] == ",":
        return past_blanks(text, at + 1)
    return at if text[at : at + 1] == closing else _fail(text, at)


def _fail(text: str, at: int) -> int:
    raise ValueError(f"no JSON at character {at} of {len(text)}")


def cuts(found: list[Member], gone: Collection[str]) -> list[Edit]:
    """Cut members out of their object, each with one comma."""
    kept = next((place for place, member in enumerate(found) if member.key not in gone), None)
    if kept is None:
        return [Edit(found[0].start, found[-1].end, "")] if found else []
    edits = [Edit(found[0].start, found[kept].start, "")] if kept else []
    for before, member in zip(found[kept:], found[kept + 1 :], strict=False):
        if member.key in gone:
            edits.append(Edit(before.end, member.end, ""))
    return edits


def edited(text: str, edits: list[Edit]) -> str:
    """With the edits made, which do not overlap."""
    parts, at = [], 0
    for edit in sorted(edits):
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])
