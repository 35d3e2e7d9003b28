"""The terms that are taken around vLLM's sampler: quiet where it is right, loud where it is not. Needs no vLLM."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.sampler_watch import SamplerWatch
from speculative.stats import StepStats

VOCAB, ROUNDS = 24, 500
NUM_DRAFTS = [2, 0, 3, 1]


class Sampler:
    """Rejection sampling as vLLM's function does it, in plain torch; `fault` is what is wrong with it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.random = torch.Generator().manual_seed(5)

    def __call__(  # noqa: PLR0913  # as vLLM has them
        self,
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: object,
        use_fp64_gumbel: bool = False,
    ) -> Tensor:
        p = target_logits.softmax(-1)
        q = draft_probs if draft_probs is not None else torch.eye(VOCAB)[draft_token_ids]
        if self.fault == "another row":
            q = q.roll(1, 0)
        out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
        row = 0
        for index, count in enumerate(num_draft_tokens):
            for offset in range(count):
                x = int(draft_token_ids[row + offset])
                ratio = float(p[row + offset, x] / q[row + offset, x].clamp(min=1e-9))
                coin = float(torch.rand((), generator=self.random))
                if coin < ratio or (self.fault == "too lenient" and coin < 0.5):
                    out[index, offset] = x
                    continue
                left = (p[row + offset] - q[row + offset]).clamp(min=0)
                distribution = p[row + offset] if self.fault == "recovered from p" else left
                out[index, offset] = int(torch.multinomial(distribution, 1, generator=self.random))
                break
            else:
                out[index, count] = bonus_token_ids[index, 0]
            row += count
        target_logits.zero_()  # vLLM may write over it
        return out


def run(sampler: Callable[..., Tensor], *, sampled: bool, rounds: int = ROUNDS, **changes: object) -> SelfCheck:
    """The state of the self-checks after some rounds of drafts near the target."""
    random = torch.Generator().manual_seed(3)
    watch = SamplerWatch(1.0, sampled=sampled, request_ids=lambda: ["a", "b", "c", "d"])
    watched, check, stats = watch.around(sampler), SelfCheck(1.0), StepStats()
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.ones(4), generators={})
    metadata.__dict__.update(changes)
    for _ in range(rounds):
        logits = 1.5 * torch.randn(sum(NUM_DRAFTS), VOCAB, generator=random)
        q = (logits + torch.randn(logits.shape, generator=random)).softmax(-1)
        drafts = torch.multinomial(q, 1, generator=random)[:, 0]
        bonus = torch.randint(VOCAB, (4, 1), generator=random)
        watched(
            drafts.int(),
            NUM_DRAFTS,
            max(NUM_DRAFTS),
            torch.tensor(NUM_DRAFTS).cumsum(0),
            q if sampled else None,
            logits,
            bonus,
            metadata,
            use_fp64_gumbel=False,
        )
        for terms in watch.take():
            check.take(terms, stats)
    return check


def alarms(check: SelfCheck) -> dict[str, int]:
    return {state.check: state.num_alarms for state in check.snapshot() if state.num_alarms}


@pytest.mark.parametrize("sampled", [True, False])
def test_a_sound_sampler_raises_no_alarm(sampled: bool) -> None:
    check = run(Sampler(), sampled=sampled)
    assert not alarms(check)
    states = {state.check: state for state in check.snapshot()}
    for name in ("a", "c", "d", "e", "f", "g", "b") if sampled else ("a", "d", "r", "g"):
        assert states[name].num >= 300
        assert abs(states[name].z) < 4.5
    drafted = ROUNDS * sum(NUM_DRAFTS)
    assert states["a"].num < drafted, "drafts behind a rejected one were never judged"
    assert states["d"].num == states["a"].num, "nothing is known of tokens behind the last draft"


@pytest.mark.parametrize(
    ("fault", "sampled"), [("another row", True), ("recovered from p", True), ("too lenient", False)]
)
def test_a_faulty_sampler_raises_alarms(fault: str, sampled: bool) -> None:
    assert alarms(run(Sampler(fault), sampled=sampled))


def test_what_is_returned_is_what_vllm_drew() -> None:
    plain, watched = Sampler(), SamplerWatch(1.0, sampled=False, request_ids=lambda: ["a"]).around(Sampler())
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.ones(1), generators={})
    given = (torch.tensor([3, 4]), [2], 2, torch.tensor([2]), None)
    rest = (torch.tensor([[7]]), metadata)
    assert torch.equal(watched(*given, logits.clone(), *rest), plain(*given, logits.clone(), *rest))


@pytest.mark.parametrize(("greedy", "steps_without_q"), [(False, 3), (True, 0)])
def test_a_step_whose_drawn_drafts_lost_their_q_is_reported_of_and_never_takes_them_for_chosen(
    greedy: bool, steps_without_q: int
) -> None:
    """Greedy requests draw nothing: for them vLLM makes no q."""
    watch = SamplerWatch(1.0, sampled=True, request_ids=lambda: ["a"])
    metadata = SimpleNamespace(all_greedy=greedy, temperature=None if greedy else torch.ones(1), generators={})
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    given = (torch.tensor([3, 4]), [2], 2, torch.tensor([2]), None)
    for _ in range(3):
        emitted = watch.around(Sampler())(*given, logits.clone(), torch.tensor([[7]]), metadata)
        assert torch.equal(emitted, Sampler()(*given, logits.clone(), torch.tensor([[7]]), metadata))
    assert watch.take() == []
    assert [watch.take_num_without_q() for _ in range(2)] == [steps_without_q, 0]


def test_greedy_requests_and_repeated_seeds_do_not_count() -> None:
    def count(**changes: object) -> int:
        return sum(state.num for state in run(Sampler(), sampled=True, rounds=10, **changes).snapshot())

    assert count(all_greedy=True, temperature=None) == 0
    assert count(temperature=torch.zeros(4)) == 0
    generators = {row: torch.Generator().manual_seed(9) for row in range(4)}
    only_the_first = count(generators=generators)
    assert 0 < only_the_first < count()
    some = count(temperature=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert some == only_the_first
