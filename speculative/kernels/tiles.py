"""The choices between AMX tiles and AVX-512, made where the CPU kernels are compiled.

Products of bfloat16s and attention over a cache of them round in different orders by the two. A token's bits must not
depend on what else is computed, so one of the two serves all numbers of rows.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels, LinearStruct, ShapeStruct, StepStruct

Clock = Callable[[], float]
"""In seconds."""
Choice = Literal["by_tiles", "attends_by_tiles"]
"""An attribute of `Kernels`; false or 0 = AVX-512 does it."""

_INPUTS, _OUTPUTS = 1024, 32768
_BFLOAT16 = 1  # a kind of products.cpp
_ROWS = (1, 16, 256)
_HEADS, _KV_HEADS, _HEAD_DIM = 24, 8, 64
_POSITIONS = 1024
_LAST_ROWS = (1, 256)  # whose attention is timed
_ROUNDS = 3
_GAIN = 0.97  # tiles are taken when they need at most so much of AVX-512's time
_ROUNDING = 1e-4  # of the largest sum: orders of summation differ by far less, errors by far more
_ROUNDING_OF_WEIGHTS = 1e-2  # the same, where a weight of attention becomes one bfloat16


def measured_tiles(kernels: Kernels, clock: Clock = time.perf_counter) -> tuple[bool, str]:
    """Return whether products of bfloat16s are left to tiles, and why or why not.

    They are where tiles prove right and, by the mean over some numbers of rows, faster. The kernels, whose tiles this
    process may use, do as chosen afterwards.
    """
    with _one_thread():
        if wrong := _wrong_products(kernels):
            return False, wrong
        shares = [_share_of_product(kernels, num_rows, clock) for num_rows in _ROWS]
    return _choose(kernels, "by_tiles", "products", shares)


def measured_attention(kernels: Kernels, clock: Clock = time.perf_counter) -> tuple[bool, str]:
    """Return whether attention over a cache in bfloat16 is left to tiles, and why or why not.

    It is where tiles prove right and, by the mean over a row and a part of a prompt, faster. Otherwise as
    `measured_tiles`.
    """
    with _one_thread():
        if wrong := _wrong_attention(kernels):
            return False, wrong
        sequence = _Sequence(_POSITIONS)
        shares = []
        for num_rows in _LAST_ROWS:
            step = partial(sequence.attend, kernels, _POSITIONS - num_rows, _POSITIONS)
            shares.append(_share_of_time(kernels, "attends_by_tiles", step, clock))
    return _choose(kernels, "attends_by_tiles", "attention", shares)


def _choose(kernels: Kernels, choice: Choice, work: str, shares: list[float]) -> tuple[bool, str]:
    """Leave work to tiles if they gain time by the mean over these shares of AVX-512's; whether they do, and why."""
    share = sum(shares) / len(shares)
    by_tiles = share <= _GAIN
    setattr(kernels, choice, by_tiles)
    return by_tiles, f"{work} by AMX tiles took {share:.2f} of the time by AVX-512"


class _Sequence:
    """A sequence of random queries, keys and values, and its cache in bfloat16."""

    def __init__(self, num_positions: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.qkv = torch.randn((num_positions, _HEADS + 2 * _KV_HEADS, _HEAD_DIM), generator=generator)
        self.cache = self.qkv[:, _HEADS:].unflatten(1, (2, -1)).transpose(0, 1)[None].bfloat16().contiguous()

    def attend(self, kernels: Kernels, begin: int, end: int) -> Tensor:
        """Attention of positions begin..end: [end - begin, heads, head_dim]."""
        positions = torch.arange(end)
        row_starts, context_starts = torch.tensor([0, end - begin]), torch.tensor([0, end])
        step = StepStruct(
            num_rows=end - begin,
            num_spans=1,
            slots=positions[begin:].data_ptr(),
            row_starts=row_starts.data_ptr(),
            context=positions.data_ptr(),
            context_starts=context_starts.data_ptr(),
        )
        shape = ShapeStruct(
            num_heads=_HEADS,
            num_kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            num_slots=self.cache.shape[2],
            cache_is_bfloat16=True,
        )
        query, key, value = self.qkv[begin:end].split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        return kernels.attend(shape, step, self.cache, 0, (query, key, value))


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def _chosen(kernels: Kernels, choice: Choice, by_tiles: bool) -> Iterator[None]:
    setattr(kernels, choice, by_tiles)
    try:
        yield
    finally:
        setattr(kernels, choice, False)


def _wrong_products(kernels: Kernels) -> str:
    """Return what is wrong with the products of tiles on this machine; "" = nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((96, _INPUTS), generator=generator).bfloat16()
    panels = weight.view(torch.int32).view(3, 32, -1).transpose(1, 2).contiguous()
    rows = torch.randn((37, _INPUTS), generator=generator)
    linear = LinearStruct(panels.data_ptr(), None, _INPUTS, len(weight), _BFLOAT16)
    by_avx512 = kernels.linear(linear, rows)
    with _chosen(kernels, "by_tiles", True):
        by_tiles = kernels.linear(linear, rows)
        alone = torch.cat([kernels.linear(linear, row) for row in rows.split(1)])
    if not (by_tiles - by_avx512).abs().max() <= _ROUNDING * by_avx512.abs().max():
        return "products by AMX tiles are wrong on this machine"
    if not torch.equal(by_tiles, alone):
        return "products by AMX tiles depend on the number of rows on this machine"
    return ""


def _wrong_attention(kernels: Kernels) -> str:
    """Return what is wrong with attention by tiles on this machine; "" = nothing."""
    begin, end = 60, 101  # rows that see all of a block of 32 positions, and some that see parts of it
    sequence = _Sequence(end)
    by_avx512 = sequence.attend(kernels, begin, end)
    with _chosen(kernels, "attends_by_tiles", True):
        by_tiles = sequence.attend(kernels, begin, end)
        alone = torch.cat([sequence.attend(kernels, row, row + 1) for row in range(begin, end)])
    if not (by_tiles - by_avx512).abs().max() <= _ROUNDING_OF_WEIGHTS * by_avx512.abs().max():
        return "attention by AMX tiles is wrong on this machine"
    if not torch.equal(by_tiles, alone):
        return "attention by AMX tiles depends on the number of rows on this machine"
    return ""


def _share_of_product(kernels: Kernels, num_rows: int, clock: Clock) -> float:
    """Return the time of products by tiles over that by AVX-512."""
    weight = torch.full((_INPUTS * _OUTPUTS // 2,), 0x3C003C00, dtype=torch.int32)
    linear = LinearStruct(weight.data_ptr(), None, _INPUTS, _OUTPUTS, _BFLOAT16)
    rows = torch.ones((num_rows, _INPUTS))
    return _share_of_time(kernels, "by_tiles", lambda: kernels.linear(linear, rows), clock)


def _share_of_time(kernels: Kernels, choice: Choice, work: Callable[[], object], clock: Clock) -> float:
    """Return the time of work by tiles over that by AVX-512, the best of some rounds each."""
    took = {True: float("inf"), False: float("inf")}
    for _ in range(_ROUNDS):
        for by_tiles in took:
            with _chosen(kernels, choice, by_tiles):
                start = clock()
                work()
                took[by_tiles] = min(took[by_tiles], clock() - start)
    return took[True] / took[False]
