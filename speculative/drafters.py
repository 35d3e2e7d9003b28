"""The drafters without weights, and what can be set of each.

A module of `lookup/` adds one: `drafter` registers a class under its kind, with its options. Nothing else has to
know of it: its kind and its options are then settings of the engine, and fields of the configuration file and its
reference. All drafters' options are one namespace, so their names begin with their drafter's.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from speculative.options import OptionError, Options, OptionValue, options_of


@dataclass(frozen=True, slots=True)
class Registered:
    """A kind of drafter."""

    options: type[Options]
    build: Callable[[Any, int], Any]  # makes one of its options and the most tokens it will draft a round


SomeLookup = TypeVar("SomeLookup", bound=Callable[[Any, int], Any])
_REGISTERED: dict[str, Registered] = {}


def drafter(kind: str, options: type[Options]) -> Callable[[SomeLookup], SomeLookup]:
    """Register a class, or a function that builds a drafter of its options and the most tokens to draft a round. Raises
    ValueError: the kind, or one of the options, is another drafter's already."""
    taken = {name for other in _REGISTERED.values() for name in options_of(other.options)} & options_of(options).keys()
    if kind in _REGISTERED or taken:
        raise ValueError(f"drafter.kind {kind} is registered twice, or its options {sorted(taken)} are another's.")

    def register(build: SomeLookup) -> SomeLookup:
        _REGISTERED[kind] = Registered(options, build)
        return build

    return register


def registered() -> dict[str, Registered]:
    """All drafters of `lookup` by kind, in the order of their names."""
    package = importlib.import_module("speculative.lookup")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_REGISTERED.items()))


def read_options(**values: OptionValue) -> tuple[Options, ...]:
    """The options of all drafters; those that are not named have their defaults. Raises OptionError: a name is no
    drafter's, or a value is wrong."""
    found = []
    try:
        for kind in registered().values():
            found.append(
                kind.options(**{name: values.pop(name) for name in options_of(kind.options) if name in values})
            )
        for name in values:
            raise OptionError(name, "is not an option of any drafter.")
    except OptionError as error:
        raise OptionError(f"drafter.{error.name}", error.rule) from error
    return tuple(found)
