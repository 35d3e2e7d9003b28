"""Every arithmetic of a step over the vocabulary, by one kit of checks."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.judged_rows import KINDS
from tests.support.step_conformance import ARITHMETICS, CHECKS, Arithmetic
from tests.support.triton_interpreter import needs_triton
from tests.support.vocabulary import needs_kernels

pytestmark = pytest.mark.slow

NEEDS = {"kernels": needs_kernels, "captured, triton": needs_triton}


@pytest.fixture(params=[pytest.param(name, marks=NEEDS.get(name, ())) for name in ARITHMETICS])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[Arithmetic]:
    with ARITHMETICS[request.param]() as made:
        yield made


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_arithmetic_computes_the_same(arithmetic: Arithmetic, check: Callable[[Arithmetic], None]) -> None:
    if arithmetic.edit is not None:  # Triton's
        arithmetic = replace(arithmetic, kinds=(KINDS[CHECKS.index(check) % len(KINDS)],))
    check(arithmetic)
