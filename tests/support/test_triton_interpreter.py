from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.triton_interpreter import _once_a_launch, _once_a_type, strict_interpreter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _double(numbers, doubled, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(numbers + place, mask=place < SIZE, other=0.0)
    tl.store(doubled + place, 2 * number, mask=(place < SIZE) | (not MASKED))


@triton.jit
def _double_rows(numbers, doubled, BLOCK: tl.constexpr):
    """Rows of 5, of which each program writes 8 numbers: three of its neighbour's, or of nobody's."""
    place = tl.program_id(0) * 5 + tl.arange(0, BLOCK)
    number = tl.load(numbers + place, mask=tl.arange(0, BLOCK) < 5, other=0.0)
    tl.store(doubled + place, 2 * number, mask=place < 20)


@triton.jit
def _sum(numbers, total, BLOCK: tl.constexpr):
    tl.atomic_add(total, tl.sum(tl.load(numbers + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), axis=0))


def test_a_sound_kernel_computes_in_the_tensors_that_it_is_given() -> None:
    numbers, wide = torch.arange(10.0), torch.zeros(3, 12)
    with strict_interpreter():
        _double[(3,)](numbers, wide[1], SIZE=10, BLOCK=4, MASKED=True)
    assert wide[1].tolist() == [*(2 * numbers).tolist(), 0, 0] and not wide[::2].any()


def test_a_store_without_its_mask_is_found() -> None:
    with strict_interpreter(), pytest.raises(AssertionError, match="_double writes outside of its tensors"):
        _double[(3,)](torch.arange(10.0), torch.zeros(10), SIZE=10, BLOCK=4, MASKED=False)


def test_a_store_over_a_neighbours_row_is_found_and_so_are_atomic_sums() -> None:
    with strict_interpreter():
        with pytest.raises(AssertionError, match="_double_rows: the order of its programs"):
            _double_rows[(4,)](torch.arange(20.0), torch.zeros(20), BLOCK=8)
        with pytest.raises(AssertionError, match="_sum: the order of its programs"):
            _sum[(16,)](torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.zeros(1), BLOCK=4)


class Patches:
    """In the place of the interpreter's `_patch_lang`."""

    def __init__(self) -> None:
        self.patched: list[str] = []
        self.num_restored = 0

    def __call__(self, function: Any) -> Any:
        self.patched.append(function.__globals__["name"])
        return SimpleNamespace(restore=self._restore)

    def _restore(self) -> None:
        self.num_restored += 1


def function_of(module: dict[str, str]) -> Any:
    return SimpleNamespace(__globals__=module)


def test_the_language_is_patched_once_a_launch_and_module() -> None:
    patches, ours, tritons = Patches(), {"name": "ours"}, {"name": "triton's"}
    patch = _once_a_launch(patches)
    for launch in range(1, 4):
        scope = patch(function_of(ours))
        for module in (ours, tritons, ours, tritons):
            patch(function_of(module))
        assert patches.patched == ["ours", "triton's"] * launch
        scope.restore()
        assert patches.num_restored == launch


def test_types_of_arrays_are_found_by_what_is_in_them() -> None:
    asked = []
    find = _once_a_type(lambda scalar: asked.append(scalar.name) or f"numpy's {scalar.name}")
    for name in ("int32", "fp32", "int32"):
        scalar = SimpleNamespace(name=name)
        scalar.scalar = scalar
        assert find(SimpleNamespace(scalar=scalar)) == find(scalar) == f"numpy's {name}"
    assert asked == ["int32", "fp32"]
