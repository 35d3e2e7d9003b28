"""Steps begun before the host has read a verdict: no bit of what is served changes, and the device has no pause."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.config import DrafterConfig
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.engine import EngineCore
from speculative.gpu import next_round
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.next_round import NextPass, NextRound, _Begun
from speculative.request import Request, SamplingParams, Speculation
from speculative.scheduling.draft_length import DraftLength, DraftPlan
from speculative.scheduling.scheduler import Scheduler
from speculative.state.sequence import Sequence
from speculative.stats import StepStats
from tests.support.engines import Answer, assert_idle, load_engine, run, settings, take, tiny_engine
from tests.support.graph_scenes import EDITED, MIXED, PLAIN, PROMPTS, Alternating, add_all
from tests.support.pretended_cuda import PretendedCuda
from tests.support.triton_interpreter import needs_triton

NAMES = ("none", "eagle3", "draft_model")
TIGHT = {"kv_cache_tokens": 224, "max_model_len": 96}
SHORT_ANSWERS = [SamplingParams(max_tokens=9 + 4 * index, stop_token_ids=tuple(range(index))) for index in range(6)]

SEED = 2
Evidence = tuple[dict[str, Answer], dict[str, Any], dict[bytes, Tensor]]


def busy_scene(engine: EngineCore, seed: int) -> dict[str, Answer]:
    """Requests of all kinds come, end, and are aborted; what was computed is dropped, and speculation paused."""
    draw, found, number = random.Random(seed), defaultdict[str, Answer](Answer), 0
    wishes = [*PLAIN, *MIXED, *EDITED, *SHORT_ANSWERS]
    for _ in range(150):
        event = draw.random()
        if event < 0.25 and engine.usage().num_waiting < 3:
            params, prompt = draw.choice(wishes), PROMPTS[number % len(PROMPTS)]
            is_replay = event < 0.01 and len(prompt) > 1
            engine.add(Request(f"r{number}", prompt, params, seed=number, score_from=1 if is_replay else None))
            number += 1
        elif event < 0.33 and number:
            engine.abort(f"r{draw.randrange(number)}")
        elif event < 0.335:
            engine.scheduler.invalidate_cache()
        elif event < 0.35:
            engine.scheduler.speculation = draw.choice([Speculation.ON, Speculation.OFF])
        take(found, engine.step())
    run(engine, found)
    assert_idle(engine)
    return found


def computed_again(engine: EngineCore, seed: int) -> dict[str, Answer]:
    """Everything is computed again while drafts wait to be taken, and then all decode in the order they did."""
    found = defaultdict[str, Answer](Answer)
    add_all(engine, PLAIN[seed:][:3])
    for _ in range(5):
        take(found, engine.step())
    engine.scheduler.invalidate_cache()
    return run(engine, found)


def evidence_of(engine: EngineCore, found: dict[str, Answer]) -> Evidence:
    """The answers, the counts and sums of all steps, and what the prefix cache would give others, bit for bit."""
    stats, size, pool = engine.take_stats(), engine.config.block_size, engine.scheduler.pool
    counts = {name: getattr(stats, name) for name in StepStats.__slots__ if not name.endswith("_s")}
    cached = {}
    for name, block in pool._block_of.items():
        rows = [engine.cache.data[:, :, block * size : (block + 1) * size]]
        if isinstance(engine.drafter, ModelDrafter) and pool.is_marked(block):
            begin = block * size + bool(engine.drafter.capture)  # a head has no row of the first token
            rows += [engine.drafter.cache.data[:, :, begin : (block + 1) * size], engine.drafter.edges[block]]
        cached[name] = torch.cat([one.flatten() for one in rows])
    for answer in found.values():
        answer.deltas = [delta._replace(queue_s=0.0) for delta in answer.deltas]  # by the clock
    return found, counts, cached


def assert_same_bits(found: Evidence, expected: Evidence) -> None:
    assert found[0] == expected[0] and found[1] == expected[1]
    assert found[2].keys() == expected[2].keys()
    for name, rows in found[2].items():
        assert torch.equal(rows, expected[2][name])


Serve = Callable[..., Evidence]


@pytest.fixture
def serve(target: Path, drafters: dict[str, DrafterConfig], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run the busy scene, with what is begun early and without."""
    monkeypatch.setattr(next_round, "STEADY_STEPS", 1)

    def serve(name: str, *, early: bool = True, scene: Any = busy_scene, **changes: Any) -> Evidence:
        given = {"drafter": drafters[name], "self_check_sample_rate": 1.0, "max_num_seqs": 8, "cuda_graphs": True}
        with monkeypatch.context() as patch:
            if not early:
                patch.setattr(NextRound, "begin", lambda *_: None)
                patch.setattr(NextPass, "begin", lambda *_: None)
            engine = load_engine(target, settings(**given | changes), make_constraint=lambda _: Alternating())
            return evidence_of(engine, scene(engine, SEED))

    return serve


@pytest.mark.parametrize("changes", [{}, TIGHT, {"block_size": 16}], ids=["usual", "tight", "large blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_begun_early_changes_no_bit(
    serve: Serve, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes, places = Counter[str](), _Begun.places

    def watched(self: _Begun, *given: Any) -> Any:
        found = places(self, *given)
        outcomes["dropped" if found is None else "taken" if len(found) == len(self.of) else "taken in part"] += 1
        return found

    expected = serve(name, early=False, **changes)
    monkeypatch.setattr(_Begun, "places", watched)
    assert_same_bits(serve(name, **changes), expected)
    assert outcomes["taken"] > 3 and outcomes["dropped"] > 3
    assert changes or outcomes["taken in part"] > 0


def _plan_passages(_: DraftLength, decoding: list[Sequence]) -> DraftPlan:
    """Every other round or so repeats a passage, in the model's place."""
    return DraftPlan(repeated={own.request.request_id: [5, 9] for own in decoding if len(own.tokens) % 2})


@pytest.mark.parametrize("name", NAMES[1:])
def test_what_was_begun_before_a_passage_is_dropped_behind_it(
    serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone stream's passage is verified eagerly: no step asks for what was begun, and the stream goes on."""
    monkeypatch.setattr(DraftLength, "choose", _plan_passages)
    expected = serve(name, early=False, max_num_seqs=1)
    assert_same_bits(serve(name, max_num_seqs=1), expected)


def _first_rows(self: _Begun, entries: Any, *_: Any) -> Any:
    return np.arange(len(entries)) if all(entry.sequence in self.of for entry in entries) else None


def _one_more(self: GraphBuffers, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    survived = self.verdict[0].index_select(0, inputs["verdicts"])
    return (survived + 1).clamp(max=3) * (survived > 0), survived - inputs["judged"]


def _publish_one_more(self: Scheduler, sequence: Sequence) -> None:
    sequence.num_computed += 1
    PUBLISH(self, sequence)
    sequence.num_computed -= 1


PUBLISH = Scheduler.publish
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "rows of others": (_Begun, "places", _first_rows),
    "uniforms of other lengths": (GraphBuffers, "survived", _one_more),
    "no block for a row": (NextRound, "_has_blocks", lambda *_: True),
    "a pass behind the last token": (NextPass, "_goes_on", lambda *_: True),
    "what a pass computed is published": (Scheduler, "publish", _publish_one_more),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_guard_that_is_missing_is_found(serve: Serve, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "none" if "pass" in fault else "eagle3"
    expected = serve(name, early=False, **TIGHT)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, IndexError)):
        assert_same_bits(serve(name, **TIGHT), expected)


def test_drafts_of_what_is_computed_again_are_made_again(serve: Serve) -> None:
    expected = serve("eagle3", scene=computed_again, early=False)
    assert_same_bits(serve("eagle3", scene=computed_again), expected)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("num_streams", [1, 64])
@pytest.mark.parametrize("name", NAMES[:2])
def test_the_device_has_work_while_the_host_books_a_step(
    target: Path, drafters: dict[str, DrafterConfig], name: str, num_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretended device's clock tells; replays and waits are those of steps that begin nothing early."""
    changes = {"drafter": drafters[name], "max_num_seqs": num_streams, "max_batched_tokens": 512, "block_size": 16}
    costs = list[tuple[int, int, int]]()
    for early in (False, True):
        with monkeypatch.context() as patch, PretendedCuda() as device:
            if not early:
                patch.setattr(NextRound, "begin", lambda *_: None)
                patch.setattr(NextPass, "begin", lambda *_: None)
            engine = tiny_engine(target, device="cuda", kv_cache_tokens=32768, **changes)
            add_all(engine, [SamplingParams(max_tokens=90, ignore_eos=True)] * num_streams)
            for _ in range(next_round.STEADY_STEPS + 8):
                engine.step()
            device.clear()
            for _ in range(10):
                engine.step()
            costs.append((device.num_dry, device.num_replays, sum(device.waits.values())))
    assert [cost[0] for cost in costs] == [10, 0]
    assert costs[0][1:] == costs[1][1:]
