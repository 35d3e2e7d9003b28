"""One test of many things, where each as a case of its own would cost more than what is checked."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
Check = Callable[Concatenate[T, P], None]


def for_each(things: Iterable[T], name: Callable[[T], str] = str) -> Callable[[Check[T, P]], Callable[P, None]]:
    """Make one test of a check of one thing, its first argument; its others are fixtures.

    The test checks all things and fails with what is wrong with each, by name.
    """
    all_things = list(things)
    assert all_things, "there is nothing to check"

    def decorate(check: Check[T, P]) -> Callable[P, None]:
        @functools.wraps(check)
        def test(*args: P.args, **fixtures: P.kwargs) -> None:
            faults = []
            for thing in all_things:
                try:
                    check(thing, *args, **fixtures)
                except Exception as fault:
                    faults.append(f"{name(thing)}: {_text(fault)}")
            assert not faults, f"{len(faults)} of {len(all_things)} are wrong\n" + "\n".join(faults)

        signature = inspect.signature(check)
        fixtures = list(signature.parameters.values())[1:]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate


def _text(fault: Exception) -> str:
    """What is wrong, and the line of the check that noticed it."""
    line = traceback.extract_tb(fault.__traceback__)[:2][-1].lineno
    return f"line {line}: {fault if isinstance(fault, AssertionError) else f'{type(fault).__name__}: {fault}'}"
