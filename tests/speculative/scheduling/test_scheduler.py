"""Scheduling: budgets and limits are kept whatever comes, and no block is lost on the way."""

import random
from pathlib import Path
from typing import Any

import pytest

from speculative.config import DrafterConfig
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprobs
from speculative.scheduling.scheduler import Scheduler
from speculative.state.batch import Batch, Entry, SequenceResult, StepOutcome
from speculative.state.sequence import Phase, Sequence
from speculative.stats import StepStats
from tests.support.engines import NGRAM, NO_DRAFTS, Answer, assert_idle, markov_engine, run, settings, take, tiny_engine

CYCLE = [(token + 1) % 16 for token in range(16)]  # a model that counts
COUNTED = (*range(16), 0, 1, 2, 3)  # a prompt after which every draft survives
K = NGRAM.num_draft_tokens


def make_scheduler(*, max_model_len: int = 64, eos: tuple[int, ...] = (), **changes: Any) -> Scheduler:
    return Scheduler(settings(**changes), max_model_len, eos, StepStats())


def make_sequence(name: str, num_prompt: int, *, prefill_only_after: int | None = None, **params: Any) -> Sequence:
    score_from = params.pop("score_from", None)
    request = Request(name, tuple(range(1, num_prompt + 1)), SamplingParams(**params), seed=1, score_from=score_from)
    return Sequence(request, prefill_only_after=prefill_only_after)


def outcome_of(batch: Batch, drawn: list[SequenceResult]) -> StepOutcome:
    results = [
        one._replace(prompt_logprobs=tuple(TokenLogprobs(position, -1.0, 1) for position in range(entry.num_known)))
        if entry.sequence.scores_only
        else one
        for entry, one in zip(batch.entries, drawn, strict=True)
    ]
    return StepOutcome(tuple(results))


def advance(scheduler: Scheduler, *, accept: bool = True) -> tuple[Batch, list[TokenDelta]]:
    """One step of a model that draws token 9, and of a drafter that always drafts what fits."""
    batch = scheduler.schedule()
    assert batch is not None
    drawn = list[SequenceResult]()
    for entry in batch.entries:
        accepted = entry.max_drafts if accept else 0
        result = SequenceResult((9,) * (accepted + 1), entry.max_drafts, accepted)
        drawn.append(result if entry.samples else SequenceResult())
    return batch, scheduler.commit(batch, outcome_of(batch, drawn))


# -- any traffic ----------------------------------------------------------------------------------------------------


def random_traffic(generator: random.Random, max_model_len: int) -> list[Sequence]:
    sequences = []
    for index in range(generator.randint(1, 12)):
        num_prompt = generator.choice([1, 2, 3, 4, 5, 7, 8, 9, 16, 31, max_model_len - 1])
        score_from = generator.randint(1, num_prompt - 1) if num_prompt > 1 and generator.random() < 0.2 else None
        prefill_only_after = generator.choice([None, None, 0, 1, 3]) if score_from is None else None
        sequences.append(
            make_sequence(
                f"r{index}",
                num_prompt,
                prefill_only_after=prefill_only_after,
                score_from=score_from,
                max_tokens=generator.choice([1, 2, 5, 6, 30, 1000]),
                speculate=generator.random() < 0.8,
                ignore_eos=generator.random() < 0.5,
            )
        )
    return sequences


def check_batch(scheduler: Scheduler, batch: Batch) -> None:
    config, running = scheduler._config, scheduler._running
    assert len(running) <= config.max_num_seqs
    assert sum(entry.num_known + entry.max_drafts for entry in batch.entries) <= config.max_batched_tokens
    assert len({id(entry.sequence) for entry in batch.entries}) == len(batch.entries)
    holders = [block for sequence in (*running, *scheduler.held) for block in sequence.blocks]
    for entry in batch.entries:
        sequence = entry.sequence
        stop = sequence.num_computed + entry.num_known + entry.max_drafts
        assert entry.num_known >= 1
        assert stop <= len(sequence.blocks) * config.block_size, "a row without a slot"
        assert stop <= scheduler._max_model_len
        for block in sequence.blocks[sequence.num_computed // config.block_size :]:
            assert holders.count(block) == 1, "a block that is written to is shared"
        if entry.samples:
            assert len(sequence.tokens) + entry.max_drafts + 1 <= scheduler._max_model_len
            assert sequence.num_output + entry.max_drafts + 1 <= sequence.params.max_tokens
        if entry.max_drafts:
            assert sequence.num_output > 0
            assert sequence.params.speculate
    decoding = {id(sequence) for sequence in running if sequence.decoding}
    assert decoding <= {id(entry.sequence) for entry in batch.entries}, "a decoding sequence was left out"


class Traffic:
    """Requests that come at any time, a model and a drafter of any behaviour, exports and aborts."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.arriving = random_traffic(generator, 40)
        self.everything = tuple(self.arriving)
        self.num_emitted = {sequence.request.request_id: 0 for sequence in self.everything}
        self.ended: set[str] = set()
        max_num_seqs, block_size = generator.choice([1, 2, 5]), generator.choice([1, 3, 4, 16])
        self.scheduler = make_scheduler(
            max_model_len=40,
            eos=(13,),
            block_size=block_size,
            kv_cache_tokens=(-(-48 // block_size) + generator.choice([0, 1, 6])) * block_size,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_num_seqs * (K + 1) + generator.choice([0, 1, 11]),
            prefix_caching=generator.random() < 0.7,
        )

    def step(self) -> bool:
        """One step; False when nothing is left."""
        if self.arriving and self.generator.random() < 0.3:
            self.scheduler.add(self.arriving.pop())
        self.export()
        batch = self.scheduler.schedule()
        if batch is not None:
            check_batch(self.scheduler, batch)
            self.note(self.scheduler.commit(batch, outcome_of(batch, [self.draw(entry) for entry in batch.entries])))
        live = [*self.scheduler._running, *self.scheduler._waiting]
        if live and self.generator.random() < 0.05:
            self.end(self.generator.choice(live))
        return bool(self.arriving or self.scheduler.has_work or self.scheduler.held)

    def draw(self, entry: Entry) -> SequenceResult:
        drafted = self.generator.randint(0, entry.max_drafts)
        accepted = self.generator.randint(0, drafted)
        tokens = tuple(self.generator.randrange(14) for _ in range(accepted + 1))
        return SequenceResult(tokens, drafted, accepted) if entry.samples else SequenceResult()

    def export(self) -> None:
        for sequence in self.scheduler.held:
            assert sequence.prefill_only_after is not None
            assert sequence.num_output == sequence.prefill_only_after
            assert len(sequence.tokens) == sequence.num_computed + 1
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.ended.add(sequence.request.request_id)
        self.scheduler.release(sequence)

    def note(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ended
            assert len(delta.kinds) == len(delta.token_ids)
            assert delta.finish_reason is not FinishReason.ERROR
            self.num_emitted[delta.request_id] += len(delta.token_ids)
            if delta.finished:
                self.ended.add(delta.request_id)


@pytest.mark.parametrize("seed", range(100))
def test_any_traffic_keeps_the_rules(seed: int) -> None:
    traffic = Traffic(random.Random(seed))
    for _ in range(3000):
        if not traffic.step():
            break
    assert traffic.ended == traffic.num_emitted.keys(), "somebody was lost, or waits forever"
    assert traffic.scheduler.pool.num_free == traffic.scheduler.pool.num_blocks
    for sequence in traffic.everything:
        assert sequence.num_output == traffic.num_emitted[sequence.request.request_id] <= sequence.params.max_tokens
        assert len(sequence.tokens) <= 40


# -- budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33, 50])
def test_a_prompt_is_prefilled_in_chunks_and_draws_at_its_end_only(num_prompt: int) -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_batched_tokens=16)
    scheduler.add(make_sequence("a", num_prompt, max_tokens=2))
    sizes: list[int] = []
    while sum(sizes) < num_prompt:
        batch, deltas = advance(scheduler)
        (entry,) = batch.entries
        sizes.append(entry.num_known)
        assert entry.samples == (sum(sizes) == num_prompt) == bool(deltas)
    full, rest = divmod(num_prompt, 16)
    assert sizes == [16] * full + [rest] * (rest > 0)


def test_decoding_comes_before_drafts_and_drafts_before_prefills() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_batched_tokens=3 * (K + 1))
    scheduler.add(make_sequence("a", 4, max_tokens=40))
    scheduler.add(make_sequence("b", 4, max_tokens=40, speculate=False))
    advance(scheduler)
    scheduler.add(make_sequence("c", 30, max_tokens=4))
    batch, _ = advance(scheduler)
    shares = {entry.sequence.request.request_id: (entry.num_known, entry.max_drafts) for entry in batch.entries}
    assert shares == {"a": (1, K), "b": (1, 0), "c": (3 * (K + 1) - 2 - K, 0)}


# -- room for drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_model_len", "max_tokens"])
@pytest.mark.parametrize("distance", range(1, K + 3))
def test_drafts_fit_at_every_distance_from_a_limit(limit: str, distance: int) -> None:
    """`distance` tokens may still come: after all drafts the last of them must fit."""
    num_prompt = 20
    max_model_len = num_prompt + 1 + distance if limit == "max_model_len" else 64
    max_tokens = 1 + distance if limit == "max_tokens" else 1000
    scheduler = make_scheduler(max_model_len=max_model_len)
    scheduler.add(make_sequence("a", num_prompt, max_tokens=max_tokens))
    advance(scheduler)  # the first token
    emitted, fits = 0, []
    while scheduler.has_work:
        batch, (delta,) = advance(scheduler)
        fits.append(batch.entries[0].max_drafts)
        assert fits[-1] == min(K, distance - emitted - 1)
        emitted += len(delta.token_ids)
    assert emitted == distance
    assert delta.finish_reason is FinishReason.LENGTH
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def request(name: str, *, prompt: tuple[int, ...] = COUNTED, seed: int = 1, **params: Any) -> Request:
    return Request(name, prompt or (1,), SamplingParams(**{"temperature": 0, "ignore_eos": True, **params}), seed=seed)


def test_one_request_near_its_limit_takes_no_draft_from_others() -> None:
    engine = markov_engine(CYCLE)
    engine.add(request("near", max_tokens=2))
    engine.add(request("far", max_tokens=26))
    answers = run(engine)
    assert answers["near"].num_drafted == 0
    assert answers["far"].round_sizes == [1, 5, 5, 5, 5, 5]


def test_when_blocks_run_short_drafts_are_cut_and_nobody_is_preempted() -> None:
    scheduler = make_scheduler(block_size=1, kv_cache_tokens=16, max_model_len=16)
    scheduler.add(make_sequence("a", 6, max_tokens=9))
    scheduler.add(make_sequence("b", 4, max_tokens=3))
    advance(scheduler, accept=False)  # 10 blocks for the prompts, the pending tokens have none yet
    batch, _ = advance(scheduler, accept=False)
    assert [entry.max_drafts for entry in batch.entries] == [4, 0], "1 + 4 of the 6 blocks left, then 1"
    assert scheduler.stats.num_preemptions == 0


# -- preemption -----------------------------------------------------------------------------------------------------


def test_the_youngest_makes_way_and_comes_back_first() -> None:
    scheduler = make_scheduler(
        block_size=1, kv_cache_tokens=24, max_model_len=24, drafter=NO_DRAFTS, max_num_seqs=3, prefix_caching=False
    )
    for name in "abc":
        scheduler.add(make_sequence(name, 7, max_tokens=9))
    advance(scheduler)
    scheduler.add(make_sequence("d", 7, max_tokens=9))
    advance(scheduler)
    batch, _ = advance(scheduler)
    assert [entry.sequence.request.request_id for entry in batch.entries] == ["a", "b"]
    assert scheduler.stats.num_preemptions == 1
    waiting = list(scheduler._waiting)
    assert [sequence.request.request_id for sequence in waiting] == ["c", "d"], "it waits before those that never ran"
    assert waiting[0].phase is Phase.WAITING
    assert (waiting[0].blocks, waiting[0].num_computed, waiting[0].num_output) == ([], 0, 2)
    ended: list[str] = []
    while scheduler.has_work:
        ended += [delta.request_id for delta in advance(scheduler)[1] if delta.finished]
    assert ended == ["a", "b", "c", "d"]
    assert scheduler.pool.num_free == 24


# -- holding --------------------------------------------------------------------------------------------------------


def test_a_hold_that_the_prefix_cache_has_wholly_computed_needs_no_step() -> None:
    engine = markov_engine(CYCLE)
    prompt = COUNTED[:17]  # 16 tokens to compute: four blocks
    for name in ("a", "b"):
        engine.add(request(name, prompt=prompt), prefill_only_after=0)
        assert not engine.step()
        assert name in engine.held_ids
    assert engine.stats.num_steps == 1
    assert engine.usage().num_free_blocks == engine.usage().num_blocks - 4 - 2
    for name in engine.held_ids:
        assert engine.abort(name) and not engine.abort(name)
    assert_idle(engine)


def test_a_request_that_ends_before_its_hold_is_not_held() -> None:
    engine = markov_engine(CYCLE)
    engine.add(request("a", max_tokens=1), prefill_only_after=1)
    engine.add(request("b", stop_token_ids=(4,)), prefill_only_after=1)
    answers = run(engine)
    assert answers["a"].finish_reason is FinishReason.LENGTH
    assert answers["b"].finish_reason is FinishReason.STOP
    assert_idle(engine)


def test_a_resumed_request_that_is_past_its_hold_is_held_at_once() -> None:
    engine = markov_engine(CYCLE)
    engine.add(request("a", max_tokens=30), prefill_only_after=1, emitted=(4, 5, 6))
    assert not run(engine)
    assert engine.held_ids == ("a",)


# -- scoring --------------------------------------------------------------------------------------------------------


def test_scoring_under_way_leaves_the_budget_to_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_batched_tokens=16)
    scheduler.add(make_sequence("s", 60, score_from=2))
    advance(scheduler)
    scheduler.add(make_sequence("a", 12, max_tokens=9))
    batch, deltas = advance(scheduler)
    known = {entry.sequence.request.request_id: entry.num_known for entry in batch.entries}
    assert known == {"a": 12, "s": 4}
    assert [delta.request_id for delta in deltas] == ["a"]


def test_scoring_is_done_in_parts_while_anybody_decodes() -> None:
    def parts(*, beside: bool) -> list[int]:
        scheduler = make_scheduler(max_model_len=1000, max_num_seqs=4, max_batched_tokens=600, kv_cache_tokens=4096)
        if beside:
            scheduler.add(make_sequence("a", 3, max_tokens=99))
            advance(scheduler)
        for name in "st":
            scheduler.add(make_sequence(name, 400, score_from=2))
        batches = [advance(scheduler)[0] for _ in range(4 if beside else 2)]
        return [sum(entry.num_known for entry in batch.entries if entry.sequence.scores_only) for batch in batches]

    assert parts(beside=True) == [256, 256, 256, 30], "both together"
    assert parts(beside=False) == [600, 198]


@pytest.mark.parametrize("score_from", [1, 9, 51])
def test_scoring_that_was_preempted_scores_every_token_once(tiny_folder: Path, score_from: int) -> None:
    text = tuple((11 * i * i + 5) % 61 for i in range(52))
    scoring = Request("s", text, score_from=score_from)
    tight = tiny_engine(
        tiny_folder, kv_cache_tokens=64, max_num_seqs=2, max_batched_tokens=4, drafter=DrafterConfig(num_draft_tokens=1)
    )
    tight.add(request("a", prompt=(5, 9, 5, 9, 1), max_tokens=30))
    tight.step()
    tight.add(scoring)
    while tight.stats.num_preemptions == 0:
        tight.step()
    (waiting,) = tight.scheduler._waiting
    assert waiting.request is scoring
    answers = run(tight)
    roomy = tiny_engine(tiny_folder)
    roomy.add(scoring)
    undisturbed = run(roomy)["s"]
    assert [entry.token_id for entry in answers["s"].logprobs] == list(text[score_from:])
    assert answers["s"].values == pytest.approx(undisturbed.values, abs=1e-4)
    assert_idle(tight)


# -- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop_token_ids", "eos"])
@pytest.mark.parametrize("stop", range(4, 15))
def test_a_stop_inside_an_accepted_run_ends_the_text_there(how: str, stop: int) -> None:
    """After the first token, rounds of five: the stop falls on each place of a run in turn."""
    engine = markov_engine(CYCLE, eos=(stop,) if how == "eos" else ())
    stops = (stop,) if how == "stop_token_ids" else ()
    engine.add(request("a", max_tokens=40, stop_token_ids=stops, ignore_eos=False, logprobs=2))
    answer = run(engine)["a"]
    assert answer.token_ids == list(range(4, stop + 1))
    assert len(answer.logprobs) == len(answer.token_ids)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_token_id == stop
    cut = stop > 4 and answer.round_sizes[-1] < 1 + K  # a run cut short has no token drawn after it
    assert answer.num_accepted == len(answer.token_ids) - len(answer.round_sizes) + cut
    assert_idle(engine)


def test_what_follows_a_stop_is_not_published_or_counted() -> None:
    engine = markov_engine(CYCLE, block_size=1)
    engine.add(request("a", max_tokens=40, stop_token_ids=(6,)))
    answers = {"a": Answer()}
    take(answers, engine.step())
    take(answers, engine.step())
    assert answers["a"].token_ids == [4, 5, 6]
    assert engine.stats.num_emitted == 3
    assert len(engine.scheduler.pool._block_of) == len(COUNTED) + 2, "the prompt and what precedes the stop"
    assert_idle(engine)


# -- prefix cache ---------------------------------------------------------------------------------------------------


def test_resumed_requests_count_no_more_cached_tokens_than_the_prompt_has() -> None:
    engine = markov_engine(CYCLE, block_size=2)
    prompt, emitted = (0, 1, 2, 3), tuple(range(4, 12))
    engine.add(request("a", prompt=prompt + emitted, max_tokens=2))
    run(engine)
    engine.take_stats()
    engine.add(request("b", prompt=prompt, max_tokens=12), emitted=emitted)
    answer = run(engine)["b"]
    assert answer.num_cached_tokens == 4
    stats = engine.take_stats()
    assert stats.prefix_cache_hits <= stats.prefix_cache_queries


def test_replays_are_counted_apart_from_what_clients_wait_for() -> None:
    scheduler = make_scheduler(max_num_seqs=4, drafter=NO_DRAFTS)
    for number in range(3):
        scheduler.add(make_sequence(f"client {number}", 6))
    scheduler.add(make_sequence("a client's labels", 6, score_from=2))
    for number in range(2):
        replay = Request(f"replay-{number}", tuple(range(1, 7)), seed=1, score_from=3, replay=True)
        scheduler.add(Sequence(replay))
    usage = scheduler.usage()
    assert (usage.num_running, usage.num_waiting, usage.num_replays) == (0, 4, 2)
    advance(scheduler)
    usage = scheduler.usage()
    assert (usage.num_running, usage.num_waiting, usage.num_replays) == (3, 0, 2), "the labels are done"
    assert scheduler.is_running
