"""A text that is read while it grows."""

import json
from collections.abc import Callable, Generator
from typing import TypeVar

from serve_app.text.json_text import repaired

T = TypeVar("T")

Step = Generator[None, None, T]
"""Reads on, and waits (`yield`) where the text that it needs has not come yet."""

_BLANKS = " \t\r\n"


class GrowingText:
    """The text of an answer, and how far it was read.

    Whatever reads it sees one character after another, so what is found does not depend on the parts in which the text
    came. A reader that was wrong goes back: it sets `at`.
    """

    def __init__(self) -> None:
        self.at = 0
        self._text = ""
        self._complete = False

    def add(self, text: str, *, last: bool) -> None:
        """More of the text; `last` = it ends here."""
        self._text += text
        self._complete = self._complete or last

    def since(self, begin: int) -> str:
        """Return what was read since then."""
        return self._text[begin : self.at]

    def peek(self) -> Step[str]:
        """The next character; "" = the text ends here."""
        while self.at == len(self._text) and not self._complete:
            yield
        return self._text[self.at : self.at + 1]

    def take(self) -> Step[str]:
        """The next character, which is read with that."""
        character = yield from self.peek()
        self.at += len(character)
        return character

    def blanks(self) -> Step[str]:
        """Read white space, if there is any; returns the character behind it, as `peek` does."""
        while (character := (yield from self.peek())) and character in _BLANKS:
            self.at += 1
        return character

    def literal(self, wanted: str) -> Step[bool]:
        """Read these characters, if they are what comes next."""
        begin = self.at
        for character in wanted:
            if (yield from self.peek()) != character:
                self.at = begin
                return False
            self.at += 1
        return True

    def line_end(self) -> Step[None]:
        """Read the end of a line, if it is here."""
        if not (yield from self.literal("\n")):
            yield from self.literal("\r\n")

    def word(self, ends: str, longest: int) -> Step[str]:
        """Read up to one of the characters in `ends`; "" = none came, nothing was before it, or too much."""
        begin = self.at
        while (character := (yield from self.peek())) and character not in ends and self.at - begin < longest:
            self.at += 1
        return self.since(begin) if character and character in ends else ""

    def string(self) -> Step[str | None]:
        """Read a string of JSON; None = there is none, or it is broken."""
        begin = self.at
        if (yield from self.peek()) not in ('"', "'") or not (yield from self.value()):
            return None
        try:
            read: str = json.loads(repaired(self.since(begin)))
        except ValueError:
            return None
        return read

    def value(self, pass_on: Callable[[str], None] | None = None) -> Step[bool]:
        """Read a value of JSON, as far as its brackets and quotes show its end; False = none is here, or it has no end
        before the text's, or before a tag. Strings may have the quotes that Python shows.

        Args:
            pass_on: gets its characters as they come.
        """
        depth, quote, escaped, begin, before = 0, "", False, self.at, ","
        while character := (yield from self.peek()):
            if not (depth or quote) and character in ",:]}" + _BLANKS:
                break
            if character == "<" and not quote:
                return False
            self.at += 1
            if pass_on is not None:
                pass_on(character)
            if quote:
                quote = quote if escaped or character != quote else ""
                escaped = character == "\\" and not escaped
            elif character == '"' or (character == "'" and before in "{[,:"):
                quote = character
            else:
                depth += (character in "{[") - (character in "}]")
            before = before if character in _BLANKS else character
            if not (depth or quote) and character in "\"']}":
                return True
        return not (depth or quote) and self.at > begin
