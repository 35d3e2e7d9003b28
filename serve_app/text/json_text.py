"""JSON as clients send it: every key once, and numbers that a float holds."""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_ECHO = 100  # characters of a name that a client made up
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}
UNCLEAN = re.compile("[\x00\ud800-\udfff]")


def clean_key(key: str) -> str:
    """A key that a client made up, as a part of a path."""
    return UNCLEAN.sub("\ufffd", key[:MAX_ECHO])


class CallArguments(dict[str, Any]):
    """The arguments of a call in the conversation, which know the text that they were sent as."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self.text = text


def load_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, in which an object has a key once, and NaN, Infinity and what is beyond all floats
            are no numbers.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=refuse_constant, parse_float=_read_float, object_pairs_hook=_read_object)


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name[:40]} is not a JSON number")


def _read_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else refuse_constant(text)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{clean_key(twice)} is given twice in one object; send it once")
    return made


class JsonRepairer:
    """Passes JSON on as it comes, and puts right what models write and JSON forbids: control characters and unknown
    escapes in strings, Python's quotes and names of constants, and a comma before a closing bracket."""

    def __init__(self) -> None:
        self._held = ""  # of a constant, a comma or an escape, until it is known what it is
        self._quote = ""  # of the string that this is in
        self._open: list[str] = []  # what closes the brackets

    def push(self, character: str) -> str:
        """Return what may go out with the next character."""
        if not self._quote:
            return self._outside(character)
        if self._held:
            return self._escaped(character)
        if character == "\\":
            self._held = character
            return ""
        if character == self._quote:
            self._quote = ""
            return '"'
        if character == '"':
            return '\\"'
        return json.dumps(character)[1:-1] if character < " " else character

    def end(self) -> str:
        """Return what was held back, once nothing follows."""
        held, self._held = self._held, ""
        return _OF_PYTHON.get(held, held)

    def close(self) -> str:
        """Return the rest, and the brackets that are missing."""
        if self._quote:
            return self.end()
        return self.end().rstrip(", \t\r\n") + "".join(reversed(self._open))

    def _escaped(self, character: str) -> str:
        """Read an escape on: a letter that is known, or `u` and four digits."""
        held = self._held + character
        if held == "\\u" or (held[1] == "u" and character in string.hexdigits and len(held) < 6):
            self._held = held
            return ""
        before, self._held = self._held, ""
        if (before == "\\" and character in '"\\/bfnrt') or (len(held) == 6 and character in string.hexdigits):
            return held
        if held == "\\'":
            return "'"
        return "\\" + before + self.push(character)

    def _outside(self, character: str) -> str:
        held, self._held = self._held, ""
        if held.startswith(",") and character in " \t\r\n":
            self._held = held + character
            return ""
        if character == "," or character.isalpha():
            same = held.isalpha() and character != ","
            self._held = held + character if same else character
            return "" if same else _OF_PYTHON.get(held, held)
        if character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif character in self._open[-1:]:
            self._open.pop()
        if character in "\"'":
            self._quote, character = character, '"'
        is_spare = held.startswith(",") and character in "]}"
        return (held[1:] if is_spare else _OF_PYTHON.get(held, held)) + character


def repaired(text: str) -> str:
    """A JSON text, as `JsonRepairer` puts it right."""
    repairer = JsonRepairer()
    return "".join(map(repairer.push, text)) + repairer.end()
