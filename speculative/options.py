"""Settings: fields of frozen dataclasses, each declared once with its default, its range and its meaning.

The configuration file and its reference are made from them.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from speculative.errors import ConfigError

OptionValue = bool | int | float | str


class OptionError(ConfigError):
    """An option's value is wrong, by itself or beside another's. name: of the option. rule: what it must be."""

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(f"{name} {rule}")
        self.name = name
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of a field; `least` to `pattern` limit its values."""

    type: Any
    default: Any
    meaning: str  # its description in the reference
    least: float | None = None
    most: float | None = None
    above: float | None = None  # and finite
    pattern: str | None = None
    example: OptionValue | None = None  # a value whose effect shows

    def fault(self, value: Any) -> str | None:
        """Return what is wrong with a value; None if it is good, or not set."""
        if value is None:
            return None if self.default is None else "must not be None."
        if self.most is not None and self.least is not None and not self.least <= value <= self.most:
            return f"must be between {self.least} and {self.most}, got {value}."
        if self.least is not None and not self.least <= value:
            return f"must be at least {self.least}, got {value}."
        if self.above is not None and not self.above < value < math.inf:
            return f"must be above {self.above} and finite, got {value}."
        if self.pattern is not None and not re.search(self.pattern, value):
            return f"must match {self.pattern}, got {value!r}."
        return None


def option(default: Any, meaning: str, **limits: float | str) -> Any:
    """A field of `Options`, as `dataclasses.field`; `limits` are those of `Option`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **limits})


def options_of(options: type[Any]) -> dict[str, Option]:
    """The options that a dataclass has, by name. Raises TypeError: an example is outside its range."""
    fields = dataclasses.fields(options)
    found = {own.name: Option(own.type, own.default, **own.metadata) for own in fields if own.metadata}
    wrong = [name for name, one in found.items() if one.example is not None and one.fault(one.example)]
    if wrong:
        raise TypeError(f"The example of {wrong[0]} is outside its range.")
    return found


def first_fault(options: Mapping[str, Option], values: Any) -> tuple[str, str] | None:
    """Return the first option whose value is outside its range, and what is wrong with it; None if all are good."""
    for name, declared in options.items():
        fault = declared.fault(getattr(values, name))
        if fault is not None:
            return name, fault
    return None


@dataclass(frozen=True, slots=True)
class Options:
    """The base of frozen dataclasses whose fields are `option`s.

    Raises:
        OptionError: a value is outside its range, or `check` refuses it.
    """

    def __post_init__(self) -> None:
        found = first_fault(options_of(type(self)), self)
        if found is not None:
            raise OptionError(*found)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other, by `OptionError`."""


SomeOptions = TypeVar("SomeOptions", bound=Options)
