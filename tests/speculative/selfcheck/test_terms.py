"""The terms against loops one would write first; what counts, and that it counts once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.request import Request, SamplingParams
from speculative.sampling.draft_probs import DraftProbs, Drawn, PointMass
from speculative.sampling.verification import VerifyInput, residual
from speculative.selfcheck.eprocess import ROUNDING, STAKES
from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.terms import TermScope
from speculative.state.batch import Entry
from speculative.state.sequence import Sequence
from speculative.stats import CheckSums, StepStats
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.engines import answer_all
from tests.support.verify_inputs import rounds_of_one_draft, verify_input
from tests.support.vocabulary import with_both_ops
from tools.faults.toy import table_engine

V = 700  # more than a run of the sum over a part of the vocabulary, and not a multiple of it


def distributions(drafts: list[int]) -> dict[str, DraftProbs]:
    noise = torch.Generator().manual_seed(9)
    q = (torch.randn(len(drafts), V, generator=noise) * 3).softmax(-1)
    ids = torch.arange(0, V, 2)
    part = q[:, ids] / q[:, ids].sum(-1, keepdim=True)
    return {
        "dense": Drawn(q),
        "part": Drawn(part, ids, torch.tensor([draft // 2 for draft in drafts])),
        "deterministic": PointMass(),
    }


def naive(step: VerifyInput, accepted: int, final: int) -> dict[str, list[float]]:
    """Token-wise verification's terms, by the definitions."""
    p = step.probs.double().numpy()
    drafts = step.drafts.tolist()[:-1]
    q = step.draft_probs.at(step.drafts, step.packed, V).double().numpy()
    emitted = [*drafts[:accepted], final]
    deterministic = isinstance(step.draft_probs, PointMass)
    terms: dict[str, list[float]] = {name: [] for name in ("a", "a_prime", "b", "c", "d", "e", "f", "g", "r")}

    def add(name: str, value: float, mean: float, certain: float) -> None:
        if certain < 0.99:
            terms[name].append(value - mean)

    def undecided(chance: float) -> float:
        return max(chance, 1 - chance)

    for row, x in enumerate(drafts):
        alpha, chance = np.minimum(p[row], q[row]).sum(), min(1, p[row, x] / q[row, x])
        if not deterministic:
            add("a_prime", chance, alpha, undecided(alpha))
            add("e", q[row, x], (q[row] ** 2).sum(), (q[row] ** 2).sum())
        if row <= accepted:
            y = emitted[row]
            add("a", row < accepted, alpha, undecided(alpha))
            if not deterministic:
                add("b", row < accepted, chance, undecided(chance))
                add("c", min(1, q[row, y] / p[row, y]), alpha, undecided(alpha))
    for row, y in enumerate(emitted):
        add("d", p[row, y], (p[row] ** 2).sum(), (p[row] ** 2).sum())
    r = np.maximum(p[accepted] - q[accepted], 0)
    if r.sum() > 0.1:
        r /= r.sum()
        square = (r**2).sum()
        add("g", 2 * r[:final].sum() + r[final], 1, square)
        if accepted < len(drafts) and deterministic:
            add("r", r[final], square, square)
        elif accepted < len(drafts):
            add("f", min(1, q[accepted, final] / r[final]), np.minimum(r, q[accepted]).sum(), square)
    return {name: values for name, values in terms.items() if values}


@with_both_ops
@pytest.mark.parametrize("kind", ["dense", "part", "deterministic"])
@pytest.mark.parametrize("seed", range(6))
def test_terms_are_what_the_definitions_say(ops: VocabularyOps, kind: str, seed: int) -> None:
    drafts = [40, 512, 698]
    noise, num_rows = torch.Generator().manual_seed(seed), len(drafts) + 1
    probs = (torch.randn(num_rows, V, generator=noise) * 3).softmax(-1)
    uniforms = torch.rand((2, num_rows), generator=noise).double()
    step = verify_input(probs, torch.tensor([*drafts, -1]), distributions(drafts)[kind], *uniforms)
    if seed % 2:  # drafts that are likely, so that some survive
        step = replace(step, probs=step.probs.scatter(1, step.drafts.clamp(min=0)[:, None], 3.0) / 4)
        step = replace(step, probs=step.probs / step.probs.sum(-1, keepdim=True))
    verified = ops.verify_token_wise(step)
    accepted, final = int(verified.num_accepted[0]), int(verified.token_ids[0])
    emitted = torch.tensor([*drafts[:accepted], *[final] * (len(drafts) + 1 - accepted)])
    scope = TermScope(counted=torch.tensor([True]))
    found = ops.take_terms(step, verified, emitted, scope)
    expected = naive(step, accepted, final)
    for check, row in zip(found.checks, found.sums.numpy(), strict=True):
        values = np.array(expected.get(check, []))
        num, positive, negative, square = row[len(STAKES) :]
        assert num == len(values), check
        assert positive - negative == pytest.approx(values.sum(), abs=1e-5), check
        assert square == pytest.approx((values**2).sum(), abs=1e-5), check
        bets = np.log1p(np.outer(STAKES, values) - np.abs(STAKES)[:, None] * ROUNDING).sum(-1)
        assert row[: len(STAKES)] == pytest.approx(bets, abs=1e-5), check
    p, q = step.p_of_drafts().numpy()[:-1], step.q_of_drafts().numpy()[:-1]
    chance, below, own = found.rows.numpy()
    chances = np.minimum(1, p / q)[: accepted + 1]
    assert chance[: len(chances)] == pytest.approx(chances, rel=1e-6) and np.isnan(chance[len(chances) :]).all()
    assert [2 * below[accepted] + own[accepted] - 1] == pytest.approx(expected["g"], abs=1e-5)
    assert np.isnan(np.delete([below, own], accepted, axis=1)).all()


@with_both_ops
@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
def test_a_sound_engine_raises_no_alarm_and_its_terms_have_mean_0(
    ops: VocabularyOps, verifier: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.assembly.choose_ops", lambda device: ops)
    engine = table_engine(64, verifier=verifier, deterministic=deterministic, self_check_sample_rate=1.0)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_k=30)
    answer_all(engine, [Request(f"r{number}", (number,), params, seed=number) for number in range(60)])
    stats = engine.take_stats()
    assert stats.num_emitted == 2400
    assert (stats.alarms, stats.violations) == ({}, {})
    assert {name for name in stats.checks if name.endswith("d")}
    assert all(abs(sums.z) < 5 for sums in stats.checks.values())


ROUNDS = 4096
CANDIDATES = {  # how likely each is, up to a factor: the least and the most
    "two": ((0.05, 0.05), (1.0, 1.0)),
    "two and a trace": ((0.05, 0.05, 1e-5), (1.0, 1.0, 1e-5)),
    "three, of which two are alike": ((0.4, 0.3, 0.3), (2.0, 0.3, 0.3)),
    "three": ((0.1, 0.1, 0.1), (1.0, 1.0, 1.0)),
}


def rounds_of(candidates: str, *, deterministic: bool) -> VerifyInput:
    """Rounds of one draft each: of the likeliest candidate, or drawn from a q that is more peaked than p."""
    noise = torch.Generator().manual_seed(3)
    least, most = torch.tensor(CANDIDATES[candidates])
    probs = torch.zeros(ROUNDS, 40)
    probs[:, 7 : 7 + len(least)] = least + (most - least) * torch.rand(ROUNDS, len(least), generator=noise)
    probs, q = probs / probs.sum(-1, keepdim=True), probs**3
    q = q / q.sum(-1, keepdim=True)
    return rounds_of_one_draft(probs, q, noise, deterministic=deterministic)


def take(
    ops: VocabularyOps, step: VerifyInput, token_ids: Tensor | None = None
) -> tuple[dict[str, CheckSums], dict[str, int]]:
    """The sums of the self-checks over the rounds, and the alarms they raise.

    token_ids: what a broken verifier draws last; None = what ours draws.
    """
    verified = ops.verify_token_wise(step)
    verified = verified if token_ids is None else replace(verified, token_ids=token_ids)
    scope = TermScope(counted=torch.ones(ROUNDS, dtype=torch.bool))
    found = ops.take_terms(step, verified, ops.emitted_at_rows(verified, step), scope).to_host()
    stats = StepStats()
    SelfCheck().take(found, stats)
    return stats.checks, stats.alarms


@with_both_ops
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("candidates", CANDIDATES)
def test_a_residual_that_leaves_no_choice_is_no_evidence(
    ops: VocabularyOps, candidates: str, deterministic: bool
) -> None:
    """Its terms are rounding, and so is their spread: whatever they are divided by makes a fault of it."""
    sums, alarms = take(ops, rounds_of(candidates, deterministic=deterministic))
    assert not alarms
    assert {name: round(one.z, 1) for name, one in sums.items() if abs(one.z) > 5} == {}
    assert sums["g"].num > ROUNDS / 10, "the bonus tokens are drawn in any case"
    if candidates == "three":
        assert sums["r" if deterministic else "f"].num > ROUNDS / 10
    elif deterministic:
        assert sums["r"].square == 0 if candidates == "three, of which two are alike" else "r" not in sums


@with_both_ops
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
def test_a_broken_residual_is_found_where_it_has_a_choice(ops: VocabularyOps, deterministic: bool) -> None:
    step = rounds_of("three", deterministic=deterministic)
    sound = ops.verify_token_wise(step)
    left = residual(step.probs[step.first_rows], step.q_at(step.first_rows))
    first, likeliest = (left > 0).float().argmax(-1), left.argmax(-1)
    for always, check in ((first, "g"), (likeliest, "r" if deterministic else "f")):
        assert check in take(ops, step, torch.where(sound.num_accepted == 0, always, sound.token_ids))[1]


def test_a_seed_that_comes_again_counts_once_and_one_that_its_client_chose_never() -> None:
    engine = table_engine(64, self_check_sample_rate=1.0)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("first", "again"):
        answer_all(engine, [Request(name, (3,), params, seed=7)])
    answer_all(engine, [Request("chosen", (3,), params, seed=8, chosen_seed=True)])
    stats = engine.take_stats()
    assert stats.num_repeated_seeds == 1
    assert stats.num_emitted == 60
    assert stats.checks["d"].num == 20


@pytest.mark.parametrize("period", [2, 3, 4, 100])
def test_no_rhythm_of_the_traffic_escapes_the_checks(period: int) -> None:
    """An adaptive draft length probes every so many steps; with every other step checked, none of its drafts was."""
    check = SelfCheck(0.5)
    due = [check.due() for _ in range(200 * period)]
    for phase in range(period):
        assert 60 < sum(due[phase::period]) < 140


def test_greedy_requests_do_not_count() -> None:
    check = SelfCheck()
    sequences = [Sequence(Request(f"r{t}", (1,), SamplingParams(temperature=t), seed=t)) for t in (0, 1)]
    for sequence in sequences:
        check.admit(sequence, StepStats())
    assert check.counted([Entry(sequence, 1, 0, samples=True) for sequence in sequences]).tolist() == [False, True]
