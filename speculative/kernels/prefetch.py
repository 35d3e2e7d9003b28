"""The choice of how weights are prefetched, measured where the CPU kernels are compiled.

The fastest way depends on the processor and on how many products each weight takes part in. One maker's best makes
products of one row take 1.5 times as long on the other's, and those of two rows twice as long.
"""

import time
from collections.abc import Callable, Sequence

import torch

from speculative.kernels.bindings import NUM_WAYS, Kernels, LinearStruct

WAYS = ("none", "past the outer caches", "near", "far")
"""`Way` of products.cpp, in its order."""
_ALWAYS_CACHED = (2, 3)
_DEFAULT = 2
_INPUTS, _OUTPUTS = 1024, 32768
_BFLOAT16, _W4A8 = 1, 2  # kinds of products.cpp
_ROUNDS = 3
_GAIN = 0.97  # a way is taken for another one when it needs at most so much of its time


def measured_ways(kernels: Kernels, clock: Callable[[], float] = time.perf_counter) -> tuple[int, ...]:
    """Return the fastest way for each number of products, by some fifty products with 64 MiB of weights (0.5 s).

    Args:
        kernels: their ways are changed meanwhile, and are the result's afterwards.
        clock: in seconds.
    """
    weight = torch.full((_INPUTS * _OUTPUTS // 2,), 0x3C003C00, dtype=torch.int32)
    chosen = [_DEFAULT] * NUM_WAYS
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for products in range(NUM_WAYS):
            kind, num_rows = (_W4A8, 1) if products == 0 else (_BFLOAT16, products)
            linear = LinearStruct(weight.data_ptr(), None, _INPUTS, _OUTPUTS, kind)
            rows = torch.ones((num_rows, _INPUTS))
            ways = _ALWAYS_CACHED if products == 0 else range(len(WAYS))
            took = dict.fromkeys(ways, float("inf"))
            for _ in range(_ROUNDS):
                for way in ways:
                    kernels.prefetch([*chosen[:products], way, *chosen[products + 1 :]])
                    start = clock()
                    kernels.linear(linear, rows)
                    took[way] = min(took[way], clock() - start)
            fastest = min(took, key=took.__getitem__)
            chosen[products] = fastest if took[fastest] < _GAIN * took[_DEFAULT] else _DEFAULT
    finally:
        torch.set_num_threads(num_threads)
    kernels.prefetch(chosen)
    return tuple(chosen)


def describe_ways(ways: Sequence[int]) -> str:
    """Name the ways for people: of integers (and of many products), then of 1 to 5 products for each weight."""
    few = ", ".join(f"{products}: {WAYS[way]}" for products, way in enumerate(ways) if products > 0)
    return f"integers: {WAYS[ways[0]]}; others by products for each weight: {few}"
