"""The choice between AMX tiles and AVX-512 for products of bfloat16s, made where the CPU kernels are compiled.

Both round, in different orders. A token's bits must not depend on what else is computed, so one of the two serves all
numbers of rows.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels, LinearStruct

_INPUTS, _OUTPUTS = 1024, 32768
_BFLOAT16, _BFLOAT16_PAIRS = 1, 2  # kinds of products.cpp
_ROWS = (1, 16, 256)
_ROUNDS = 3
_GAIN = 0.97  # tiles are taken when they need at most so much of AVX-512's time, by the mean over the numbers of rows
_ROUNDING = 1e-4  # of the largest sum: orders of summation differ by far less, errors by far more


def measured_tiles(kernels: Kernels, clock: Callable[[], float] = time.perf_counter) -> tuple[bool, str]:
    """Return whether products of bfloat16s are left to tiles, and why or why not.

    Args:
        kernels: with tiles that this process may use; they do as chosen afterwards.
        clock: in seconds.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if wrong := _wrong_products(kernels):
            return False, wrong
        share = sum(_share_of_time(kernels, num_rows, clock) for num_rows in _ROWS) / len(_ROWS)
    finally:
        torch.set_num_threads(num_threads)
    kernels.by_tiles = share <= _GAIN
    return kernels.by_tiles, f"products by AMX tiles took {share:.2f} of the time of those by AVX-512"


def _wrong_products(kernels: Kernels) -> str:
    """Return what is wrong with the products of tiles on this machine; "" = nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((96, _INPUTS), generator=generator).bfloat16()
    panels = weight.view(torch.int32).view(3, 32, -1).transpose(1, 2).contiguous()
    rows = torch.randn((37, _INPUTS), generator=generator)
    for kind in (_BFLOAT16, _BFLOAT16_PAIRS):
        linear = LinearStruct(panels.data_ptr(), None, _INPUTS, len(weight), kind)
        by_avx512 = _products(kernels, linear, rows, by_tiles=False)
        by_tiles = _products(kernels, linear, rows, by_tiles=True)
        alone = torch.cat([_products(kernels, linear, row, by_tiles=True) for row in rows.split(1)])
        if not (by_tiles - by_avx512).abs().max() <= _ROUNDING * by_avx512.abs().max():
            return "products by AMX tiles are wrong on this machine"
        if not torch.equal(by_tiles, alone):
            return "products by AMX tiles depend on the number of rows on this machine"
    return ""


def _products(kernels: Kernels, linear: LinearStruct, rows: Tensor, *, by_tiles: bool) -> Tensor:
    kernels.by_tiles = by_tiles
    try:
        return kernels.linear(linear, rows)
    finally:
        kernels.by_tiles = False


def _share_of_time(kernels: Kernels, num_rows: int, clock: Callable[[], float]) -> float:
    """Return the time of products by tiles over that by AVX-512, the best of some rounds each."""
    weight = torch.full((_INPUTS * _OUTPUTS // 2,), 0x3C003C00, dtype=torch.int32)
    linear = LinearStruct(weight.data_ptr(), None, _INPUTS, _OUTPUTS, _BFLOAT16_PAIRS)
    rows = torch.ones((num_rows, _INPUTS))
    took = {True: float("inf"), False: float("inf")}
    for _ in range(_ROUNDS):
        for by_tiles in took:
            start = clock()
            _products(kernels, linear, rows, by_tiles=by_tiles)
            took[by_tiles] = min(took[by_tiles], clock() - start)
    return took[True] / took[False]
