"""JSON as clients send it: every key once, and numbers that a float holds."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_ECHO = 100  # characters of a name that a client made up
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
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"{clean_key(twice)} is given twice in one object; send it once")
    return made
