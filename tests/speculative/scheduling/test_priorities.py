"""Who comes first: priority and age in the waiting line; `test_scheduler.py` has what runs beside what."""

import random
from pathlib import Path
from typing import Any

import pytest

from speculative.errors import InvalidRequest
from speculative.request import Request, SamplingParams
from speculative.scheduling.request_queue import RequestQueue
from speculative.state.sequence import Sequence
from tests.support.engines import tiny_engine
from tests.support.tiny_models import write_tiny_model

AGEING_S = 10.0


def sequence(name: str, priority: int = 0, arrived_at: float = 0.0, *, score_from: int | None = None) -> Sequence:
    made = Sequence(Request(name, (1, 2, 3), seed=1, priority=priority, score_from=score_from))
    made.arrived_at = arrived_at
    return made


def drain(line: RequestQueue) -> str:
    """The names in the order in which they come."""
    names = []
    while (first := line.first) is not None:
        names.append(first.request.request_id)
        line.remove(first)
    assert len(line) == 0 and list(line) == []
    return "".join(names)


def test_who_was_running_comes_first_and_scoring_last() -> None:
    line = RequestQueue(AGEING_S)
    for name in "ab":
        line.append(sequence(name, priority=-100))
    line.append(sequence("s", priority=-100, score_from=1))
    line.push_in(sequence("y", priority=50))  # the youngest makes way first
    line.push_in(sequence("x", priority=50))
    line.push_in(sequence("t", score_from=1))
    assert drain(line) == "xyabts"


def test_any_order_of_comings_and_goings() -> None:
    generator = random.Random(20)
    for _ in range(50):
        line, here = RequestQueue(AGEING_S), list[Sequence]()
        for number in range(60):
            if here and generator.random() < 0.4:
                line.remove(here.pop(generator.randrange(len(here))))
            else:
                here.append(sequence(str(number), generator.randint(-4, 4), generator.random() * 50))
                line.append(here[-1])
            assert len(line) == len(here)
            assert list(line) == sorted(here, key=lambda one: one.arrived_at + AGEING_S * one.request.priority)


@pytest.mark.parametrize("priority", [-101, 101])
def test_a_priority_is_bounded(priority: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request("a", (1,), priority=priority)
    assert caught.value.field == "priority"


# ---- in the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("priorities"), max_position_embeddings=1024)


def request(name: str, num_prompt: int, **fields: Any) -> Request:
    prompt = tuple((7 * index + len(name)) % 60 + 1 for index in range(num_prompt))
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 400), temperature=0, ignore_eos=True)
    return Request(name, prompt, params, seed=1, **fields)


def test_a_short_prompt_of_higher_priority_passes_a_long_one(folder: Path) -> None:
    def steps_until_first(priority: int) -> int:
        engine = tiny_engine(folder, max_batched_tokens=40, kv_cache_tokens=4096, prefix_caching=False)
        engine.add(request("long", 600))
        engine.step()
        engine.add(request("short", 9, priority=priority))
        count = 1
        while "short" not in {delta.request_id for delta in engine.step()}:
            count += 1
        return count

    assert steps_until_first(-1) == 1, "it is computed in the very next step"
    assert steps_until_first(0) > 600 // 40 - 2, "of equal priority, the older prompt comes first"
