"""Whether a whole answer keeps to the structure that its client asked for, by other libraries than generate it.

llguidance makes the answers; here `json`, `jsonschema` and `regex` read them. What these read differently, or at a cost
that has no bound, is not checked: schemas with `patternProperties` or references to elsewhere, expressions beyond the
syntax that both read alike, Lark grammars, and whatever takes too long.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import jsonschema
import regex
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

_MOST_STEPS = 5_000  # keywords of a schema applied to values; 0.2 s
_MOST_CHARACTERS = 100_000
_PATTERN_S = 0.05
_UNREAD = ("patternProperties", "x-guidance", "unevaluated")
_JSON_BEGINS = ("", *'{["-0123456789tfn')
_ODD_SYNTAX = regex.compile(r"&&|--|~~|\[[^\]\\]*\[|\{,|\\b\{|\\[xupPzAQEB]|\(\?(?!:)|[*+?}]\+")
"""Where Rust's expressions, which the server takes, and Python's may differ."""


class _TooCostly(Exception):
    """A schema that takes more steps than there are for one answer."""


def breaks_structure(kind: str, text: str, answer: str, *, whole: bool = True) -> str:
    """Why an answer does not keep to a structure, in words without a client's own; "" = it does, or who knows.

    Args:
        kind: json_object, json_schema, regex or choice; others are not checked.
        text: a JSON schema, a regular expression, or a JSON list of choices.
        answer: its text.
        whole: whether it came to its end; of one that was cut off, JSON shows little more than how it begins.
    """
    check = _CHECKS.get(kind)
    if check is None or max(len(text), len(answer)) > _MOST_CHARACTERS:
        return ""
    return check(text, answer if whole else answer.rstrip("\ufffd"), whole)  # it may have been cut within a character


def _json_object(_: str, answer: str, whole: bool) -> str:
    if not whole:
        return "" if answer.strip()[:1] in ("", "{") else "it is no JSON object"
    try:
        value = _read(answer)
    except (ValueError, RecursionError):
        return "it is not JSON"
    return "" if isinstance(value, dict) else "it is no JSON object"


def _json_schema(text: str, answer: str, whole: bool) -> str:
    if not whole:
        return "" if answer.strip()[:1] in _JSON_BEGINS else "it is not JSON"
    if any(word in text for word in _UNREAD):
        return ""
    try:
        value = _read(answer)
    except RecursionError:
        return ""
    except ValueError:
        return "it is not JSON"
    try:
        schema = _read(text)
        error = next(_validator(schema).iter_errors(value), None)
    except Exception:  # a schema that the library does not take, or cannot resolve, or that costs too much
        return ""
    return "" if error is None else f"it breaks `{error.validator}` of its JSON schema"


def _regex(text: str, answer: str, whole: bool) -> str:
    if _ODD_SYNTAX.search(text):
        return ""
    try:
        found = regex.compile(text, regex.ASCII).fullmatch(answer, partial=not whole, timeout=_PATTERN_S)
    except (regex.error, TimeoutError, RecursionError):
        return ""
    return "" if found else "it does not match its regular expression"


def _choice(text: str, answer: str, whole: bool) -> str:
    choices = json.loads(text)
    fits = answer in choices if whole else any(choice.startswith(answer) for choice in choices)
    return "" if fits else "it is none of its choices"


_CHECKS: Mapping[str, Callable[[str, str, bool], str]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
}


def _read(text: str) -> Any:
    """JSON, with exact numbers: 0.3 is a multiple of 0.1."""
    return json.loads(text, parse_float=Decimal, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _validator(schema: Any) -> Any:
    """A validator of one schema, which fetches nothing and ends."""
    library = validator_for(schema, default=jsonschema.Draft202012Validator)
    num_left = _MOST_STEPS

    def bounded(keyword: Callable[..., Iterator[ValidationError] | None]) -> Callable[..., Iterator[ValidationError]]:
        def check(*args: Any) -> Iterator[ValidationError]:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise _TooCostly
            yield from keyword(*args) or ()

        return check

    keywords = {name: bounded(keyword) for name, keyword in library.VALIDATORS.items()}
    keywords["pattern"] = bounded(_pattern)
    numbers = library.TYPE_CHECKER.redefine("integer", _is_integer)
    return jsonschema.validators.extend(library, keywords, type_checker=numbers)(schema, registry=REGISTRY)


def _is_integer(_: Any, value: Any) -> bool:
    """As JSON Schema has it, for which 1.0 is one."""
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    is_read = isinstance(value, str) and not _ODD_SYNTAX.search(pattern)
    if is_read and not regex.search(pattern, value, regex.ASCII, timeout=_PATTERN_S):
        yield ValidationError("pattern")
