"""Triton's interpreter without half of its work, which it does again and again with the same outcome."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Before each call of a device function Triton's interpreter searches its language for what it has to patch, all of
    which is patched by then, and for each array it makes a table of types. Here once a launch, and once a type."""
    from triton.runtime import interpreter

    with (
        mock.patch.object(interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang)),
        mock.patch.object(interpreter, "_get_np_dtype", _once_a_type(interpreter._get_np_dtype)),
    ):
        yield


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A launch patches the language for its kernel's module, and restores it at its end; device functions of other
    modules patch it for theirs."""
    patched = set[int]()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        scope, is_launch = patch(function), not patched
        patched.add(module)
        if is_launch:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    return patch_once


def _once_a_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found = dict[str, Any]()

    def find_once(given: Any) -> Any:
        scalar = given.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return find_once
