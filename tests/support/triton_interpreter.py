"""Triton's interpreter, quicker and stricter.

Quicker: without half of its work, which it does again and again with the same outcome. Stricter: what it computes one
program after another, a GPU computes all at once, and what lies beside a tensor is somebody else's there.
"""

import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)
_GUARD = 32 << 10  # bytes before and behind each tensor: more than a program stores
_CANARY = 0xFF  # a byte; NaN of any floating type
SHUFFLED = 2  # launches of each kernel and its constants, whose programs run in another order, too
_nobodys: list[Tensor] = []
_full, _empty = torch.full, torch.empty  # which tests replace


@contextmanager
def strict_interpreter() -> Iterator[None]:
    """Have launches find programs that write where they may not.

    A launch sees copies of its tensors between canaries, which must stay. The first launches of a kernel run twice, the
    second time with their programs in another order: bit for bit the same.
    """
    from triton.runtime.interpreter import InterpretedFunction

    seen: Counter[Any] = Counter()
    run = InterpretedFunction.run

    def run_strictly(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        def once() -> _Memory:
            memory = _Memory(args)
            run(kernel, *memory.arguments, grid=grid, warmup=warmup, **options)
            memory.check(kernel.fn.__name__)
            return memory

        found = once()
        key = kernel.fn, *sorted((name, str(value)) for name, value in options.items())
        seen[key] += 1
        if seen[key] <= SHUFFLED:
            with _shuffled():
                again = once()
            assert found.holds_what(again), f"{kernel.fn.__name__}: the order of its programs changes what it computes"
        found.give_back()

    with quick_interpreter(), mock.patch.object(InterpretedFunction, "run", run_strictly):
        yield


@contextmanager
def nobodys(part: Tensor) -> Iterator[None]:
    """A part of a tensor that programs may write to in any order, since nobody reads it."""
    _nobodys.append(part)
    try:
        yield
    finally:
        _nobodys.pop()


@contextmanager
def poisoned_workspaces() -> Iterator[None]:
    """Numbers are NaN until a program writes them: what none has written, nobody may read."""

    def empty(*shape: Any, **named: Any) -> Tensor:
        made = _empty(*shape, **named)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with mock.patch.object(torch, "empty", empty), np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield


class _Memory:
    """A launch's arguments, with tensors in memory of their own."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # the given storage's bytes, and the copy with its guards
        self.arguments = [self._moved(one) if isinstance(one, Tensor) else one for one in args]

    def _moved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._buffers:
            given = _empty(0, dtype=torch.uint8).set_(storage)
            buffer = _full((len(given) + 2 * _GUARD,), _CANARY, dtype=torch.uint8)
            buffer[_GUARD : _GUARD + len(given)].copy_(given)
            self._buffers[storage._cdata] = given, buffer
        place = _GUARD // tensor.element_size() + tensor.storage_offset()
        moved = _empty(0, dtype=tensor.dtype)
        buffer = self._buffers[storage._cdata][1]
        return moved.set_(buffer.untyped_storage(), place, tensor.size(), tensor.stride())

    def check(self, name: str) -> None:
        """Nothing was written beside the tensors."""
        for _, buffer in self._buffers.values():
            guards = buffer[:_GUARD], buffer[-_GUARD:]
            assert all(bool((guard == _CANARY).all()) for guard in guards), f"{name} writes outside of its tensors"

    def holds_what(self, other: "_Memory") -> bool:
        """Bit for bit."""
        for part in _nobodys:
            for memory in (self, other):
                if part.untyped_storage()._cdata in memory._buffers:
                    memory._moved(part).zero_()
        pairs = zip(self._buffers.values(), other._buffers.values(), strict=True)
        return all(torch.equal(own, theirs) for (_, own), (_, theirs) in pairs)

    def give_back(self) -> None:
        """Write to the given tensors what was computed."""
        for given, buffer in self._buffers.values():
            given.copy_(buffer[_GUARD : _GUARD + len(given)])


@contextmanager
def _shuffled() -> Iterator[None]:
    """The programs of a grid in an order made up, the last of them first."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_dim, set_index, orders = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx, list[list[int]]()

    def set_grid_dim(self: Any, *sizes: int) -> None:
        order = list(range(sizes[0] * sizes[1] * sizes[2]))[::-1]
        order[1:] = random.Random(len(order)).sample(order[1:], len(order) - 1)
        orders[:] = [order]
        set_dim(self, *sizes)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, height, depth = self.grid_dim
        place = orders[0][(x * height + y) * depth + z]
        set_index(self, place // (height * depth), place // depth % height, place % depth)

    with (
        mock.patch.object(InterpreterBuilder, "set_grid_dim", set_grid_dim),
        mock.patch.object(InterpreterBuilder, "set_grid_idx", set_grid_idx),
    ):
        yield


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
