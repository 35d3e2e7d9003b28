"""The terms against loops one would write first; what counts, and that it counts once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deploy.audit.toy import table_engine
from speculative.draft_law import Dense, DraftLaw, PointMass, SubVocabulary
from speculative.request import Request, SamplingParams
from speculative.selfcheck.eprocess import STAKES
from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.terms import Scope, take_terms
from speculative.sequence import Sequence
from speculative.stats import CheckSums, StepStats
from speculative.verification.base import VerifyInput
from speculative.verification.token_wise import verify_token_wise

V = 700  # more than a run of the sum over a part of the vocabulary, and not a multiple of it


def one_round(law: DraftLaw, drafts: list[int], seed: int = 0) -> VerifyInput:
    """One entry whose rows judge `drafts`."""
    noise = torch.Generator().manual_seed(seed)
    num_rows = len(drafts) + 1
    offsets = torch.arange(num_rows)
    return VerifyInput(
        probs=(torch.randn(num_rows, V, generator=noise) * 3).softmax(-1),
        law=law,
        drafts=torch.tensor([*drafts, -1]),
        packed=offsets,
        entries=torch.zeros(num_rows, dtype=torch.int64),
        offsets=offsets,
        first_rows=torch.tensor([0]),
        counts=torch.tensor([len(drafts)]),
        coins=torch.rand(num_rows, generator=noise).double(),
        finals=torch.rand(num_rows, generator=noise).double(),
        seeds=offsets,
        positions=offsets,
    )


def laws(drafts: list[int]) -> dict[str, DraftLaw]:
    noise = torch.Generator().manual_seed(9)
    q = (torch.randn(len(drafts), V, generator=noise) * 3).softmax(-1)
    ids = torch.arange(0, V, 2)
    part = q[:, ids] / q[:, ids].sum(-1, keepdim=True)
    return {
        "dense": Dense(q),
        "part": SubVocabulary(part, ids, torch.tensor([draft // 2 for draft in drafts])),
        "chosen": PointMass(),
    }


def naive(step: VerifyInput, accepted: int, final: int) -> dict[str, list[float]]:
    """Token-wise verification's terms, by the definitions."""
    p = step.probs.double().numpy()
    drafts = step.drafts.tolist()[:-1]
    q = step.law.at(step.drafts, step.packed, V).double().numpy()
    emitted = [*drafts[:accepted], final]
    chosen = isinstance(step.law, PointMass)
    terms: dict[str, list[float]] = {name: [] for name in ("a", "a_prime", "b", "c", "d", "e", "f", "g", "r")}
    for row, x in enumerate(drafts):
        alpha, chance = np.minimum(p[row], q[row]).sum(), min(1, p[row, x] / q[row, x])
        if not chosen:
            terms["a_prime"].append(chance - alpha)
            terms["e"].append(q[row, x] - (q[row] ** 2).sum())
        if row <= accepted:
            y = emitted[row]
            terms["a"].append((row < accepted) - alpha)
            if not chosen:
                terms["b"].append((row < accepted) - chance)
                terms["c"].append(min(1, q[row, y] / p[row, y]) - alpha)
    for row, y in enumerate(emitted):
        terms["d"].append(p[row, y] - (p[row] ** 2).sum())
    r = np.maximum(p[accepted] - q[accepted], 0)
    r /= r.sum()
    terms["g"].append(2 * r[:final].sum() + r[final] - 1)
    if accepted < len(drafts):
        name = "r" if chosen else "f"
        other = (
            (r[final] - (r**2).sum())
            if chosen
            else (min(1, q[accepted, final] / r[final]) - np.minimum(r, q[accepted]).sum())
        )
        terms[name].append(other)
    return {name: values for name, values in terms.items() if values}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["dense", "part", "chosen"])
@pytest.mark.parametrize("seed", range(6))
def test_terms_are_what_the_definitions_say(
    kind: str, seed: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(VerifyInput, "native", None)
    drafts = [40, 512, 698]
    step = one_round(laws(drafts)[kind], drafts, seed)
    if seed % 2:  # drafts that are likely, so that some survive
        step = replace(step, probs=step.probs.scatter(1, step.drafts.clamp(min=0)[:, None], 3.0) / 4)
        step = replace(step, probs=step.probs / step.probs.sum(-1, keepdim=True))
    verified = verify_token_wise(step)
    accepted, final = int(verified.num_accepted[0]), int(verified.token_ids[0])
    emitted = torch.tensor([*drafts[:accepted], *[final] * (len(drafts) + 1 - accepted)])
    yes, no = torch.tensor([True]), torch.tensor([False])
    scope = Scope("token_wise", torch.arange(3), counted=yes, coupled=no, any_coupled=False, all_coupled=False)
    found = take_terms(step, verified, emitted, scope)
    expected = naive(step, accepted, final)
    for check, row in zip(found.checks, found.sums.numpy(), strict=True):
        values = np.array(expected.get(check, []))
        num, positive, negative, square = row[len(STAKES) :]
        assert num == len(values), check
        assert positive - negative == pytest.approx(values.sum(), abs=1e-5), check
        assert square == pytest.approx((values**2).sum(), abs=1e-5), check
        assert row[: len(STAKES)] == pytest.approx(np.log1p(np.outer(STAKES, values)).sum(-1), abs=1e-5), check


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("verifier", ["token_wise", "block", "coupled"])
@pytest.mark.parametrize("chosen", [False, True], ids=["drawn", "chosen"])
def test_a_sound_engine_raises_no_alarm_and_its_terms_have_mean_0(
    verifier: str, chosen: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(VerifyInput, "native", None)
    engine = table_engine(64, verifier=verifier, chosen=chosen, self_check_share=1.0)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_k=30)
    for number in range(60):
        engine.add(Request(f"r{number}", (number,), params, seed=number))
    while engine.has_work:
        engine.step()
    stats = engine.take_stats()
    assert stats.num_emitted == 2400
    assert (stats.alarms, stats.violations) == ({}, {})
    assert {name for name in stats.checks if name.endswith("d")}
    assert all(abs(sums.z) < 5 for sums in stats.checks.values())


def test_a_seed_that_comes_again_counts_once() -> None:
    engine = table_engine(64, self_check_share=1.0)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("first", "again"):
        engine.add(Request(name, (3,), params, seed=7))
        while engine.has_work:
            engine.step()
    stats = engine.take_stats()
    assert stats.num_repeated_seeds == 1
    assert stats.num_emitted == 40
    assert stats.checks["d"].num == 20


def test_the_share_is_of_the_steps() -> None:
    engine = table_engine(64, self_check_share=0.25)
    engine.add(Request("r", (3,), SamplingParams(max_tokens=200, ignore_eos=True), seed=7))
    while engine.has_work:
        engine.step()
    stats = engine.take_stats()
    assert 0.15 * 200 < stats.checks["d"].num < 0.35 * 200


def test_greedy_requests_do_not_count() -> None:
    check = SelfCheck()
    sequences = [Sequence(Request("r", (1,), SamplingParams(temperature=t), seed=t)) for t in (0, 1)]
    assert check.counted(sequences).tolist() == [False, True]


def test_check_sums_add_up() -> None:
    one, two = (
        StepStats(checks={"a": CheckSums(2, 1.0, 0.5, 0.6)}),
        StepStats(checks={"a": CheckSums(2, 0.0, 0.5, 0.25)}),
    )
    one.merge(two)
    assert one.checks["a"] == CheckSums(4, 1.0, 1.0, 0.85)
    assert one.checks["a"].mean == 0
