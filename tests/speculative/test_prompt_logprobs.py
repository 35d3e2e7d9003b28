"""A prompt's logprobs: right whatever the chunks, blocks, caches and neighbours (F11), and returned exactly once."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.engine import EngineCore
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta
from tests.support.engines import (
    assert_idle,
    assert_pool_is_whole,
    decoder_of,
    exported,
    insert,
    naive_logits,
    tiny_engine,
)

BLOCK = 16
TEXT = tuple((7 * position * position + position // 3) % 64 for position in range(80))
LOOP = (9, 8, 7, 6) * 6
LENGTHS = (2, 15, 16, 17, 31, 32, 33, 50)


def engine_of(folder: Path, **changes: Any) -> EngineCore:
    return tiny_engine(folder, **{"block_size": BLOCK, "max_num_seqs": 3, "max_batched_tokens": 64, **changes})


def asking(name: str, prompt: tuple[int, ...], num_top: int = 4, **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=num_top, **params), 1)


def drain(engine: EngineCore) -> list[TokenDelta]:
    """Step until nothing moves any more."""
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        assert_pool_is_whole(engine)
    assert [delta.error for delta in deltas if delta.error] == []
    return deltas


def preempt(engine: EngineCore) -> None:
    sequence = engine.scheduler.find("a")
    assert sequence is not None
    engine.scheduler._preempt(sequence)


def assert_reported_once(
    deltas: list[TokenDelta], engine: EngineCore, prompt: tuple[int, ...], num_top: int = 4
) -> None:
    """Only the first delta has the prompt's logprobs, and they are the model's own."""
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    reported = deltas[0].prompt_logprobs
    assert reported is not None
    assert [entry.token_id for entry in reported] == list(prompt[1:])
    reference = naive_logits(decoder_of(engine), torch.tensor([prompt]))[0].log_softmax(-1)
    for row, entry in zip(reference, reported, strict=False):
        assert abs(float(row[entry.token_id]) - entry.logprob) < 1e-4
        assert entry.scored == ()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert int((row > row[entry.token_id] + 1e-4).sum()) < entry.rank
        assert entry.rank <= 1 + int((row > row[entry.token_id] - 1e-4).sum())


@pytest.mark.parametrize("num_prompt", LENGTHS)
@pytest.mark.parametrize("chunk", [15, 16, 17, 64])
def test_chunks_and_blocks_of_any_size_give_the_same(tiny_folder: Path, num_prompt: int, chunk: int) -> None:
    engine = engine_of(tiny_folder, max_batched_tokens=chunk)
    engine.add(asking("a", TEXT[:num_prompt]))
    assert_reported_once(drain(engine), engine, TEXT[:num_prompt])
    assert_idle(engine)


@pytest.mark.parametrize("num_top", [0, 20])
@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_as_many_candidates_as_asked_for_and_nothing_processes_a_prompt(
    tiny_folder: Path, mode: str, num_top: int
) -> None:
    engine = engine_of(tiny_folder, logprobs_mode=mode)
    engine.add(asking("a", TEXT[:20], num_top, logprobs=2, temperature=3.0, top_k=2, repetition_penalty=2.0))
    deltas = drain(engine)
    assert_reported_once(deltas, engine, TEXT[:20], num_top)
    assert all(len(entry.top) == 2 for delta in deltas for entry in delta.logprobs or ())


@pytest.mark.parametrize("num_prompt", [16, 17, 33, 48])
def test_they_read_no_cache_and_leave_one(tiny_folder: Path, num_prompt: int) -> None:
    prompt = TEXT[:num_prompt]
    engine = engine_of(tiny_folder)
    for name in ("first", "again"):
        engine.add(asking(name, prompt))
        deltas = drain(engine)
        assert_reported_once(deltas, engine, prompt)
        assert all(delta.num_cached_tokens == 0 for delta in deltas)
    assert engine.stats.prefix_cache_queries == 0, "nobody looked"
    engine.add(Request("plain", (*prompt, 1), SamplingParams(max_tokens=1)))
    assert drain(engine)[0].num_cached_tokens == num_prompt // BLOCK * BLOCK


@pytest.mark.parametrize("chunk", [15, 40])
def test_neighbours_that_draft_do_not_enter(tiny_folder: Path, chunk: int) -> None:
    engine = engine_of(tiny_folder, max_batched_tokens=chunk)
    speaking = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=3)
    engine.add(Request("loop", LOOP, speaking))
    for _ in range(6):
        engine.step()
    engine.add(asking("a", TEXT[:50]))
    engine.add(asking("b", LOOP, 2))
    deltas = drain(engine)
    assert_reported_once([delta for delta in deltas if delta.request_id == "a"], engine, TEXT[:50])
    assert_reported_once([delta for delta in deltas if delta.request_id == "b"], engine, LOOP, 2)
    spoken = [delta for delta in deltas if delta.request_id == "loop"]
    assert sum(delta.num_accepted for delta in spoken) > 0
    assert all(delta.prompt_logprobs is None for delta in spoken)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_that_was_preempted_begins_again(tiny_folder: Path, num_steps: int) -> None:
    engine = engine_of(tiny_folder, max_batched_tokens=15)
    engine.add(asking("a", TEXT[:50]))
    for _ in range(num_steps):
        assert engine.step() == []
    preempt(engine)
    assert_reported_once(drain(engine), engine, TEXT[:50])


def test_after_the_first_token_a_preemption_reports_nothing_again(tiny_folder: Path) -> None:
    engine = engine_of(tiny_folder)
    engine.add(asking("a", TEXT[:50]))
    deltas = engine.step()
    preempt(engine)
    assert_reported_once(deltas + drain(engine), engine, TEXT[:50])
    assert deltas[0].num_cached_tokens == 0


def test_tokens_that_were_emitted_elsewhere_were_reported_of_there(tiny_folder: Path) -> None:
    engine = engine_of(tiny_folder)
    engine.add(asking("a", TEXT[:20]), emitted=(3,))
    assert all(delta.prompt_logprobs is None for delta in drain(engine))


# -- handed off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_only_after", [0, 1])
@pytest.mark.parametrize("chunk", [15, 64])
@pytest.mark.parametrize("num_prompt", [2, 16, 17, 33])
@pytest.mark.parametrize("preempted_after", ["its first step", "it was scheduled"])
def test_a_handoff_reports_them_before_it_leaves(
    tiny_folder: Path, preempted_after: str, prefill_only_after: int, chunk: int, num_prompt: int
) -> None:
    prompt = TEXT[:num_prompt]
    prefill, decode = engine_of(tiny_folder, max_batched_tokens=chunk), engine_of(tiny_folder)
    request = asking("a", prompt)
    prefill.add(request, prefill_only_after=prefill_only_after)
    deltas = drain(prefill)
    assert len(deltas) == 1
    assert len(deltas[0].token_ids) == prefill_only_after
    assert_reported_once(deltas, prefill, prompt)
    insert(decode, request, exported(prefill, "a"))
    if preempted_after == "its first step":
        decode.step()
    else:
        decode.scheduler.schedule()
    preempt(decode)
    after = drain(decode)
    assert all(delta.prompt_logprobs is None for delta in after), "the decode side recomputes none"
    assert after[-1].finish_reason is FinishReason.LENGTH
    assert_idle(prefill)
    assert_idle(decode)


@pytest.mark.parametrize("prefill_only_after", [None, 0, 1])
def test_a_prompt_of_one_token_has_nothing_to_report_and_says_so(
    tiny_folder: Path, prefill_only_after: int | None
) -> None:
    engine, decode = engine_of(tiny_folder), engine_of(tiny_folder)
    request = asking("a", (5,))
    engine.add(request, prefill_only_after=prefill_only_after)
    deltas = drain(engine)
    if prefill_only_after is not None:
        insert(decode, request, exported(engine, "a"))
        deltas += drain(decode)
    assert [delta.prompt_logprobs for delta in deltas] == [()] + [None] * (len(deltas) - 1)
