"""What is checked around vLLM's sampler: quiet where it is right, loud where it is not. Needs no vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.sampler_watch import SamplerWatch
from speculative.state.batch import Terms
from speculative.stats import StepStats

pytestmark = pytest.mark.slow

VOCAB, ROUNDS = 24, 500
NUM_DRAFTS = [2, 0, 3, 1]
NAMES = ["a", "b", "c", "d"]


class Sampler:
    """Samples as vLLM's two functions do, in plain torch; `fault` is what is wrong with it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.random = torch.Generator().manual_seed(5)

    def draw(self, weights: Tensor) -> Tensor:
        return torch.multinomial(weights, 1, generator=self.random)[..., 0]

    def sample(self, logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, None]:
        likeliest = logits.argmax(-1)
        if self.fault == "greedy takes the second":
            likeliest = logits.topk(2).indices[:, 1]
        temperature = sampling_metadata.temperature
        if temperature is None:
            return likeliest, None
        scaled = logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])
        if self.fault == "temperature twice":
            scaled = scaled.div_(temperature[:, None])
        if sampling_metadata.top_k is not None and self.fault != "no top-k":
            scaled = filtered(scaled, sampling_metadata.top_k, None)
        return torch.where(temperature == 0, likeliest, self.draw(scaled.softmax(-1))), None

    def reject(  # noqa: PLR0913  # as vLLM has them
        self,
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        use_fp64_gumbel: bool = False,
    ) -> Tensor:
        p = target_logits.softmax(-1)
        likeliest = target_logits.argmax(-1)
        q = draft_probs if draft_probs is not None else torch.eye(VOCAB)[draft_token_ids.long()]
        if self.fault == "another row":
            q = q.roll(1, 0)
        out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
        temperature, row = sampling_metadata.temperature, 0
        for index, count in enumerate(num_draft_tokens):
            greedy = temperature is None or temperature[index] == 0
            for offset in range(count):
                at, x = row + offset, int(draft_token_ids[row + offset])
                ratio = float(p[at, x] / q[at, x].clamp(min=1e-9))
                coin = float(torch.rand((), generator=self.random))
                if greedy and self.fault != "greedy is lenient":
                    ratio = 2.0 * (x == likeliest[at])
                if coin < ratio or (self.fault == "too lenient" and coin < 0.5):
                    out[index, offset] = x
                    continue
                distribution = p[at] if self.fault == "recovered from p" else (p[at] - q[at]).clamp(min=0)
                out[index, offset] = likeliest[at] if greedy else self.draw(distribution)
                break
            else:
                out[index, count] = bonus_token_ids[index - (self.fault == "another's bonus"), 0]
            row += count
        target_logits.zero_()  # vLLM may write over it
        return out


def filtered(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    assert top_p is None
    if top_k is None:
        return logits
    least = logits.sort(descending=True).values.gather(1, top_k[:, None] - 1)
    return logits.masked_fill_(logits < least, -torch.inf)


def metadata(**changes: object) -> SimpleNamespace:
    asked: dict[str, object] = {"all_greedy": False, "temperature": torch.ones(4), "top_k": None, "top_p": None}
    asked |= {"generators": {}, "logitsprocs": SimpleNamespace(argmax_invariant=[])}
    return SimpleNamespace(**asked | changes)


class Rounds:
    """Rounds of drafts near the target: what was found in them."""

    def __init__(
        self, sampler: Sampler, *, sampled: bool = True, owners: list[str | None] | None = None, **changes: object
    ) -> None:
        self.watch = SamplerWatch(1.0, sampled=sampled, owners=lambda: owners or NAMES)
        self.sample = self.watch.around_sample(sampler.sample, filtered)
        self.reject = self.watch.around_rejection(sampler.reject)
        self.sampled, self.metadata, self.taken = sampled, metadata(**changes), list[Terms]()
        self.random = torch.Generator().manual_seed(3)

    def run(self, rounds: int = ROUNDS, num_drafts: list[int] = NUM_DRAFTS) -> "Rounds":
        for _ in range(rounds):
            bonus = self.sample(1.5 * torch.randn(4, VOCAB, generator=self.random), self.metadata)[0]
            if any(num_drafts):
                self.verify(num_drafts, bonus[:, None].int())
            self.taken += self.watch.take()
        return self

    def verify(self, num_drafts: list[int], bonus: Tensor) -> None:
        logits = 1.5 * torch.randn(sum(num_drafts), VOCAB, generator=self.random)
        q = (logits + torch.randn(logits.shape, generator=self.random)).softmax(-1)
        drafts = torch.multinomial(q, 1, generator=self.random)[:, 0]
        if self.metadata.temperature is None:
            drafts = torch.where(drafts % 2 == 0, logits.argmax(-1), drafts)
        bounds = torch.tensor(num_drafts).cumsum(0)
        given = (drafts.int(), num_drafts, max(num_drafts), bounds, q if self.sampled else None, logits, bonus)
        self.reject(*given, self.metadata, use_fp64_gumbel=False)

    def check(self) -> SelfCheck:
        check, stats = SelfCheck(1.0), StepStats()
        for terms in self.taken:
            check.take(terms, stats)
        return check

    def alarms(self) -> dict[str, int]:
        return {state.check: state.num_alarms for state in self.check().snapshot() if state.num_alarms}

    def num_terms(self) -> int:
        return sum(state.num for state in self.check().snapshot())


@pytest.mark.parametrize("sampled", [True, False])
def test_a_sound_sampler_raises_no_alarm(sampled: bool) -> None:
    found = Rounds(Sampler(), sampled=sampled).run()
    assert not found.alarms() and not found.watch.take_violations()
    states = {state.check: state for state in found.check().snapshot()}
    for name in ("a", "c", "d", "e", "f", "g", "b") if sampled else ("a", "d", "r", "g"):
        assert states[name].num >= 300
        assert abs(states[name].z) < 4.5
    drafted, tokens = ROUNDS * sum(NUM_DRAFTS), ROUNDS * len(NUM_DRAFTS)
    assert states["a"].num < drafted, "drafts behind a rejected one were never judged"
    assert states["a"].num + tokens <= states["d"].num < drafted + tokens, "bonus tokens count, used or not"


@pytest.mark.parametrize(
    ("fault", "sampled"), [("another row", True), ("recovered from p", True), ("too lenient", False)]
)
def test_a_sampler_that_judges_drafts_wrongly_raises_alarms(fault: str, sampled: bool) -> None:
    assert Rounds(Sampler(fault), sampled=sampled).run().alarms()


@pytest.mark.parametrize("num_drafts", [NUM_DRAFTS, [0, 0, 0, 0]])
@pytest.mark.parametrize("fault", ["", "temperature twice", "no top-k"])
def test_tokens_that_are_not_drafted_must_follow_their_requests_parameters(fault: str, num_drafts: list[int]) -> None:
    """Also where nothing is drafted at all."""
    parameters = {"temperature": torch.full((4,), 0.6), "top_k": torch.full((4,), 3)}
    alarms = Rounds(Sampler(fault), **parameters).run(num_drafts=num_drafts).alarms()
    assert bool(alarms) == bool(fault)


def test_what_is_returned_is_what_vllm_drew() -> None:
    plain, watched = Sampler(), Sampler()
    watch = SamplerWatch(1.0, sampled=False, owners=lambda: ["a"])
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    asked = metadata(temperature=torch.ones(1))
    bonus = watch.around_sample(watched.sample, filtered)(logits[2:].clone(), asked)[0][:, None]
    assert torch.equal(bonus, plain.sample(logits[2:].clone(), asked)[0][:, None])
    given = (torch.tensor([3, 4]), [2], 2, torch.tensor([2]), None, logits[:2], bonus, asked)
    own = (*given[:5], logits[:2].clone(), *given[6:])
    assert torch.equal(watch.around_rejection(watched.reject)(*own), plain.reject(*given))


@pytest.mark.parametrize(
    ("temperature", "drafts", "steps_without_q"),
    [([1.0, 1.0], [3, 4], 3), ([0.0, 1.0], [3, 4], 0), (None, [3, 4], 0), ([1.0, 1.0], [0, 0], 0)],
    ids=["sampled", "the other request", "greedy", "placeholders"],
)
def test_a_step_whose_sampled_drafts_lost_their_q_is_reported(
    temperature: list[float] | None, drafts: list[int], steps_without_q: int
) -> None:
    """Greedy requests draw nothing: for them vLLM makes no q. Token 0 stands in where it did not draft at all."""
    watch = SamplerWatch(0.0, sampled=True, owners=lambda: ["a", "b"])
    asked = metadata(
        all_greedy=temperature is None, temperature=None if temperature is None else torch.tensor(temperature)
    )
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    given = (torch.tensor(drafts), [2, 0], 2, torch.tensor([2, 2]), None)
    for _ in range(3):
        emitted = watch.around_rejection(Sampler().reject)(*given, logits.clone(), torch.tensor([[7], [7]]), asked)
        assert torch.equal(emitted, Sampler().reject(*given, logits.clone(), torch.tensor([[7], [7]]), asked))
    assert watch.take() == []
    found = [watch.take_violations() for _ in range(2)]
    assert found == [{"q_missing": steps_without_q} if steps_without_q else {}, {}]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("", None), ("greedy is lenient", "greedy"), ("greedy takes the second", "greedy"), ("another's bonus", "draw")],
)
@pytest.mark.parametrize("temperature", [None, torch.tensor([0.0, 0.0, 1.0, 0.0])], ids=["all", "some"])
def test_greedy_requests_get_the_likeliest_token_and_everybody_the_bonus_that_was_sampled(
    fault: str, kind: str | None, temperature: Tensor | None
) -> None:
    asked = {"all_greedy": temperature is None, "temperature": temperature}
    found = Rounds(Sampler(fault), sampled=temperature is not None, **asked).run(60)
    assert list(found.watch.take_violations()) == ([kind] if kind else [])


def test_of_equal_logits_either_is_the_likeliest() -> None:
    found = Rounds(Sampler("greedy takes the second"), all_greedy=True, temperature=None)
    found.sample(torch.zeros(4, VOCAB), found.metadata)
    assert not found.watch.take_violations()


def test_what_is_expected_is_what_vllm_accepts_where_it_is_sound() -> None:
    greedy = Rounds(Sampler(), sampled=False, all_greedy=True, temperature=None).run(50)
    achievable = sum(terms.achievable for terms in greedy.taken)
    assert 0 < achievable < 50 * sum(NUM_DRAFTS) and greedy.watch.take_excess() == 0.0
    sound, lenient = (Rounds(Sampler(fault), sampled=False).run() for fault in ("", "too lenient"))
    drafted = ROUNDS * sum(NUM_DRAFTS)
    assert abs(sound.watch.take_excess()) < 0.04 * drafted
    assert lenient.watch.take_excess() < -0.2 * drafted


def test_greedy_requests_repeated_seeds_and_tokens_that_are_thrown_away_do_not_count() -> None:
    def count(owners: list[str | None] | None = None, **changes: object) -> int:
        return Rounds(Sampler(), owners=owners, **changes).run(10).num_terms()

    assert count(temperature=torch.zeros(4)) == 0
    generators = {row: torch.Generator().manual_seed(9) for row in range(4)}
    only_the_first = count(generators=generators)
    assert 0 < only_the_first < count()
    assert count(generators={0: generators[0], 1: torch.Generator().manual_seed(8)}) == count()
    assert count([None] * 4) == 0 < count(["a", None, "c", "d"]) < count()


def test_a_seed_belongs_to_who_had_it_first_even_if_that_step_was_not_checked() -> None:
    owners: list[str | None] = ["a"]
    watch = SamplerWatch(0.5, sampled=False, owners=lambda: owners)
    asked = metadata(temperature=torch.ones(1), generators={0: torch.Generator().manual_seed(9)})
    sample = watch.around_sample(Sampler().sample, filtered)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    while not watch.take():
        owners[:] = ["a"]
        sample(logits.clone(), asked)
    owners[:] = ["b"]
    for _ in range(20):
        sample(logits.clone(), asked)
    assert not watch.take()
