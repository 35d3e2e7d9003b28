"""Where tokens come from when a prefill pool is there: what is reported once, what is never handed off, what falls
back."""

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.backends.base import Handoff, Prefilled, is_taken_in
from serve_app.backends.torch_backend import TorchBackend
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.strata import STRATA
from serve_app.referee.records.records import Record, Records
from serve_app.referee.records.replay_selection import Selection
from serve_app.streams.backlog import Backlog
from serve_app.streams.observed import ObservedSource, WeightAges
from serve_app.streams.pooled import HandoffRoom, PooledTokenSource, PoolFull, PrefillPatience
from serve_app.telemetry.metric_names import WEIGHT_AGES
from serve_app.telemetry.metrics import BufferSink, Metrics
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import Request, SamplingParams, TokenDelta
from tests.support.clock import Clock
from tests.support.engines import settings
from tests.support.fake_serving import until_idle
from tests.support.front_ends import observed
from tests.support.tiny_models import write_tiny_model

PROMPT = tuple(range(3, 20))
ASKING = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2)
PLAIN = SamplingParams(max_tokens=6, ignore_eos=True)


class Pools:
    """Two engines, as a prefill and a decode replica, and what the prefill was asked for."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = (TorchBackend(str(folder), "tiny", settings()) for _ in range(2))
        self.asked: list[tuple[Request, bool]] = []
        self.damaged = False
        self.failures: list[Exception | None] = []  # of the first attempts; None = it never answers
        self.given_up: list[str] = []
        self.sink = BufferSink("test")
        self.metrics = Metrics(self.sink, model_name="tiny", pool="decode")
        self.records = Records("decode-1", 512)
        self.source = PooledTokenSource(self.decode, self.metrics, self._ask, self.records.handed_off)

    async def _ask(self, request: Request, first_token: bool) -> Prefilled:
        self.asked.append((request, first_token))
        if len(self.asked) <= len(self.failures):
            await self._fail(request, self.failures[len(self.asked) - 1])
        prefilled = dataclasses.replace(
            await self.prefill.prefill(request, first_token=first_token), replica="prefill-1"
        )
        if self.damaged and prefilled.handoff is not None:
            prefilled.handoff[-20] ^= 1
        return prefilled

    async def _fail(self, request: Request, error: Exception | None) -> None:
        if error is not None:
            raise error
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.append(request.request_id)

    def counted(self) -> dict[tuple[str, str], float]:
        """Failed prefills by reason and handoffs by result, since the last time."""
        names = ("truespec_prefill_failures_total", "truespec_handoffs_total")
        counters = self.sink.drain().counters.items()
        return {(name.split("_")[1], labels[-1]): value for (name, labels), value in counters if name in names}

    async def stream(self, *requests: Request) -> list[TokenDelta]:
        return [delta async for delta in self.source.stream(requests) if not is_taken_in(delta)]


@pytest_asyncio.fixture
async def pools(folder: Path) -> AsyncIterator[Pools]:
    both = Pools(folder)
    await both.prefill.start()
    await both.decode.start()
    yield both
    await both.prefill.stop()
    await both.decode.stop()


def text_of(deltas: Sequence[TokenDelta], name: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == name for token in delta.token_ids]


@pytest.mark.parametrize("damaged", [False, True], ids=["handed off", "refused"])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("num_prompt", [1, 2, len(PROMPT)])
async def test_a_prompt_is_reported_once_and_first(
    pools: Pools, damaged: bool, num_choices: int, num_prompt: int
) -> None:
    pools.damaged = damaged
    prompt = PROMPT[:num_prompt]
    requests = [Request(f"c{index}", prompt, PLAIN if index else ASKING, index) for index in range(num_choices)]
    deltas = await pools.stream(*requests)
    own = [delta for delta in deltas if delta.request_id == "c0"]
    assert [delta.prompt_logprobs is not None for delta in own] == [True] + [False] * (len(own) - 1)
    assert [entry.token_id for entry in own[0].prompt_logprobs or ()] == list(prompt[1:])
    assert all(delta.prompt_logprobs is None for delta in deltas if delta.request_id != "c0")
    assert [first for _, first in pools.asked] == [num_choices == 1]
    for request in requests:
        alone = [delta async for delta in pools.decode.generate(request)]
        assert text_of(deltas, request.request_id) == text_of(alone, request.request_id)


async def test_a_rollout_group_is_computed_once_and_inserted_many_times(pools: Pools) -> None:
    """Of more choices than the engine runs at once."""
    group = [Request(f"c{index}", PROMPT, PLAIN, seed=index) for index in range(24)]
    deltas = await pools.stream(*group)
    answers = [tuple(text_of(deltas, one.request_id)) for one in group]
    assert {len(tokens) for tokens in answers} == {6} and len(set(answers)) > 12
    assert len(pools.asked) == 1 and pools.counted() == {("handoffs", "ok"): 24}
    assert pools.prefill.take_stats().num_prompt_tokens == len(PROMPT) - 1
    assert pools.decode.take_stats().num_prompt_tokens == 0, "a choice had the prompt computed again"


async def test_a_handoff_from_before_an_update_is_refused_and_computed_with_the_new_weights(
    pools: Pools, tmp_path: Path
) -> None:
    new = str(write_tiny_model(tmp_path / "new", seed=9))
    for engine, versions, handoff in ((pools.decode, ["default", "v1"], "refused"), (pools.prefill, ["v1"], "ok")):
        await engine.load_weights(new)
        await engine.switch_weights("v1")
        deltas = await pools.stream(Request("c0", PROMPT, PLAIN, seed=1))
        assert list(dict.fromkeys(delta.weight_version for delta in deltas)) == versions
        assert pools.counted() == {("handoffs", handoff): 1}


GONE, BROKEN, FULL = ConnectionError("killed"), EngineFault("its engine stopped"), PoolFull("no room")


@pytest.mark.parametrize(
    ("failures", "asked", "counted"),
    [
        ([GONE], ["c0", "c0~1"], {("prefill", "died"): 1, ("handoffs", "ok"): 1}),
        ([BROKEN, GONE], ["c0", "c0~1", "c0~2"],
         {("prefill", "engine"): 1, ("prefill", "died"): 1, ("handoffs", "ok"): 1}),
        ([GONE] * 3, ["c0", "c0~1", "c0~2"], {("prefill", "died"): 3, ("handoffs", "failed"): 1}),
        ([FULL], ["c0"], {("prefill", "full"): 1, ("handoffs", "failed"): 1}),
    ],
    ids=["another replica", "the third replica", "none in the end", "a full pool"],
)  # fmt: skip
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_prefill_that_fails_is_asked_for_again_and_then_done_here(
    pools: Pools,
    failures: list[Exception | None],
    asked: list[str],
    counted: dict[tuple[str, str], int],
    num_choices: int,
) -> None:
    requests = [Request(f"c{index}", PROMPT, PLAIN if index else ASKING, index) for index in range(num_choices)]
    pools.failures = failures
    deltas = await pools.stream(*requests)
    assert [request.request_id for request, _ in pools.asked] == asked
    expected = {key: value * (num_choices if key == ("handoffs", "ok") else 1) for key, value in counted.items()}
    assert pools.counted() == expected
    assert [delta.prompt_logprobs is not None for delta in deltas if delta.request_id == "c0"].count(True) == 1
    for request in requests:
        alone = [delta async for delta in pools.decode.generate(request)]
        assert text_of(deltas, request.request_id) == text_of(alone, request.request_id)
    await until_idle((pools.prefill, pools.decode))


async def test_a_prefill_that_never_answers_is_given_up(pools: Pools) -> None:
    patience = PrefillPatience(timeout_s=0.02, retries=1, first_pace=1e6)
    source = PooledTokenSource(pools.decode, pools.metrics, pools._ask, pools.records.handed_off, patience)
    pools.failures = [None] * 2
    deltas = [delta async for delta in source.stream([Request("c0", PROMPT, PLAIN, 1)])]
    assert len(text_of(deltas, "c0")) == 6
    assert pools.given_up == ["c0", "c0~1"]
    assert pools.counted() == {("prefill", "timeout"): 2, ("handoffs", "failed"): 1}


def test_patience_follows_the_prompts_and_the_measured_pace() -> None:
    clock, patience = Clock(), PrefillPatience(timeout_s=60, first_pace=32)
    backlog = Backlog(clock)
    first = backlog.join(4096)
    assert patience.attempt_s(backlog) == 60 + 2 * 4096 / 32, "nothing is measured yet"
    clock.now += 200
    first.close(served=True)
    second = backlog.join(4096)
    assert patience.attempt_s(backlog) > 200, "a pool this slow is not given up sooner than it needs"
    backlog.join(4096)
    assert patience.attempt_s(backlog) > 400, "nor is the one behind it"
    clock.now += 1
    second.close(served=True)
    assert patience.attempt_s(backlog) < 400, "it has become faster"


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_what_an_attempt_left_in_the_cache_is_no_cache_hit_of_the_next(pools: Pools, num_choices: int) -> None:
    prompt = tuple(range(3, 60))

    async def lose_the_first(request: Request, first_token: bool) -> Prefilled:
        prefilled = await pools._ask(request, first_token)
        if len(pools.asked) == 1:
            raise GONE
        return prefilled

    source = PooledTokenSource(pools.decode, pools.metrics, lose_the_first, pools.records.handed_off)
    for expects_hits in (False, True):
        requests = [Request(f"c{index}", prompt, PLAIN, index) for index in range(num_choices)]
        deltas = [delta async for delta in source.stream(requests)]
        cached = max(delta.num_cached_tokens for delta in deltas)
        assert (cached > 0) == expects_hits
    assert [request.request_id for request, _ in pools.asked] == ["c0", "c0~1", "c0"]


async def test_a_request_that_no_engine_would_take_is_not_tried_elsewhere(pools: Pools) -> None:
    pools.failures = [InvalidRequest("prompt", "no")]
    with pytest.raises(InvalidRequest):
        await pools.stream(Request("c0", PROMPT, PLAIN, 1))
    assert len(pools.asked) == 1


async def test_a_handoff_is_let_go_once_the_engine_has_all_choices_of_it(pools: Pools) -> None:
    made: list[weakref.ref[Handoff]] = []

    async def ask(request: Request, first_token: bool) -> Prefilled:
        prefilled = await pools.prefill.prefill(request, first_token=first_token)
        assert prefilled.handoff is not None
        made.append(weakref.ref(prefilled.handoff))
        return dataclasses.replace(prefilled, replica="prefill-1")

    source = PooledTokenSource(pools.decode, pools.metrics, ask)
    asked, begun = dataclasses.replace(PLAIN, max_tokens=12), set()
    async for delta in source.stream([Request(name, PROMPT, asked, 1) for name in ("c0", "c1")]):
        begun.add(delta.request_id)
        if len(delta.token_ids) and begun == {"c0", "c1"} and not delta.finished:
            await asyncio.sleep(0.05)
            alive = [ref() is not None for ref in made]
    assert alive == [False]


class Counting:
    """A prefill pool that notes how many handoffs of its are held, and on their way, whenever it is asked."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.made: list[weakref.ref[Handoff]] = []
        self.num_bytes = 0
        self.on_their_way = 0
        self.most: list[int] = []
        self.num_failing = 0

    async def ask(self, request: Request, first_token: bool) -> Prefilled:
        self.on_their_way += 1
        self.most.append(self.on_their_way + sum(ref() is not None for ref in self.made))
        try:
            if len(self.most) <= self.num_failing:
                raise ConnectionError("killed")
            prefilled = await self.pools._ask(request, first_token)
        finally:
            self.on_their_way -= 1
        if prefilled.handoff is not None:
            self.made.append(weakref.ref(prefilled.handoff))
            self.num_bytes = prefilled.handoff.nbytes
        return prefilled


async def answers(source: PooledTokenSource, requests: Sequence[Request]) -> list[list[TokenDelta]]:
    async def one(request: Request) -> list[TokenDelta]:
        return [delta async for delta in source.stream([request])]

    return list(await asyncio.gather(*(one(request) for request in requests)))


@pytest.mark.parametrize("room", [0.5, 2.5])
async def test_handoffs_take_no_more_than_their_room_and_every_request_is_answered(pools: Pools, room: float) -> None:
    """In Ray's object store one is held, on both nodes, for as long as anything here refers to it."""
    counting = Counting(pools)
    await answers(PooledTokenSource(pools.decode, pools.metrics, counting.ask), [Request("m", PROMPT, PLAIN, 1)])
    requests = [Request(f"r{index}", (*PROMPT[:-1], index), PLAIN, index) for index in range(12)]
    counting.most.clear()
    counting.made.clear()  # the engine's thread may still hold the first one, which took nothing of this room
    counting.num_failing = 2  # which hold nothing any more
    most = HandoffRoom(int(room * counting.num_bytes))
    found = await answers(PooledTokenSource(pools.decode, pools.metrics, counting.ask, room=most), requests)
    assert counting.most[0] == 1 and max(counting.most[1:]) == max(1, int(room)), "the first shows how large they are"
    for request, deltas in zip(requests, found, strict=True):
        alone = [delta async for delta in pools.decode.generate(request)]
        assert text_of(deltas, request.request_id) == text_of(alone, request.request_id)


async def test_whoever_leaves_while_it_waits_for_room_holds_up_nobody(pools: Pools) -> None:
    counting = Counting(pools)
    source = PooledTokenSource(pools.decode, pools.metrics, counting.ask, room=HandoffRoom(1))
    pools.failures = [None]  # the first is never answered
    waiting = [
        asyncio.ensure_future(answers(source, [Request(name, PROMPT, PLAIN, 1)])) for name in ("first", "gone", "last")
    ]
    await asyncio.sleep(0.05)
    assert len(pools.asked) == 1
    waiting[1].cancel()
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    (deltas,) = await waiting[2]
    assert pools.given_up == ["first"], "its client has left"
    assert deltas[-1].finished and [request.request_id for request, _ in pools.asked] == ["first", "last"]


async def test_a_prompt_that_finds_no_room_is_computed_here(pools: Pools) -> None:
    room, patience = HandoffRoom(1), PrefillPatience(timeout_s=0.05, first_pace=1e6)
    await room.take("for ever", 1)
    source = PooledTokenSource(pools.decode, pools.metrics, pools._ask, patience=patience, room=room)
    (deltas,) = await answers(source, [Request("r", PROMPT, PLAIN, 1)])
    assert deltas[-1].finished and not pools.asked
    assert pools.counted() == {("prefill", "full"): 1, ("handoffs", "failed"): 1}


# -- and what is watched --------------------------------------------------------------------------------------------


def selected(request: Request) -> Selection:
    """Whether and how a request is checked, by its name here."""
    named = {"counted": Selection.AS_SENT, "left as it is": Selection.AS_SENT, "passed over": Selection.NOT_CHECKED}
    return named.get(request.request_id, Selection.WITH_LOGPROBS)


def watched(
    pools: Pools, ended: list[tuple[Record, Answer | None]], select: Callable[[Request], Selection] = selected
) -> ObservedSource:
    def note(record: Record, checked: bool) -> None:
        ended.append((record, record.answer() if checked else None))

    return observed(pools.source, pools.metrics, records=pools.records, select=select, ended=note)


@pytest.mark.parametrize("selection", [Selection.NOT_CHECKED, Selection.AS_SENT])
async def test_acceptance_is_counted_by_the_rounds_since_the_handoff(pools: Pools, selection: Selection) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    source = watched(pools, [], lambda _: selection)
    deltas = [delta async for delta in source.stream([Request("r1", PROMPT, params, 1)])]
    names = ("0", "1", *["2_3"] * 2, *["4_7"] * 4, *["8_up"] * 80)
    rounds = [delta for delta in deltas if delta.token_ids and not delta.prefilled_by]
    expected: dict[str, list[int]] = {}
    for name, delta in zip(names, rounds, strict=False):
        if delta.num_drafted:
            sums = expected.setdefault(name, [0, 0])
            sums[0] += delta.num_drafted
            sums[1] += delta.num_accepted
    assert len(expected) > 1
    counters = pools.sink.drain().counters
    for index, what in enumerate(("draft", "accepted")):
        name = f"truespec_{what}_tokens_since_handoff_total"
        counted = {labels[2]: value for (metric, labels), value in counters.items() if metric == name}
        assert counted == {age: sums[index] for age, sums in expected.items()}


def test_the_age_of_weights_has_three_values_whatever_number_of_updates_there_are() -> None:
    ages = WeightAges()
    assert ages.age("v0") == "current"
    assert [ages.age(version) for version in ("v1", "v0", "v1", "v2", "v1", "v0")] == (
        ["current", "previous", "current", "current", "previous", "older"]
    )
    seen = {ages.age(f"v{update - late}") for update in range(3, 1000) for late in (0, 1, 2)}
    assert seen == set(WEIGHT_AGES)
    assert ages.age("v999") == "current"


async def test_logprobs_that_were_asked_for_in_any_way_are_passed_on(pools: Pools) -> None:
    ended: list[tuple[Record, Answer | None]] = []
    source = watched(pools, ended)
    asked = {
        "plain": PLAIN,
        "scored": SamplingParams(max_tokens=6, ignore_eos=True, logprob_token_ids=(3, 9)),
        "counted": SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1),
        "left as it is": PLAIN,
        "passed over": PLAIN,
    }
    for name, params in asked.items():
        deltas = [delta async for delta in source.stream([Request(name, PROMPT, params, 1)])]
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        assert len(entries) == (0 if params is PLAIN else 6)
        assert all(len(entry.scored) == 2 * (name == "scored") for entry in entries)
    assert [record.request.request_id for record, _ in ended] == list(asked)
    assert [None if answer is None else len(answer.logprobs) for _, answer in ended] == [6, 6, 6, 0, None]


async def test_an_answer_of_one_token_is_the_prefill_replicas(pools: Pools) -> None:
    ended: list[tuple[Record, Answer | None]] = []
    request = Request("r", (7, 8, 9), dataclasses.replace(ASKING, max_tokens=1), 1)
    first, *deltas = [delta async for delta in watched(pools, ended).stream([request])]
    assert is_taken_in(first) and len(deltas) == 1
    ((_, answer),) = ended
    assert answer is not None
    assert (answer.replica, answer.prefilled_by, answer.made_by) == ("decode-1", "prefill-1", ("prefill-1",))


@pytest.mark.parametrize("damaged", [False, True], ids=["handed off", "refused"])
async def test_what_is_to_be_replayed_reports_how_each_token_was_made(pools: Pools, damaged: bool) -> None:
    pools.damaged = damaged
    ended: list[tuple[Record, Answer | None]] = []
    request = Request("r", (7, 8, 9) * 6, dataclasses.replace(ASKING, temperature=0.0, max_tokens=30), 1)
    _, *deltas = [delta async for delta in watched(pools, ended).stream([request])]
    ((_, answer),) = ended
    assert answer is not None
    assert (answer.replica, answer.prefilled_by, answer.prompt_scored_by) == ("decode-1", "prefill-1", "prefill-1")
    assert answer.made_by == ("prefill-1", *["decode-1"] * 29)
    assert list(answer.token_ids) == text_of(deltas, "r")
    assert len(answer.prompt_logprobs) == 17
    assert answer.num_drafted == sum(delta.num_drafted for delta in deltas)
    rounds = [number for number, delta in enumerate(deltas[1:]) for _ in delta.token_ids]
    assert list(answer.rounds_since_handoff) == ([None] * 30 if damaged else [None, *rounds])
    strata = answer.strata
    assert len(strata) == 30
    assert strata[0][-2:] == ("first", "no_handoff")
    assert ("handoff_0" in strata[1]) == (not damaged)
    assert all("greedy" in names and "all" in names for names in strata)
    assert set().union(*strata) <= set(STRATA)


async def test_a_teacher_forced_request_stays_here_and_is_not_replayed(pools: Pools) -> None:
    ended: list[tuple[Record, Answer | None]] = []
    _, *deltas = [delta async for delta in watched(pools, ended).stream([Request("score", PROMPT, score_from=4)])]
    assert [entry.token_id for entry in deltas[0].logprobs or ()] == list(PROMPT[4:])
    assert pools.asked == [] and ended == []
