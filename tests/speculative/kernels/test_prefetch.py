"""The choice of a way to prefetch, on a clock of made-up products."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.kernels.bindings import NUM_WAYS, LinearStruct
from speculative.kernels.prefetch import WAYS, measured_ways

NONE, PAST, NEAR, FAR = range(len(WAYS))


@dataclass
class Products:
    """Kernels whose products take the time that a table says, on a clock of their own."""

    took: dict[tuple[int, int], float]
    now: float = 0.0
    ways: tuple[int, ...] = ()
    noise: int = 0

    def prefetch(self, ways: Sequence[int]) -> None:
        assert len(ways) == NUM_WAYS
        self.ways = tuple(ways)

    def linear(self, linear: LinearStruct, rows: Tensor) -> Tensor:
        self.noise += 1
        place = 0 if linear.kind == 2 else len(rows)
        self.now += self.took.get((place, self.ways[place]), 1.0) * (3 if self.noise % 5 == 0 else 1)
        return rows


def test_each_number_of_products_gets_its_fastest_way_whatever_else_runs() -> None:
    fastest = {(0, FAR): 0.9, (1, NONE): 0.5, (2, PAST): 0.8, (3, FAR): 0.7, (4, NEAR): 0.6}
    kernels = Products(fastest)
    threads = torch.get_num_threads()
    assert measured_ways(kernels, lambda: kernels.now) == (FAR, NONE, PAST, FAR, NEAR, NEAR)  # type: ignore[arg-type]
    assert kernels.ways == (FAR, NONE, PAST, FAR, NEAR, NEAR), "they are set"
    assert torch.get_num_threads() == threads


def test_what_gains_nothing_to_speak_of_changes_nothing() -> None:
    kernels = Products({(places, way): 0.98 for places in range(NUM_WAYS) for way in (NONE, PAST, FAR)})
    assert measured_ways(kernels, lambda: kernels.now) == (NEAR,) * NUM_WAYS  # type: ignore[arg-type]


def test_integers_are_always_asked_for_into_all_caches() -> None:
    kernels = Products({(0, NONE): 0.1, (0, PAST): 0.1})
    assert measured_ways(kernels, lambda: kernels.now)[0] == NEAR  # type: ignore[arg-type]
