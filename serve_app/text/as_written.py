"""JSON as the client wrote it: every key once, and numbers with their own text."""

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn

_TAG = secrets.token_hex(4)  # of words that no client knows
_HELD = re.compile(rf"""(\\"|"|'|)(zn{_TAG}x\d+nz)\1""")
MAX_ECHO = 100  # characters of a name that a client made up
UNCLEAN = re.compile("[\x00\ud800-\udfff]")


def clean_key(key: str) -> str:
    """A key that a client made up, as a part of a path."""
    return UNCLEAN.sub("\ufffd", key[:MAX_ECHO])


class RepeatedKey(ValueError):
    """An object holds a key twice. `path` leads to it."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is given twice; send it once")
        self.path = path


class WrittenNumber(float):
    """A number whose text is not the one that Python writes for it, such as 1.10, 1E5 or 0.1234567890123456789."""

    written: str

    @property
    def is_float(self) -> bool:
        """Return whether a float holds it: all digits that it is written with are those of the float nearest to it."""
        return math.isfinite(self) and Decimal(self.written) == Decimal(float.__repr__(self))

    def __repr__(self) -> str:
        return self.written

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_float, (self.written,)


class CallArguments(dict[str, Any]):
    """The arguments of a call in the conversation, which know the text that they were sent as."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self.text = text


def load_json(text: str) -> Any:
    """The value of a JSON text, in which numbers that floats would change are `WrittenNumber`s.

    Raises:
        RepeatedKey: an object holds a key twice.
        ValueError: it is not JSON; NaN and Infinity are not either.
        RecursionError: it is nested too deeply.
    """
    repeated: dict[int, tuple[dict[str, Any], str]] = {}

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            repeated[id(made)] = made, twice
        return made

    value = json.loads(text, parse_constant=refuse_constant, parse_float=_read_float, object_pairs_hook=read_object)
    if repeated:
        raise RepeatedKey(next(_repeated_in(value, "", repeated)))
    return value


def _repeated_in(value: Any, path: str, repeated: Mapping[int, tuple[dict[str, Any], str]]) -> Iterator[str]:
    start = f"{path}." if path else ""
    if id(value) in repeated:
        yield start + clean_key(repeated[id(value)][1])
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _repeated_in(item, start + clean_key(str(key)), repeated)


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _read_float(text: str) -> float:
    value = float(text)
    if repr(value) == text:
        return value
    number = WrittenNumber(text)
    number.written = text
    return number


def plain(value: Any) -> Any:
    """The value itself, or the float where it is a number that keeps its text."""
    return float(value) if type(value) is WrittenNumber else value


def first_not_float(value: Any, path: str) -> tuple[str, str] | None:
    """Path and text of the first number of a JSON value that a float changes; None = there is none."""
    if type(value) is WrittenNumber and not value.is_float:
        return path, value.written
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    found = (first_not_float(item, f"{path}.{clean_key(str(key))}") for key, item in items)
    return next((one for one in found if one is not None), None)


class KeptNumbers:
    """Carries numbers that keep their text through a chat template: words stand for them while JSON is written."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def hold(self, value: Any) -> Any:
        """A JSON value in which words stand for the numbers that keep their text."""
        if type(value) is WrittenNumber:
            word = f"zn{_TAG}x{len(self._numbers)}nz"
            self._numbers[word] = value.written
            return word
        if isinstance(value, list | tuple):
            return [self.hold(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.hold(item) for key, item in value.items()}
        return value

    def put_back(self, text: str) -> str:
        """A text with the numbers in the place of their words, quoted or not."""
        return _HELD.sub(lambda held: self._numbers.get(held[2], held[0]), text)
