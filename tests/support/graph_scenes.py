"""Requests for engines that replay graphs, and the comparison with engines that do not."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams, Structure
from speculative.state.token_constraint import Bools
from speculative.stats import StepStats
from tests.support.engines import Answer, assert_idle, run, take

VOCABULARY = 64
NUM_DRAFTS = 3
PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(1 + 9 * i)) for i in range(6)]
PLAIN = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, logprobs=logprobs)
    for temperature, logprobs in ((0, None), (1, 0), (1, 0), (0.7, None), (0, 0), (1, None))
]
OTHER_WISHES = [
    SamplingParams(max_tokens=16, ignore_eos=True, top_p=0.8),
    SamplingParams(max_tokens=16, ignore_eos=True, top_k=5, logprobs=2),
    SamplingParams(max_tokens=16, ignore_eos=True, reproducible=True),
    SamplingParams(max_tokens=16, ignore_eos=True, logit_bias=((5, 3.0),), frequency_penalty=0.5),
    SamplingParams(max_tokens=16, ignore_eos=True, prompt_logprobs=0),
    SamplingParams(max_tokens=16, ignore_eos=True, logprob_token_ids=(7, 9), speculate=False),
]
EDITED = [
    SamplingParams(max_tokens=16, ignore_eos=True, frequency_penalty=-1.5),  # repeats itself: lookups find drafts
    SamplingParams(max_tokens=16, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.5, temperature=0.6),
    SamplingParams(max_tokens=16, ignore_eos=True, logit_bias=((5, 4.0), (9, 3.0), (11, -100.0)), bad_words=((9,),)),
    SamplingParams(max_tokens=16, ignore_eos=True, logit_bias=((5, 6.0), (9, 6.0)), bad_words=((5, 9), (9, 9, 5))),
    SamplingParams(max_tokens=16, min_tokens=8, stop_token_ids=tuple(range(30)), logprobs=0),
    SamplingParams(max_tokens=16, ignore_eos=True, allowed_token_ids=tuple(range(9, 40)), logprobs=3, top_p=0.9),
    SamplingParams(max_tokens=16, structure=Structure("choice", "[]"), logprob_token_ids=(7, 8)),
    SamplingParams(max_tokens=16, structure=Structure("choice", "[]"), temperature=0, frequency_penalty=0.6),
    SamplingParams(max_tokens=16, structure=Structure("choice", "[]"), allowed_token_ids=tuple(range(3, 50)), top_k=9),
]
"""Requests that change logits, in every way."""

MIXED = [wish for pair in zip(OTHER_WISHES, PLAIN, strict=True) for wish in pair]
_LOGPROB_TOLERANCE = 1e-4  # attention sums in another order
_EVIDENCE_TOLERANCE = 1e-3  # of sums over all rounds of a scene


class Alternating:
    """A structure: even and odd tokens in turn."""

    def allowed(self, output: Any, drafts: Any) -> list[Bools]:
        masks = []
        for offset in range(len(drafts) + 1):
            masks.append(np.arange(VOCABULARY) % 2 == (len(output) + offset) % 2)
            if offset < len(drafts) and not masks[-1][drafts[offset]]:
                break
        return masks


def add_all(engine: EngineCore, params: list[SamplingParams], *, prefix: str = "r") -> None:
    for index, own in enumerate(params):
        engine.add(Request(f"{prefix}{index}", PROMPTS[index % len(PROMPTS)], own, seed=index))


def answers(
    engine: EngineCore, params: list[SamplingParams], *, before_step: Callable[[EngineCore], None] | None = None
) -> dict[str, Answer]:
    """What requests of these parameters get; nothing is left of them in the engine."""
    add_all(engine, params)
    found = defaultdict[str, Answer](Answer)
    while engine.has_work:
        if before_step is not None:
            before_step(engine)
        take(found, engine.step())
    assert_idle(engine)
    return found


LONG = {"max_batched_tokens": 512, "block_size": 16, "kv_cache_tokens": 8192, "max_model_len": 4096, "max_num_seqs": 6}
"""Settings of an engine for `late_prompts`."""


def late_prompts(engine: EngineCore) -> dict[str, Answer]:
    """The answers to prompts of 700 tokens, in several chunks, that arrive one by one beside sequences that decode, one
    of them behind 3,000 tokens."""
    random, found = np.random.default_rng(0), defaultdict[str, Answer](Answer)
    for index, length in enumerate((3000, 40, 9, 700, 700, 700)):
        tokens = tuple(random.integers(3, VOCABULARY, length).tolist())
        max_tokens = 110 if index < 3 else 12
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=index % 3 / 2, logprobs=0)
        engine.add(Request(f"r{index}", tokens, params, seed=index))
        for _ in range(0 if index < 2 else 12 if index == 2 else 4):
            take(found, engine.step())
        assert index < 2 or found["r0"].finish_reason is None, "it still decodes"
    found = run(engine, found)
    assert_idle(engine)
    return found


def assert_same_evidence(found: StepStats, expected: StepStats) -> None:
    """The same counts, and self-checks of as many terms, with the same sums but for the order they are added in."""
    assert found.checks.keys() == expected.checks.keys()
    for check, sums in found.checks.items():
        other = expected.checks[check]
        assert sums.num == other.num, f"{check}: {sums.num} terms for {other.num}"
        assert astuple(sums) == pytest.approx(astuple(other), abs=_EVIDENCE_TOLERANCE), check
    for name in set(StepStats.__slots__) - {"checks"}:
        if not name.endswith("_s"):  # seconds
            own, theirs = getattr(found, name), getattr(expected, name)
            assert own == pytest.approx(theirs, abs=_EVIDENCE_TOLERANCE), name


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """The same tokens, kinds, rounds, endings and errors; the same logprobs but for the order of sums."""
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        other = expected[name]
        assert (answer.error, answer.finish_reason) == (other.error, other.finish_reason)
        assert (answer.token_ids, answer.kinds, answer.round_sizes) == (other.token_ids, other.kinds, other.round_sizes)
        assert (answer.num_drafted, answer.num_accepted) == (other.num_drafted, other.num_accepted)
        assert answer.values == pytest.approx(other.values, abs=_LOGPROB_TOLERANCE)
        own, theirs = ([one._replace(draft_probs=None, last_prob=0) for one in each.rounds] for each in (answer, other))
        assert own == theirs
        q, other_q = ([(*(one.draft_probs or ()), one.last_prob) for one in each.rounds] for each in (answer, other))
        assert sum(q, ()) == pytest.approx(sum(other_q, ()), abs=_LOGPROB_TOLERANCE)
        assert [one.rank for one in answer.logprobs] == [one.rank for one in other.logprobs]
        for part in ("top", "scored"):
            own, theirs = ([getattr(one, part) for one in each.logprobs] for each in (answer, other))
            assert [len(one) for one in own] == [len(one) for one in theirs]
            values = [[value for one in each for _, value in one] for each in (own, theirs)]
            assert values[0] == pytest.approx(values[1], abs=_LOGPROB_TOLERANCE), part
