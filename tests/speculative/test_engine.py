"""The engine as a whole: one answer, whatever the neighbours, the drafts, the route and the room."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculative.assembly import use_device
from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import InvalidRequest
from speculative.request import FinishReason, Request, SamplingParams, TokenKind
from tests.support.engines import (
    NGRAM,
    NO_DRAFTS,
    Answer,
    answer_all,
    assert_idle,
    assert_pool_is_whole,
    decoder_of,
    exported,
    hand_over,
    insert,
    markov_engine,
    naive_logits,
    run,
    take,
    teacher_forced,
    texts,
    tiny_engine,
)
from tests.support.near_ties import assert_same_up_to_near_tie

CYCLE = [(token + 1) % 16 for token in range(16)]
PROMPTS = {
    "looping": (5, 6, 7, 8) * 6,
    "one token": (9,),
    "a block": (3, 1, 4, 1),
    "a block and one": (3, 1, 4, 1, 5),
    "plain": tuple((7 * i * i + 3) % 61 for i in range(30)),
    "longer than a chunk": tuple((5 * i) % 59 for i in range(100)),
}
GREEDY = SamplingParams(max_tokens=40, temperature=0, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, logprobs=2, ignore_eos=True)


def requests(params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(name, prompt, params, seed=index) for index, (name, prompt) in enumerate(PROMPTS.items())]


def answer_singly(engine: EngineCore, wanted: list[Request]) -> dict[str, Answer]:
    return {request.request_id: answer_all(engine, [request])[request.request_id] for request in wanted}


def logits_after(engine: EngineCore, name: str, output: Sequence[int]) -> Tensor:
    return naive_logits(decoder_of(engine), torch.tensor([[*PROMPTS[name], *output]]))[0, -1]


def assert_alike(engine: EngineCore, first: dict[str, Answer], second: dict[str, Answer]) -> None:
    """The same texts up to near-ties, with logprobs within 1e-4 so far."""
    assert first.keys() == second.keys()
    for name, answer in first.items():
        other, after = second[name], functools.partial(logits_after, engine, name)
        parting = assert_same_up_to_near_tie(answer.token_ids, other.token_ids, after)
        assert answer.values[:parting] == pytest.approx(other.values[:parting], abs=1e-4)


# -- parity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 7])
def test_greedy_text_is_the_plain_one(tiny_folder: Path, num_draft_tokens: int) -> None:
    drafter = DrafterConfig.of(num_draft_tokens=num_draft_tokens, ngram_min=1)
    speculating = tiny_engine(tiny_folder, drafter=drafter)
    plain = tiny_engine(tiny_folder, drafter=NO_DRAFTS)
    answers = answer_all(speculating, requests())
    assert sum(answer.num_accepted for answer in answers.values()) > 10, "nothing was speculated"
    assert any(answer.num_accepted < answer.num_drafted for answer in answers.values()), "nothing was rejected"
    assert_alike(plain, answers, answer_all(plain, requests()))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_batched_is_one_by_one(tiny_folder: Path, params: SamplingParams, prefix_caching: bool) -> None:
    """Sampled requests too: with their own seeds and drafter they do not see who runs beside them."""
    engine = tiny_engine(tiny_folder, prefix_caching=prefix_caching, max_num_seqs=4)
    singly = answer_singly(engine, requests(params))
    engine.scheduler.pool.drop_prefixes()
    assert_alike(engine, answer_all(engine, requests(params)), singly)
    assert_alike(engine, answer_all(engine, requests(params)[::-1]), singly)


def test_a_token_beyond_the_embedding_is_refused_and_the_running_ones_go_on(tiny_folder: Path) -> None:
    alone, engine = answer_all(tiny_engine(tiny_folder), requests()), tiny_engine(tiny_folder)
    size = engine.model.vocab_size
    for request in requests():
        engine.add(request)
    answers: dict[str, Answer] = defaultdict(Answer)
    for _ in range(4):
        take(answers, engine.step())
    for wrong in (size, 2**31):
        fields: dict[str, Any] = {"logit_bias": ((wrong, 1.0),), "bad_words": ((1, wrong),)}
        fields |= dict.fromkeys(("allowed_token_ids", "stop_token_ids", "logprob_token_ids"), (3, wrong))
        refused = {name: Request("wrong", (5,), SamplingParams(**{name: value}), 1) for name, value in fields.items()}
        for field, request in {"prompt": Request("wrong", (5, wrong), GREEDY, 1), **refused}.items():
            with pytest.raises(InvalidRequest, match=r"0 (to|and) 63") as caught:
                engine.add(request)
            assert caught.value.field == field
    assert texts(run(engine, answers)) == texts(alone)
    assert_idle(engine)


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
@pytest.mark.parametrize("max_batched_tokens", [40, 41, 512])
def test_blocks_and_chunks_of_any_size_give_the_same_text(
    tiny_folder: Path, block_size: int, max_batched_tokens: int
) -> None:
    engine = tiny_engine(tiny_folder, block_size=block_size, max_batched_tokens=max_batched_tokens)
    reference = tiny_engine(tiny_folder, drafter=NO_DRAFTS, max_batched_tokens=512, prefix_caching=False)
    assert_alike(engine, answer_all(engine, requests()), answer_singly(reference, requests()))


def test_an_emptied_prefix_cache_is_filled_again(tiny_folder: Path) -> None:
    engine = tiny_engine(tiny_folder)
    fresh = answer_all(engine, requests())
    for request in requests():
        engine.add(request)
    begun: dict[str, Answer] = defaultdict(Answer)
    take(begun, engine.step())
    engine.scheduler.pool.drop_prefixes()  # while requests run, which go on
    assert texts(run(engine, begun)) == texts(fresh)
    engine.scheduler.pool.drop_prefixes()
    again = answer_all(engine, requests())
    assert again["plain"].num_cached_tokens == 0
    assert answer_all(engine, requests())["plain"].num_cached_tokens > 0
    assert_pool_is_whole(engine)


# -- handoff --------------------------------------------------------------------------------------------------------


def hand_off(prefill: EngineCore, decode: EngineCore, request: Request, prefill_only_after: int = 1) -> Answer:
    """Prefill here, decode there; what the client gets from both."""
    return run(decode, hand_over(prefill, decode, [request], prefill_only_after))[request.request_id]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_handed_off_is_the_monolith_bit_for_bit(
    tiny_folder: Path, name: str, params: SamplingParams, dtype: str
) -> None:
    """The shapes are the same, so tokens and logprobs are the same numbers."""
    (request,) = (request for request in requests(params) if request.request_id == name)
    prefill, decode, monolith = (tiny_engine(tiny_folder, dtype=dtype) for _ in range(3))
    expected = answer_all(monolith, [request])[name]
    answer = hand_off(prefill, decode, request)
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == expected.logprobs
    assert answer.kinds == expected.kinds
    assert (answer.num_drafted, answer.num_accepted) == (expected.num_drafted, expected.num_accepted)
    assert answer.finish_reason is expected.finish_reason
    assert decode.stats.num_prompt_tokens == 0, "nothing that was computed is computed again"
    assert_idle(prefill)
    assert_idle(decode)


@pytest.mark.parametrize("sizes", [(1, 16), (16, 1), (4, 7), (64, 4)], ids=str)
@pytest.mark.parametrize("prefill_only_after", [0, 1, 5])
def test_block_sizes_need_not_agree(tiny_folder: Path, sizes: tuple[int, int], prefill_only_after: int) -> None:
    prefill, decode = (
        tiny_engine(tiny_folder, block_size=size, kv_cache_tokens=size * (1024 // size)) for size in sizes
    )
    monolith = tiny_engine(tiny_folder, prefix_caching=False)
    answers = {request.request_id: hand_off(prefill, decode, request, prefill_only_after) for request in requests()}
    assert_alike(monolith, answers, answer_singly(monolith, requests()))
    assert_idle(prefill)
    assert_idle(decode)


@pytest.mark.parametrize("name", PROMPTS)
def test_choices_from_one_handoff_are_separate_requests(tiny_folder: Path, name: str) -> None:
    """One prefill for n choices, each with a seed of its own; the last prompt token is computed by each."""
    prefill, decode, monolith = (tiny_engine(tiny_folder) for _ in range(3))
    prefill.add(Request("p", PROMPTS[name], SAMPLED), prefill_only_after=0)
    assert not run(prefill)
    blob = exported(prefill, "p")
    blob.flags.writeable = False
    choices = [Request(f"choice {seed}", PROMPTS[name], SAMPLED, seed=seed) for seed in (0, 1, 2**64 - 1)]
    for choice in choices:
        insert(decode, choice, blob)
    together = run(decode)
    for choice in choices:
        alone = answer_all(monolith, [choice])[choice.request_id]
        assert together[choice.request_id].token_ids == alone.token_ids
        assert together[choice.request_id].values == pytest.approx(alone.values, abs=1e-4)
        assert together[choice.request_id].kinds == alone.kinds
    assert len({tuple(answer.token_ids) for answer in together.values()}) == 3
    assert decode.usage().num_free_blocks == decode.usage().num_blocks


def test_a_handoff_into_used_slots_reads_nothing_of_their_last_tenant(tiny_folder: Path) -> None:
    prefill, decode, fresh = (tiny_engine(tiny_folder, kv_cache_tokens=256, prefix_caching=False) for _ in range(3))
    answer_all(decode, requests(SAMPLED))
    decode.cache.data[:] = math.nan  # whatever is read before it is written shows
    for request in requests(SAMPLED):
        answer = hand_off(prefill, decode, request)
        assert answer.logprobs == hand_off(prefill, fresh, request).logprobs


def test_a_handoff_whose_prompt_is_known_takes_only_what_is_new(tiny_folder: Path) -> None:
    prefill, decode = tiny_engine(tiny_folder), tiny_engine(tiny_folder)
    request = Request("a", PROMPTS["plain"], GREEDY)
    first = hand_off(prefill, decode, request)
    decode.add(Request("keeper", PROMPTS["plain"], GREEDY))
    decode.step()
    held = decode.usage().num_free_blocks
    hand_over(prefill, decode, [request])
    decode.step()
    assert held - decode.usage().num_free_blocks <= 3, "most blocks are the keeper's"
    answers = run(decode)
    assert answers["a"].token_ids == first.token_ids[-len(answers["a"].token_ids) :]


def test_a_resumed_request_goes_on_as_if_undisturbed(tiny_folder: Path) -> None:
    """From the end of any round: the same rounds follow, so at T > 0 the same text."""
    for params in (GREEDY, SAMPLED):
        for request in requests(params):
            undisturbed = answer_all(tiny_engine(tiny_folder), [request])[request.request_id]
            ends = list(itertools.accumulate(undisturbed.round_sizes))[:-1]
            for end in ends[:: max(1, len(ends) // 4)]:
                other = tiny_engine(tiny_folder)
                other.add(request, emitted=undisturbed.token_ids[:end])
                resumed = run(other)[request.request_id]
                assert resumed.token_ids == undisturbed.token_ids[end:]
                assert resumed.values == pytest.approx(undisturbed.values[end:], abs=1e-4)
                assert TokenKind.FIRST not in resumed.kinds
                assert_idle(other)


# -- scoring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_served_logprobs_are_those_of_teacher_forcing(tiny_folder: Path, params: SamplingParams) -> None:
    """Both of the whole model without a cache and of a replay by another engine; scoring runs beside other requests."""
    engine, referee = tiny_engine(tiny_folder), tiny_engine(tiny_folder, max_batched_tokens=40)
    answers = answer_all(engine, requests(params))
    for name, answer in answers.items():
        text = (*PROMPTS[name], *answer.token_ids)
        referee.add(Request(f"score {name}", text, score_from=len(PROMPTS[name])))
        referee.add(Request(f"beside {name}", PROMPTS[name], GREEDY))
    scored = run(referee)
    for name, answer in answers.items():
        replayed = scored[f"score {name}"]
        assert [entry.token_id for entry in replayed.logprobs] == answer.token_ids
        assert answer.values == pytest.approx(replayed.values, abs=1e-4)
        distribution = teacher_forced(engine, PROMPTS[name], answer.token_ids)
        expected = distribution.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert answer.values == pytest.approx(expected.tolist(), abs=1e-4)
    assert_idle(referee)


@pytest.mark.parametrize("score_from", [1, 2, 63, 64, 65, 129])
def test_scoring_counts_from_anywhere(tiny_folder: Path, score_from: int) -> None:
    engine = tiny_engine(tiny_folder)
    text = tuple((13 * i) % 61 for i in range(130))
    engine.add(Request("s", text, score_from=score_from))
    answer = run(engine)["s"]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == []
    distribution = teacher_forced(engine, text[:score_from], text[score_from:])
    expected = distribution.gather(1, torch.tensor(text[score_from:])[:, None])[:, 0]
    assert answer.values == pytest.approx(expected.tolist(), abs=1e-4)


def test_scoring_reads_no_cache_and_leaves_none(tiny_folder: Path) -> None:
    """Its values are to be right when the cache is wrong."""
    engine = tiny_engine(tiny_folder)
    answer = answer_all(engine, [Request("a", PROMPTS["plain"], GREEDY)])["a"]
    engine.cache.data[:] = 0.5
    text = (*PROMPTS["plain"], *answer.token_ids)
    published = dict(engine.scheduler.pool._block_of)
    engine.add(Request("s", text, score_from=len(PROMPTS["plain"])))
    assert run(engine)["s"].values == pytest.approx(answer.values, abs=1e-4)
    assert engine.scheduler.pool._block_of.keys() <= published.keys()


# -- faults ---------------------------------------------------------------------------------------------------------


def poison(engine: EngineCore, victim: str, value: float) -> None:
    """Spoil one logit of every verify row of one request."""
    healthy = engine.parts.sampler.sample

    def sample_spoiled(step_input: Any, logits: Tensor, *rest: Any) -> Any:
        names = [step_input.sampled_entries[entry].sequence.request.request_id for entry in step_input.verify_entries]
        spoiled = logits.clone()
        spoiled[[name == victim for name in names], 7] = value
        return healthy(step_input, spoiled, *rest)

    engine.parts.sampler.sample = sample_spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "inf"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("healthy_steps", [0, 4])
def test_a_row_that_is_no_number_fails_its_request_alone(
    tiny_folder: Path, value: float, params: SamplingParams, healthy_steps: int
) -> None:
    expected = answer_all(tiny_engine(tiny_folder), requests(params))
    engine = tiny_engine(tiny_folder)
    for request in requests(params):
        engine.add(request)
    answers: dict[str, Answer] = defaultdict(Answer)
    for _ in range(healthy_steps):
        take(answers, engine.step())
    poison(engine, "looping", value)
    answers = run(engine, answers)
    failed = answers.pop("looping")
    assert failed.finish_reason is FinishReason.ERROR
    assert "not finite" in (failed.error or "")
    assert failed.token_ids == expected.pop("looping").token_ids[: len(failed.token_ids)]
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids
        assert answer.error is None
    assert_idle(engine)
    assert math.isfinite(engine.stats.expected_accepted)


def test_scores_that_are_no_numbers_are_an_error(tiny_folder: Path) -> None:
    engine = tiny_engine(tiny_folder)
    healthy = engine.runner.logits
    engine.runner.logits = lambda rows: healthy(rows) * math.nan  # type: ignore[method-assign]
    engine.add(Request("s", PROMPTS["plain"], score_from=3))
    answer = run(engine)["s"]
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.logprobs == []
    assert_idle(engine)


def test_a_damaged_prefix_fails_one_request_and_not_those_after_it(tiny_folder: Path) -> None:
    engine = tiny_engine(tiny_folder)
    expected = answer_all(engine, [Request("a", PROMPTS["plain"], GREEDY)])["a"]
    engine.cache.data[0, 1] = math.nan
    engine.add(Request("b", PROMPTS["plain"], GREEDY))
    assert run(engine)["b"].finish_reason is FinishReason.ERROR
    engine.add(Request("c", PROMPTS["plain"], GREEDY))
    assert run(engine)["c"].token_ids == expected.token_ids
    assert_idle(engine)


def test_requests_that_do_not_fit_are_refused_at_the_door(tiny_folder: Path) -> None:
    engine = tiny_engine(tiny_folder, max_model_len=32)
    for bad, field in (
        (Request("a", (1,) * 32), "prompt"),
        (Request("a", (1, -1)), "prompt"),
        (Request("a", (1,) * 33, score_from=1), "prompt"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            engine.add(bad)
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.add(Request("a", (1, 2), SamplingParams(max_tokens=2)), emitted=(3, 4))
    engine.add(Request("a", (1,) * 31, GREEDY))
    with pytest.raises(InvalidRequest, match="already"):
        engine.add(Request("a", (1,), GREEDY))
    engine.add(Request("s", (1,) * 32, score_from=31))
    answers = run(engine)
    assert len(answers["a"].token_ids) == 1
    assert len(answers["s"].logprobs) == 1


def test_counts_obey_their_identities(tiny_folder: Path) -> None:
    """Emitted = rounds + accepted; no position accepts more than was drafted, nor more than the one before."""
    engine = tiny_engine(tiny_folder)
    answers = answer_all(engine, requests(SAMPLED)).values()
    stats = engine.take_stats()
    assert stats.num_emitted == sum(len(answer.token_ids) for answer in answers)
    assert stats.num_emitted == sum(len(answer.round_sizes) for answer in answers) + stats.num_accepted
    assert stats.num_drafted == sum(answer.num_drafted for answer in answers)
    assert len(stats.drafted_per_position) == len(stats.accepted_per_position) <= NGRAM.num_draft_tokens
    assert all(0 <= a <= d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True))
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    assert stats.num_drafts == stats.drafted_per_position[0]
    assert stats.num_prompt_tokens >= sum(len(prompt) for prompt in PROMPTS.values()) - len(PROMPTS)


def test_a_step_runs_on_the_engines_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own current device: an engine on another one than GPU 0 sets it wherever it computes."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    engine = markov_engine(CYCLE, drafter=NO_DRAFTS)
    engine.device = torch.device("cuda:1")  # a pretended one: nothing here launches a kernel
    engine.add(Request("request", (5, 6, 7), SamplingParams(max_tokens=4)))
    while engine.has_work:
        engine.step()
    assert len(used) > 1 and set(used) == {torch.device("cuda:1")}
    used.clear()
    for device in ("cpu", "cuda"):
        use_device(torch.device(device))
    assert not used, "`cuda` means the current device"
