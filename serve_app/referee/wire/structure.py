"""Checks of whole answers against the structure that their client asked for, by other libraries than generate them.

llguidance makes the answers; here `json`, `jsonschema` and `regex` read them. What these read differently, or at a cost
that has no bound, is not checked: schemas with `patternProperties` or references to elsewhere, expressions beyond the
syntax that both read alike, Lark grammars, numbers that no arithmetic holds, and whatever takes too long.
"""

import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Literal

import jsonschema
import regex
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

_MOST_STEPS = 5_000  # of a schema: about 0.2 s
_STEP_SIZE = 50  # values that are looked at in the time of one step
_CHARACTERS = 16  # that count as one value
_MAKING = 50  # steps that it takes to make a validator
_MOST_CHARACTERS = 100_000
_MOST_PATTERN_CHARACTERS = 2_000  # which compile in 0.02 s
_PATTERN_S = 0.05  # of matching, all expressions of an answer together
_MOST_DIGITS = 100  # of a number, as it is written
_UNREAD = ("patternProperties", "x-guidance", "unevaluatedItems", "unevaluatedProperties")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_JSON_BEGINS = ("", *'{["-0123456789tfn')
_ODD_SYNTAX = regex.compile(
    r"&&|--|~~|\[[^\]\\]*\[|\{,|\\b\{|\\[xupPzAQEBv]|\(\?(?!:)|[*+?}]\+|[\0-\x08\x0b\x0e-\x1f\x7f]"
)
"""Syntax in which Rust's expressions, which the server takes, and Python's may differ; and characters that servers
never write."""
_CLASSES = regex.compile(r"\\[wWdDsSbB]")
"""Classes that some read as Unicode's, and others as ASCII's; of texts in ASCII they say the same."""


class _Unchecked(Exception):
    """A text that nobody reads here, or not within what there is for one answer."""


def breaks_structure(
    kind: str, text: str, answer: str, *, whole: bool = True, budget: "CheckBudget | None" = None
) -> str:
    """Return how an answer breaks its structure, without the client's own words; "" = it does not, or it is unknown.

    Args:
        kind: json_object, json_schema, regex or choice; others are not checked.
        text: a JSON schema, a regular expression, or a JSON list of choices.
        answer: its text.
        whole: whether it came to its end; of one that was cut off, JSON shows little more than how it begins.
        budget: the work that is left for it; None = that of one answer.
    """
    if kind not in _KINDS or max(len(text), len(answer)) > _MOST_CHARACTERS:
        return ""
    if not whole:
        answer = answer.rstrip("\ufffd")  # it may have been cut within a character
    budget = budget or CheckBudget()
    try:
        budget.spend(len(answer) // _CHARACTERS + (0 if kind == "json_schema" else len(text) // _CHARACTERS))
        if kind == "regex":
            return "" if budget.matches(text, answer, partial=not whole) else "it does not match its regular expression"
        if kind == "choice":
            choices = json.loads(text)
            fits = answer in choices if whole else any(choice.startswith(answer) for choice in choices)
            return "" if fits else "it is none of its choices"
        return _json(text if kind == "json_schema" else None, answer, whole, budget)
    except (_Unchecked, RecursionError):
        return ""


_KINDS = ("json_object", "json_schema", "regex", "choice")


def _json(schema: str | None, answer: str, whole: bool, budget: "CheckBudget") -> str:
    """Say what is wrong with JSON of a schema; None = it is to be any object."""
    if not whole:
        begins, what = (("", "{"), "it is not a JSON object") if schema is None else (_JSON_BEGINS, "it is not JSON")
        return "" if answer.strip()[:1] in begins else what
    try:
        value = _read(answer)
    except ValueError:
        return "it is not JSON"
    if schema is None:
        return "" if isinstance(value, dict) else "it is not a JSON object"
    try:
        error = next(budget.validator(schema).iter_errors(value), None)
    except Exception:  # a schema that the library does not take, or cannot resolve, or that costs too much
        return ""
    return "" if error is None else f"it breaks `{error.validator}` of its JSON schema"


def _read(text: str) -> Any:
    """JSON, with exact numbers: 0.3 is a multiple of 0.1.

    Raises:
        ValueError: it is not JSON.
        _Unchecked: a number in it is longer, or larger, than is computed with.
    """

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not valid JSON")

    return json.loads(text, parse_float=_number, parse_int=_number, parse_constant=no_constant)


def _number(text: str) -> Decimal:
    try:
        if len(text) <= _MOST_DIGITS:
            return Decimal(text)
    except ArithmeticError as error:
        raise _Unchecked from error
    raise _Unchecked


class CheckBudget:
    """The work that there is for one answer.

    A step is one keyword or one part of a schema, applied to one value; one that looks at many values counts as more.
    """

    def __init__(self) -> None:
        self._num_left, self._left_s = _MOST_STEPS, _PATTERN_S
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._compiled: dict[str, Any] = {}
        self._validators: dict[str, Any] = {}  # by the schema's text

    def validator(self, schema: str) -> Any:
        """A validator of a JSON schema, made once for all that is read with it.

        Raises:
            ValueError: it is not JSON.
            _Unchecked: it has what is not read here, or there is no work left.
        """
        if schema not in self._validators:
            self.spend(len(schema) // _CHARACTERS + _MAKING * _STEP_SIZE)
            self._validators[schema] = _validator(_read(schema), self)
        return self._validators[schema]

    def spend(self, size: int) -> None:
        """Take a step that looks at so many values. Raises _Unchecked: there were too many."""
        self._num_left -= 1 + size // _STEP_SIZE
        if self._num_left < 0:
            raise _Unchecked

    def size(self, value: Any) -> int:
        """The number of values in one, itself included; a long text counts as several."""
        if isinstance(value, str):
            return 1 + len(value) // _CHARACTERS
        if not isinstance(value, dict | list):
            return 1
        if id(value) not in self._sizes:
            parts = (*value, *value.values()) if isinstance(value, dict) else value
            self._sizes[id(value)] = value, 1 + sum(map(self.size, parts))  # kept alive, or its id is another's
        return self._sizes[id(value)][1]

    def reads(self, pattern: str, text: str) -> bool:
        """Return whether an expression means to this text what it means to the server, and compiles in little time."""
        if len(pattern) > _MOST_PATTERN_CHARACTERS or _ODD_SYNTAX.search(pattern):
            return False
        return text.isascii() or not _CLASSES.search(pattern)

    def matches(self, pattern: str, text: str, how: Literal["fullmatch", "search"] = "fullmatch", **more: Any) -> bool:
        """Return whether an expression matches all of a text, what that may go on to (with `partial`), or some of it.
        Raises _Unchecked: that is not known."""
        if not self.reads(pattern, text) or self._left_s <= 0:
            raise _Unchecked
        try:
            if pattern not in self._compiled:
                self.spend(len(pattern) * _STEP_SIZE // 2)
                self._compiled[pattern] = regex.compile(pattern, regex.ASCII)
            began = time.perf_counter()
            found = getattr(self._compiled[pattern], how)(text, timeout=self._left_s, **more)
        except (regex.error, TimeoutError) as error:
            raise _Unchecked from error
        self._left_s -= time.perf_counter() - began
        return found is not None


def _validator(schema: Any, budget: CheckBudget) -> Any:
    """A validator of one schema, which fetches nothing and ends. Raises _Unchecked: the schema has a name that is not
    read here, or a part in another dialect, which the library would validate without a bound."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if any(name in part for name in _UNREAD) or ("$schema" in part and part is not schema):
                raise _Unchecked
            parts += (*part, *part.values())
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, str):
            part.encode()  # no answer holds half a character
    library = validator_for(schema, default=jsonschema.Draft202012Validator)

    def bounded(name: str, keyword: Callable[..., Iterator[ValidationError] | None]) -> Callable[..., Any]:
        def check(validator: Any, wanted: Any, value: Any, part: Any) -> Iterator[ValidationError]:
            size = budget.size(value)
            if name == "uniqueItems" and isinstance(value, list):
                size *= len(value)
            looked_up = budget.size(schema) if name in _REFERENCES else 0  # a name may be anywhere
            budget.spend(size + budget.size(wanted) + looked_up)
            yield from keyword(validator, wanted, value, part) or ()

        return check

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and budget.reads(wanted, value) and not budget.matches(wanted, value, "search"):
            yield ValidationError("pattern")

    keywords = {name: bounded(name, keyword) for name, keyword in {**library.VALIDATORS, "pattern": pattern}.items()}
    numbers = library.TYPE_CHECKER.redefine("integer", _is_integer)
    validator = jsonschema.validators.extend(library, keywords, type_checker=numbers)
    evolve = validator.evolve

    def evolved(self: Any, **changes: Any) -> Any:  # for each part of the schema that is applied to a value
        part = changes.get("schema")
        named = sum(budget.size(part.get(name)) for name in ("$id", "id")) if isinstance(part, dict) else 0
        budget.spend(named + (len(part) if isinstance(part, dict) else 0))
        return evolve(self, **changes)

    validator.evolve = evolved
    return validator(schema, registry=REGISTRY)


def _is_integer(_: Any, value: Any) -> bool:
    """Return it as JSON Schema has it, for which 1.0 is one."""
    return isinstance(value, Decimal) and value == value.to_integral_value()
