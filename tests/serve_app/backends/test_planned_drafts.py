"""How many tokens vLLM is to draft and to verify, on a made-up vLLM whose steps cost what they are told to."""

import random
from collections.abc import Mapping

import pytest

from serve_app.backends.vllm_parts.planned_drafts import Computed, PlannedDrafts
from speculative.request import Request, SamplingParams
from speculative.scheduling.draft_length import DynamicLength

MOST = 4


def run(
    acceptance: Mapping[str, float], *, draft_s: float, verify_s: float, steps: int = 400, stranger: bool = False
) -> tuple[list[int], dict[str, list[int]]]:
    """Drafts made in each step, and verified of each request's, with these rates of acceptance."""
    planned, random_ = PlannedDrafts(DynamicLength(MOST), MOST, by_model=True), random.Random(4)
    params = SamplingParams(max_tokens=10_000, temperature=0)
    for name in acceptance:
        planned.add(Request(name, (1, 2, 3), params))
    made, num_made, verified = [], 0, {name: [] for name in acceptance}
    for number in range(steps):
        step = {}
        for name, rate in acceptance.items():
            num_drafts = planned.num_verified(name, num_made)
            accepted = 0
            while accepted < num_drafts and random_.random() < rate:
                accepted += 1
            verified[name].append(num_drafts)
            step[name] = Computed(1, num_drafts, [7] * (accepted + 1))
        num_made = planned.plan(list(acceptance), list(acceptance))
        made.append(num_made)
        rows = sum(1 + one.num_drafted for one in step.values())
        seconds = 0.01 + verify_s * rows + draft_s * num_made
        if stranger and number % 2:
            step["a text to score"] = Computed(500, 0, [])
            seconds += 10
        planned.observe(step, seconds, num_made)
    return made[-100:], {name: counts[-100:] for name, counts in verified.items()}


def mean(counts: list[int]) -> float:
    return sum(counts) / len(counts)


@pytest.mark.parametrize(("draft_s", "verify_s"), [(0.02, 1e-5), (1e-5, 0.02)])
def test_nothing_is_drafted_where_drafting_or_verifying_costs_more_than_it_gains(
    draft_s: float, verify_s: float
) -> None:
    made, _ = run({"a": 0.5, "b": 0.5}, draft_s=draft_s, verify_s=verify_s)
    assert mean(made) < 0.1


def test_all_is_drafted_where_it_costs_little() -> None:
    made, verified = run({"a": 0.9, "b": 0.9}, draft_s=1e-5, verify_s=1e-5)
    assert mean(made) > MOST - 0.2 and mean(verified["a"]) > MOST - 0.2


def test_drafts_are_made_for_the_request_that_gains_and_cut_for_the_others() -> None:
    made, verified = run({"sure": 0.95, "lost": 0.05}, draft_s=1e-5, verify_s=0.004)
    assert mean(made) > MOST - 0.5
    assert mean(verified["sure"]) > MOST - 0.5 and mean(verified["lost"]) < 0.5


def test_steps_with_texts_to_score_show_nothing() -> None:
    made, _ = run({"a": 0.9}, draft_s=1e-5, verify_s=1e-5, stranger=True, steps=800)
    assert mean(made) > MOST - 0.2


def test_a_request_that_has_left_is_forgotten_and_the_next_begins_as_the_last_was_planned() -> None:
    planned = PlannedDrafts(DynamicLength(MOST), MOST, by_model=True)
    planned.add(Request("r", (1,), SamplingParams(temperature=0)))
    assert planned.plan([], []) == MOST, "nobody knows better yet"
    planned.keep(["another"])
    assert planned.num_verified("r", 3) == 3 and planned.plan(["r"], ["r"]) == MOST
