"""Passages that are repeated: when they are drafted in a model's place, and that nothing else changes by it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.request import Request, SamplingParams, Structure
from speculative.scheduling.draft_length import DynamicLength
from speculative.scheduling.passages import Passages, _Record
from speculative.scheduling.step_cost import StepCost, Work
from speculative.state.batch import Entry, SequenceResult
from speculative.state.sequence import Sequence
from speculative.warm_up import warm_up
from tests.support.engines import NO_DRAFTS, Answer, assert_idle, load_engine, run, settings
from tools.faults.toy import EvenAndOdd

MOST, LONGEST = 3, 8
PASSAGE = tuple(range(20, 50))
PARAMS = SamplingParams(max_tokens=10**6)


def repeating(name: str = "a", matched: int = 12) -> Sequence:
    """A sequence that has come so far into a passage again."""
    sequence = Sequence(Request(name, PASSAGE, PARAMS), tokens=(*PASSAGE, 5, *PASSAGE[:matched]))
    sequence.num_computed = len(sequence.tokens) - 1
    return sequence


def policy_that_knows(rate: float, seconds: Any) -> DynamicLength:
    """With costs of all lengths known, and a model whose drafts are accepted at this rate."""
    policy = DynamicLength(MOST, LONGEST)
    sequence = Sequence(Request("x", (1, 2, 3), PARAMS), tokens=(1, 2, 3))
    sequence.num_computed = 2
    for step in range(300):
        plan = policy.choose([sequence])
        count = plan.most("x", LONGEST)
        accepted = count if step % 10 < 10 * rate else 0
        result = SequenceResult((100 + step,) * (accepted + 1), count, accepted)
        repeated = plan.repeated.get("x", [])
        policy.observe([Entry(sequence, 1, MOST, True, repeated)], [result], seconds(count, 0 if repeated else count))
        sequence.advance(sequence.num_computed + accepted + 1, result.token_ids)
    policy.forget("x")
    return policy


def small_steps(num_drafts: int, longest: int) -> float:
    return 0.02 + 0.0005 * num_drafts + 0.004 * longest


# -- what is chosen ------------------------------------------------------------------------------------------------


def test_a_passage_that_is_repeated_is_drafted_in_the_models_place() -> None:
    policy, sequence = policy_that_knows(0.5, small_steps), repeating()
    plan = policy.choose([sequence])
    assert plan.repeated == {"a": list(PASSAGE[12:20])}
    assert plan.most("a", LONGEST) == LONGEST
    assert plan.most("a", 2) == 2, "what fits"


def test_a_text_that_repeats_nothing_is_left_to_the_model() -> None:
    policy = policy_that_knows(0.5, small_steps)
    sequence = Sequence(Request("a", PASSAGE, PARAMS), tokens=(*PASSAGE, 1001, 1002, 1003))
    plan = policy.choose([sequence])
    assert not plan.repeated
    assert 0 < plan.most("a", LONGEST) <= MOST


def test_where_rows_are_dear_hardly_anything_is_repeated() -> None:
    policy = policy_that_knows(0.5, lambda num_drafts, longest: 0.01 + 0.01 * num_drafts + 0.0001 * longest)
    assert len(policy.choose([repeating(matched=4)]).repeated.get("a", [])) <= 1


def test_each_sequence_of_a_batch_has_its_own() -> None:
    policy = policy_that_knows(0.5, small_steps)
    plain = Sequence(Request("b", (9, 8, 7), PARAMS), tokens=(9, 8, 7))
    sequences = [repeating("a"), plain, repeating("c", matched=20)]
    plans = [policy.choose(sequences) for _ in range(9)]  # one may probe, or try a length, since the load is new
    assert {"a": [32, 33, 34], "c": [40, 41, 42]} in [
        {name: tokens[:3] for name, tokens in plan.repeated.items()} for plan in plans
    ]


def count_rounds(passages: Passages, sequences: list[Sequence], accepted: int) -> int:
    """How many of them get a passage, of which so many tokens are accepted."""
    num_rounds = 0
    for sequence in sequences:
        if passages.find(sequence):
            num_rounds += 1
            passages.observe(sequence, SequenceResult((1,), LONGEST, accepted))
    return num_rounds


def test_passages_that_do_not_go_on_as_before_are_given_up_for_a_while() -> None:
    passages = Passages(LONGEST)
    assert 3 < count_rounds(passages, [repeating(str(number), matched=5) for number in range(100)], 0) < 30
    assert passages._rates[0].blended()[0] < 0.5, "of matches of 4 to 7 tokens"
    assert passages._rates[2].blended()[0] > 0.8, "of longer ones"
    assert not passages.find(repeating("new", matched=20)), "other requests are not believed, either"
    assert count_rounds(passages, [repeating(f"later {number}", matched=20) for number in range(1000)], LONGEST) > 100


def test_a_request_that_only_resembles_what_it_repeats_is_found_out_by_itself() -> None:
    passages = Passages(LONGEST)
    copying, resembling = repeating("copies", matched=20), repeating("resembles", matched=20)
    assert count_rounds(passages, [copying] * 10, LONGEST) == 10
    assert count_rounds(passages, [resembling] * 20, 0) < 10
    found = passages.find(copying)
    assert found is not None and found.chances[0] > 0.6
    assert count_rounds(passages, [resembling] * 200, LONGEST) > 100, "after a while it is tried again"


def test_a_passage_that_is_cut_short_is_not_expected_to_go_on() -> None:
    passages, sequence = Passages(LONGEST), repeating(matched=20)
    for _ in range(50):  # room for one token of eight, which is accepted
        passages.find(sequence)
        passages.observe(sequence, SequenceResult((1, 2), 1, 1))
    assert passages._records["a"].trust() > 0.95


def test_made_up_passages_show_nothing() -> None:
    passages, sequence = Passages(LONGEST), repeating()
    for accepted in (0, LONGEST):
        assert len(passages.make_up([sequence], 0)["a"]) == LONGEST
        passages.observe(sequence, SequenceResult((1,) * (1 + accepted), LONGEST, accepted))
    assert passages._all == _Record() and not passages._records


def test_what_a_model_came_to_is_not_counted_with_what_is_repeated() -> None:
    policy, sequence = policy_that_knows(0.0, small_steps), repeating()
    before = policy._rates[False].blended()
    for _ in range(5):
        repeated = policy.choose([sequence]).repeated["a"]
        count = len(repeated)
        result = SequenceResult(tuple(PASSAGE[: count + 1]), count, count)
        policy.observe([Entry(sequence, 1, LONGEST, True, repeated)], [result], small_steps(count, 0))
    assert policy._rates[False].blended() == before


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"kind": "ngram"}, {"kind": "eagle3", "model": "m"}, {"kind": "none", "length": "dynamic"}]
)
def test_it_belongs_to_models_of_dynamic_length(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"drafter.suffix_first belongs to .* dynamic length; set it to 0"):
        DrafterConfig.of(**changes, suffix_first=4)


def test_the_longest_draft_is_the_longer_of_both() -> None:
    config = DrafterConfig.of(kind="eagle3", model="m", num_draft_tokens=3, length="dynamic", suffix_first=10)
    assert (config.max_drafts, dataclasses.replace(config, suffix_first=2).max_drafts) == (10, 3)


# -- in the engine -------------------------------------------------------------------------------------------------


def answers(target: Path, drafter: DrafterConfig, **changes: Any) -> tuple[dict[str, Answer], EngineCore]:
    engine = load_engine(
        target, settings(drafter=drafter, max_batched_tokens=128, **changes), make_constraint=lambda _: EvenAndOdd(64)
    )
    warm_up(engine)
    prompt = tuple(range(3, 23))
    for index in range(6):
        params = SamplingParams(
            max_tokens=60,
            ignore_eos=index != 2,
            temperature=0,
            logit_bias=((7, 1.0),) if index == 1 else (),
            structure=Structure("choice", "[]") if index == 2 else None,
            logprobs=0 if index % 2 else None,
            reproducible=index == 3,
        )
        engine.add(Request(f"r{index}", (*prompt, *prompt[: 3 * index]), params, seed=index))
    found = run(engine)
    assert_idle(engine)
    return found, engine


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_greedy_text_is_that_of_plain_decoding(
    target: Path, head: Path, kind: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny models fall into loops: what they repeat is drafted, beside what the model drafts."""

    def seconds(cost: StepCost, work: Work) -> float:
        return 0.02 + 0.0005 * work.num_drafts + 0.02 * work.longest

    monkeypatch.setattr(StepCost, "seconds", seconds)
    model = str(head if kind == "eagle3" else target)
    drafter = DrafterConfig.of(kind=kind, model=model, num_draft_tokens=3, length="dynamic", suffix_first=8)
    plain, _ = answers(target, NO_DRAFTS)
    found, engine = answers(target, drafter, cuda_graphs=graphs, self_check_sample_rate=1.0)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in plain.items()}
    assert {key: one.values for key, one in found.items()} == {
        key: pytest.approx(one.values, abs=1e-4) for key, one in plain.items()
    }
    if engine.parts.graphs is not None and engine.parts.graphs.loop is not None:
        assert engine.parts.graphs.loop._buckets.largest.num_queries == 3, "passages are none of the model's drafts"
    stats = engine.take_stats()
    assert len(stats.accepted_per_position) > 3, "more than the model drafts"
    assert not any(stats.violations.values())
    policy = engine.scheduler.draft_length
    assert isinstance(policy, DynamicLength)
    assert not policy._own and not policy._passages._found and not policy._passages._lookup._texts
