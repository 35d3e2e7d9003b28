"""Attention over long contexts, which is computed in blocks of positions: what happens at their borders.

A cache in float32, one in bfloat16, and one in bfloat16 by tiles are tested.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.model.config import PLAIN, ScoreRule
from tests.speculative.kernels.test_kernels import attended, compiled, random
from tests.support.vocabulary import needs_kernels

pytestmark = needs_kernels
BLOCK = 256  # kPositions of attention.cpp
HEADS, KV_HEADS = 6, 2
WINDOW = ScoreRule(window=40)


@dataclass(frozen=True)
class Arithmetic:
    """A way to attend, over heads of some size, and how far it may be from double precision."""

    dtype: torch.dtype
    by_tiles: bool
    head_dim: int
    rounding: float
    kernels: Kernels

    def qkv(self, num_rows: int) -> Tensor:
        return random(num_rows, HEADS + 2 * KV_HEADS, self.head_dim)

    def attend(self, qkv: Tensor, chunks: list[int], rule: ScoreRule = PLAIN) -> Tensor:
        self.kernels.attends_by_tiles = self.by_tiles
        return attended(self.kernels, qkv, HEADS, chunks, rule, dtype=self.dtype)

    def check(self, qkv: Tensor, rule: ScoreRule = PLAIN) -> None:
        """Compare all rows of a sequence with double precision."""
        found = self.attend(qkv, [len(qkv)], rule)
        torch.testing.assert_close(found.double(), self.expected(qkv, rule), rtol=0, atol=self.rounding)

    def expected(self, qkv: Tensor, rule: ScoreRule = PLAIN) -> Tensor:
        query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        keys, values = (
            part.to(self.dtype).double().repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (rule.scale or self.head_dim**-0.5)
        scores = scores if rule.cap is None else torch.tanh(scores / rule.cap) * rule.cap
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        unseen |= torch.ones_like(unseen).tril(-(rule.window or len(qkv)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(dim=-1), values)


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 by tiles"])
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    name: str = request.param
    if name == "float32":
        return Arithmetic(torch.float32, False, 48, 1e-5, compiled())
    if name == "bfloat16":
        return Arithmetic(torch.bfloat16, False, 48, 0.04, compiled())
    return Arithmetic(torch.bfloat16, True, 32, 0.04, request.getfixturevalue("tiles"))


@pytest.mark.parametrize("window", [None, 1, 2, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_every_length_and_window_around_borders_of_blocks(window: int | None, arithmetic: Arithmetic) -> None:
    arithmetic.check(arithmetic.qkv(2 * BLOCK + 3), ScoreRule(window=window))


@pytest.mark.parametrize("rule", [PLAIN, WINDOW, ScoreRule(window=BLOCK + 1, cap=2.0, scale=0.3)])
@pytest.mark.usefixtures("two_threads")
def test_a_row_is_the_same_bits_in_any_company_across_borders_on_any_number_of_threads(
    rule: ScoreRule, arithmetic: Arithmetic
) -> None:
    qkv = arithmetic.qkv(2 * BLOCK + 3)
    torch.set_num_threads(1)
    whole = arithmetic.attend(qkv, [len(qkv)], rule)
    around = [BLOCK - 2, 1, 1, 1, BLOCK - 3, 1, 1, 1, 2]  # so rows see 255, 256, 257, 511, 512 and 513 positions alone
    across = [5, BLOCK - 7, 5, 100, 100, BLOCK - 200]
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for chunks in (around, across):
            assert sum(chunks) == len(qkv)
            assert torch.equal(arithmetic.attend(qkv, chunks, rule), whole)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("lift", [4.0, 60.0])
@pytest.mark.parametrize("place", [10, BLOCK - 1, BLOCK, BLOCK + 50, 2 * BLOCK])
def test_the_largest_score_lies_in_any_block(
    place: int, lift: float, cap: float | None, arithmetic: Arithmetic
) -> None:
    """In the first one it holds for all that follow, in a later one what is known so far is weighed anew."""
    qkv = arithmetic.qkv(2 * BLOCK + 3)
    qkv[:, :HEADS, 0] = 1.0
    qkv[place, HEADS : HEADS + KV_HEADS, 0] = lift * arithmetic.head_dim**0.5
    arithmetic.check(qkv, ScoreRule(cap=cap))


@pytest.mark.parametrize("lift", [-80.0, -1e5, -1e30])
@pytest.mark.parametrize("begin", [0, BLOCK])
def test_all_scores_of_a_block_are_very_small(begin: int, lift: float, arithmetic: Arithmetic) -> None:
    qkv = arithmetic.qkv(2 * BLOCK + 40)
    qkv[:, :HEADS, 0] = 1.0
    keys = qkv[begin : begin + BLOCK, HEADS : HEADS + KV_HEADS]
    keys[:] = 0.0  # all scores of the block are alike, however large
    keys[..., 0] = lift
    arithmetic.check(qkv)


def test_scores_of_minus_infinity_weigh_nothing(arithmetic: Arithmetic) -> None:
    """A query that sees no others has no result."""
    qkv = arithmetic.qkv(BLOCK + 40)
    qkv[:, :HEADS, 0] = 1.0
    qkv[:BLOCK, HEADS : HEADS + KV_HEADS, 0] = -torch.inf
    found = arithmetic.attend(qkv, [len(qkv)])
    assert found[:BLOCK].isnan().all()
    expected = arithmetic.expected(qkv[BLOCK:])
    torch.testing.assert_close(found[BLOCK:].double(), expected, rtol=0, atol=arithmetic.rounding)


@pytest.mark.parametrize("rule", [PLAIN, WINDOW])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
@pytest.mark.parametrize("begin", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 36])
def test_a_query_sees_nothing_behind_itself_or_before_its_window_in_any_block(
    begin: int, damage: float, rule: ScoreRule, arithmetic: Arithmetic
) -> None:
    qkv = arithmetic.qkv(BLOCK + 90)
    sound = arithmetic.attend(qkv, [len(qkv)], rule)
    qkv[begin : begin + 2, HEADS:] = damage  # keys and values
    spoilt = arithmetic.attend(qkv, [len(qkv)], rule)
    seeing = slice(begin, len(qkv) if rule.window is None else begin + 1 + rule.window)
    assert not spoilt[seeing].isfinite().any()
    sound[seeing] = spoilt[seeing] = 0
    assert torch.equal(spoilt, sound)


def test_scores_that_are_not_finite_are_capped(arithmetic: Arithmetic) -> None:
    qkv = arithmetic.qkv(BLOCK + 40)
    qkv[:, :HEADS, 0] = 1.0
    for value in (-torch.inf, torch.inf):
        qkv[10:BLOCK, HEADS : HEADS + KV_HEADS, 0] = value
        arithmetic.check(qkv, ScoreRule(cap=30.0))


def test_a_capped_score_is_rounded_as_float32() -> None:
    """One of two positions in the window has score 0, so the weight of the other shows its score."""
    products = torch.cat((torch.linspace(-4, 4, 2001), 10 ** torch.linspace(-6, 3, 1000)))
    qkv = torch.zeros((2 * len(products), 6, 16))
    qkv[:, :2, 0], qkv[::2, 2:4, 0], qkv[::2, 4:] = 1.0, products[:, None], 1.0
    rule = ScoreRule(window=2, cap=0.5, scale=0.5)
    weights = attended(compiled(), qkv, 2, [len(qkv)], rule, dtype=torch.float32)[1::2, 1, 0].double()
    expected = torch.tanh(products.double()) * 0.5
    torch.testing.assert_close(torch.logit(weights), expected, rtol=1e-6, atol=3e-7)
