"""Constant seeds, coins that the drafter saw, numbers of too few bits, and what rounding leaves of certain terms; the
audit (`tests/tools/test_faults.py`) finds draws against their random numbers, and numbers that come again."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from speculative.engine import EngineCore
from speculative.kernels.bindings import Kernels
from speculative.request import Request, SamplingParams
from speculative.sampling import verify_rows as rows
from speculative.sampling.rng import Purpose, uniforms
from speculative.sampling.token_wise import verify_token_wise
from speculative.sampling.verification import VerifyInput
from speculative.selfcheck.eprocess import STAKES
from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.terms import TermScope
from speculative.state.batch import Batch, Entry
from speculative.state.sequence import Sequence
from speculative.stats import CheckSums, StepStats
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.engines import answer_all
from tests.support.verify_inputs import rounds_of_one_draft
from tests.support.vocabulary import with_both_ops
from tools.faults.toy import table_engine
from tools.faults.traffic import PLAIN, sampling


def serve(engine: EngineCore, num_positions: int, seed: int | None, params: SamplingParams = PLAIN) -> StepStats:
    """One kind of traffic, 32 requests at once, all with `seed`; None = each with its own."""
    total, waiting = StepStats(), 0
    requests = sampling(64, params, 3)
    while total.num_emitted < num_positions and not (total.violations or total.alarms):
        while waiting < 32:
            request = next(requests)
            engine.add(request if seed is None else replace(request, seed=seed))
            waiting += 1
        waiting -= sum(delta.finished for delta in engine.step())
        total.merge(engine.take_stats())
    return total


@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_seed_for_everybody_is_no_fault_and_little_evidence(verifier: str, deterministic: bool) -> None:
    engine = table_engine(64, self_check_sample_rate=1.0, verifier=verifier, deterministic=deterministic)
    stats = serve(engine, 4000, seed=42)
    assert (stats.alarms, stats.violations) == ({}, {})
    assert 0 < stats.num_checked_rounds - stats.num_untested_rounds <= PLAIN.max_tokens, "each position is fresh once"


# -- what is drafted, and the coins -----------------------------------------------------------------------------------


def test_whether_to_draft_at_all_by_the_coin_alarms() -> None:
    engine = table_engine(64, self_check_sample_rate=1.0)
    counts = engine.parts.eager.drafter.counts

    def all_or_none(batch: Batch) -> np.ndarray:
        sequences = [entry.sequence for entry in batch.entries]
        seeds = np.array([sequence.request.seed for sequence in sequences], np.uint64)
        lengths = np.array([len(sequence.tokens) for sequence in sequences], np.uint64)
        zeros = np.zeros_like(seeds)
        return np.where(uniforms(seeds, lengths, zeros, zeros + np.uint64(Purpose.COIN)) < 0.7, counts(batch), 0)

    engine.parts.eager.drafter.counts = all_or_none
    assert "coin" in serve(engine, 4000, seed=None).alarms


@pytest.mark.parametrize(
    ("verifier", "reproducible", "counts"),
    [("token_wise", False, True), ("token_wise", True, False), ("coupled", False, False)],
)
def test_a_coin_is_evidence_where_nothing_depends_on_it(verifier: str, reproducible: bool, counts: bool) -> None:
    engine = table_engine(64, self_check_sample_rate=1.0, verifier=verifier)
    stats = serve(engine, 2000, None, replace(PLAIN, reproducible=reproducible))
    num_fresh = stats.num_checked_rounds - stats.num_untested_rounds
    assert stats.checks.get("coin", CheckSums()).num == (num_fresh if counts else 0)
    assert stats.alarms == {} and num_fresh > 500


# -- numbers of too few bits ------------------------------------------------------------------------------------------


CUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "4 bits": lambda drawn: (np.floor(drawn * 2**4) + 0.5) / 2**4,
    "16 bits": lambda drawn: (np.floor(drawn * 2**16) + 0.5) / 2**16,
    "23 bits": lambda drawn: np.ceil(drawn * 2**23) / 2**23,
    "float32": lambda drawn: drawn.astype(np.float32).astype(np.float64),
    "32 bits": lambda drawn: (np.floor(drawn * 2**32) + 0.1) / 2**32,
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("verifier", "which"),
    [("token_wise", "all"), ("coupled", "all"), ("token_wise", "coins"), ("token_wise", "all but coins")],
)
def test_random_numbers_that_were_cut_short_fail_their_requests(
    verifier: str, which: str, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawing(*name: np.ndarray, kernels: Kernels | None = None) -> np.ndarray:
        drawn, is_coin = uniforms(*name, kernels=kernels), name[3] == Purpose.COIN
        return np.where({"all": True, "coins": is_coin, "all but coins": ~is_coin}[which], CUTS[cut](drawn), drawn)

    monkeypatch.setattr(rows, "uniforms", drawing)
    stats = serve(table_engine(64, self_check_sample_rate=1.0, verifier=verifier), 500, seed=None)
    assert set(stats.violations) == {"resolution"}


def test_requests_with_one_seed_share_their_random_numbers_and_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers in four rows may end alike by chance, which is no evidence."""

    def alike(*name: np.ndarray, kernels: Kernels | None = None) -> np.ndarray:
        drawn = uniforms(*name, kernels=kernels)
        return np.where(name[3] == Purpose.COIN, np.floor(drawn * 2**32) / 2**32 + 2.0**-53, drawn)

    monkeypatch.setattr(rows, "uniforms", alike)
    engine = table_engine(64, self_check_sample_rate=1.0)
    engine.parts.eager.drafter.most = 1  # type: ignore[attr-defined]
    params = replace(PLAIN, max_tokens=2)
    answer_all(engine, [Request(f"r{number}", (1, 2, 3), params, seed=7) for number in range(4)])
    assert "resolution" not in engine.take_stats().violations


# -- which rounds are fresh --------------------------------------------------------------------------------------------


def entry_of(check: SelfCheck, name: str, length: int, seed: int = 42, max_drafts: int = 2) -> Entry:
    sequence = Sequence(Request(name, tuple(range(length)), PLAIN, seed=seed))
    check.admit(sequence, StepStats())
    return Entry(sequence, 1, max_drafts, samples=True)


def test_a_round_is_fresh_where_no_other_request_of_its_seed_was() -> None:
    check = SelfCheck()
    first = entry_of(check, "first", 10)
    assert check.counted([first]).tolist() == [True]
    first.sequence.tokens += [0] * 10
    behind, ahead, other = (entry_of(check, name, length) for name, length in (("b", 7), ("a", 30), ("o", 12)))
    assert check.counted([first, behind, ahead, other]).tolist() == [True, True, True, False]
    assert check.counted([entry_of(check, "touches", 8)]).tolist() == [False]
    assert check.counted([entry_of(check, "own seed", 12, seed=43)]).tolist() == [True]
    check.forget("first")
    check.forget("first")
    assert check.counted([entry_of(check, "later", 12)]).tolist() == [False], (
        "who is gone used its positions all the same"
    )
    assert check.counted([entry_of(check, "beyond", 40)]).tolist() == [True]


def test_two_in_one_step_at_one_position_count_once() -> None:
    check = SelfCheck()
    pair = [entry_of(check, name, 10) for name in "ab"]
    assert sorted(check.counted(pair).tolist()) == [False, True]


def test_spans_of_a_seed_stay_few() -> None:
    check = SelfCheck()
    for index in range(100):
        entry = entry_of(check, f"r{index}", 1 + 1000 * index, max_drafts=0)
        assert check.counted([entry]).tolist() == [True]
        check.forget(f"r{index}")
    assert len(check._seeds[42].spans) <= 32
    assert check.counted([entry_of(check, "again", 1)]).tolist() == [False]


# -- rounding ----------------------------------------------------------------------------------------------------------

ROUNDS = 20_000


def certain(vocab_size: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q [V] where one term or another is certain, but for rounding."""
    noise = torch.Generator().manual_seed(vocab_size)
    p = torch.zeros(vocab_size)
    if kind == "one token":
        p[1] = 1.0
    elif kind == "nearly one token":
        p[:2] = torch.tensor([1e-7, 1 - 1e-7])
    elif kind == "equal tokens":
        p[: min(3, vocab_size)] = 1 / min(3, vocab_size)
    elif kind == "cold":
        p = (torch.randn(vocab_size, generator=noise) / 0.01).softmax(-1)
    elif kind == "a share":
        q = torch.zeros(vocab_size)
        q[: vocab_size // 2] = torch.rand(vocab_size // 2, generator=noise) + 0.1
        q /= q.sum()
        p[: vocab_size // 2], p[vocab_size // 2 :] = 0.37 * q[: vocab_size // 2], 0.63 / (vocab_size - vocab_size // 2)
        return p, q
    return p / p.sum(), p / p.sum()


def many_rounds(p: torch.Tensor, q: torch.Tensor, num_rounds: int, seed: int, *, deterministic: bool) -> VerifyInput:
    noise = torch.Generator().manual_seed(seed)
    return rounds_of_one_draft(p.expand(num_rounds, -1), q.expand(num_rounds, -1), noise, deterministic=deterministic)


def sums_of(ops: VocabularyOps, p: torch.Tensor, q: torch.Tensor, num_rounds: int, *, deterministic: bool) -> StepStats:
    check, stats = SelfCheck(), StepStats()
    at_once = max(1, min(num_rounds, 4_000_000 // len(p)))
    for seed in range(num_rounds // at_once):
        step = many_rounds(p, q, at_once, seed, deterministic=deterministic)
        verified = verify_token_wise(step)
        scope = TermScope(torch.ones(at_once, dtype=torch.bool))
        check.take(ops.take_terms(step, verified, ops.emitted_at_rows(verified, step), scope).to_host(), stats)
    return stats


@with_both_ops
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("vocab_size", [2, 3, 1000, 150_000])
@pytest.mark.parametrize("kind", ["one token", "nearly one token", "equal tokens", "cold", "a share"])
def test_rounding_is_no_evidence(ops: VocabularyOps, kind: str, vocab_size: int, deterministic: bool) -> None:
    num_rounds = ROUNDS if vocab_size <= 1000 else 52
    stats = sums_of(ops, *certain(vocab_size, kind), num_rounds, deterministic=deterministic)
    assert stats.alarms == {}
    assert {name: sums.z for name, sums in stats.checks.items() if abs(sums.z) > 4} == {}
    tiny = {name: sums for name, sums in stats.checks.items() if sums.num and 0 < sums.square / sums.num < 1e-9}
    assert tiny == {} or vocab_size == 150_000, "a term is 0, or it varies"


@with_both_ops
def test_a_bet_on_rounding_loses(ops: VocabularyOps) -> None:
    """Whatever is certain wins less than nothing in each round, so no number of rounds alarms."""
    p, q = certain(3, "equal tokens")
    step = many_rounds(p, q, 1000, 0, deterministic=False)
    verified = verify_token_wise(step)
    scope = TermScope(torch.ones(1000, dtype=torch.bool))
    found = ops.take_terms(step, verified, ops.emitted_at_rows(verified, step), scope).to_host()
    own = found.sums[found.checks.index("d")]
    assert own[len(STAKES)] == 2000 and (own[: len(STAKES)] < 0).all()
