"""Before the first request: steps are tried out, and nothing is left of them."""

from pathlib import Path

import pytest

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.scheduling.draft_length import DynamicLength
from speculative.scheduling.step_cost import Work
from speculative.warm_up import warm_up
from tests.support.engines import assert_idle, settings

DYNAMIC = DrafterConfig.of(kind="ngram", num_draft_tokens=3, ngram_min=1, length="dynamic")


def count_steps(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of running sequences in each step from now on."""
    running: list[int] = []
    step = engine.step

    def counted() -> list[object]:
        deltas = step()
        running.append(engine.usage().num_running)
        return deltas

    monkeypatch.setattr(engine, "step", counted)
    return running


def test_what_steps_cost_is_known_before_the_first_request(tiny_folder: Path) -> None:
    engine = EngineCore.load(tiny_folder, settings(drafter=DYNAMIC, max_num_seqs=4))
    policy = engine.scheduler.draft_length
    assert isinstance(policy, DynamicLength) and not policy.cost(1).is_known
    warm_up(engine)
    assert policy.cost(1).is_known and policy.cost(4).is_known
    assert policy.cost(1).seconds(Work(1, 0, 0, 8)) > 0
    assert policy._rates[False].blended() == DynamicLength(3)._rates[False].blended(), "made-up text shows nothing"
    assert_idle(engine)
    assert not engine.scheduler.pool._block_of, "no prefix"
    stats = engine.take_stats()
    assert (stats.num_steps, stats.num_emitted, stats.num_drafted) == (0, 0, 0)


def test_made_up_requests_are_nothing_to_the_self_checks(tiny_folder: Path) -> None:
    engine = EngineCore.load(tiny_folder, settings(drafter=DYNAMIC, self_check_sample_rate=1.0))
    before = engine.self_check.snapshot()
    warm_up(engine)
    assert engine.self_check.snapshot() == before
    engine.add(Request("a", (3, 5, 3), SamplingParams(max_tokens=4), seed=0))
    assert engine.take_stats().num_repeated_seeds == 0, "a user's seeds are new"


def test_fixed_lengths_need_a_few_steps_of_one_request(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineCore.load(tiny_folder, settings(max_num_seqs=4))
    running = count_steps(engine, monkeypatch)
    warm_up(engine)
    assert len(running) < 8 and max(running) == 1
    assert_idle(engine)


def test_slow_steps_are_not_tried_at_every_load(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineCore.load(tiny_folder, settings(drafter=DYNAMIC, max_num_seqs=4))
    running = count_steps(engine, monkeypatch)
    clock = iter(range(1000))
    monkeypatch.setattr("speculative.warm_up.time.perf_counter", lambda: float(next(clock)))
    warm_up(engine)
    assert max(running) == 1


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 8])
def test_the_shortest_sequences_are_enough(tiny_folder: Path, max_model_len: int) -> None:
    engine = EngineCore.load(tiny_folder, settings(drafter=DYNAMIC, max_num_seqs=4, max_model_len=max_model_len))
    warm_up(engine)
    assert_idle(engine)
