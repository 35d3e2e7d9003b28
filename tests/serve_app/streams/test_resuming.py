"""Replicas die in the middle of streams, and the streams go on: nothing comes twice, nothing is missing.

The engines are real, the deaths are not: a replica that dies stops telling, after any number of messages.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.errors import RequestAborted, UnsupportedParameter, reply_for
from serve_app.openai.asked import Limits
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.records.records import Records
from serve_app.streams.pooled import PooledTokenSource
from serve_app.streams.resuming import ReplicaLost, ResumingSource, Streamed, with_signs_of_life
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault, EngineOverloaded
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprobs
from tests.support.backend_conformance import tokens as tokens_of
from tests.support.engines import settings
from tests.support.fake_serving import make_backend, until_idle
from tests.support.front_ends import completion, reply_to
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NEVER = 10**9
LOOPING = "one two three one two three one two"


class Replicas:
    """Engines that are asked in turn; call number i dies after `deaths[i]` deltas, and those in `full` find no room."""

    def __init__(self, sources: Sequence[PooledTokenSource], deaths: Sequence[int] = ()) -> None:
        self.sources = sources
        self.deaths = list(deaths)
        self.death: Exception = ReplicaLost("it was killed")
        self.full: Sequence[int] = ()
        self.calls: list[tuple[list[str], Mapping[str, tuple[int, ...]]]] = []
        self.aborted: list[str] = []

    async def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        number = len(self.calls)
        self.calls.append(([one.request_id for one in requests], dict(emitted)))
        if number in self.full:
            raise EngineOverloaded("All replicas are busy. Retry later.", retry_after_s=7.0)
        left = self.deaths[number] if number < len(self.deaths) else NEVER
        source = self.sources[number % len(self.sources)]
        tokens = source.go_on(requests, emitted) if emitted else source.stream(requests)
        async with contextlib.aclosing(tokens) as deltas:
            async for delta in deltas:
                if left == 0:
                    raise self.death
                left -= 1
                yield Streamed(delta, f"decode-{number}", "prefill-1" if not emitted and number == 0 else None)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        for source in self.sources:
            await source.abort(request_id)


class Service:
    """A front end over engines that may die, and one over the same engines that do not."""

    def __init__(self, engines: Sequence[TorchBackend], tokenizer: Tokenizer, info: Any) -> None:
        self.sink = BufferSink("router")
        self.metrics = Metrics(self.sink, model_name="tiny", pool="router")
        self.records = Records("router", info.max_model_len)
        self.sources = [PooledTokenSource(engine, self.metrics) for engine in engines]
        self.tokenizer, self.info, self.engines = tokenizer, info, engines

    def over(self, deaths: Sequence[int], **limits: Any) -> tuple[FrontEnd, Replicas]:
        pool = Replicas(self.sources, deaths)
        source = ResumingSource(pool, self.metrics, self.records, most_resumes=4, pause_s=0)
        return FrontEnd(source, self.tokenizer, self.info, Limits(**{"resumes": True, **limits})), pool

    async def answer(self, deaths: Sequence[int], body: dict[str, Any]) -> tuple[dict[str, Any], Replicas]:
        front, pool = self.over(deaths)
        return await front.collect(await front.prepare(wire(body))), pool

    def counted(self, result: str) -> float:
        series = ("truespec_resumes_total", ("tiny", "router", result))
        return self.sink.drain().counters.get(series, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    folder = write_tiny_model(tmp_path_factory.mktemp("resumed"), tokenizer=True)
    engines = [TorchBackend(str(folder), "tiny", settings(), load_engine) for _ in range(2)]
    infos = [await engine.start() for engine in engines]
    yield Service(engines, Tokenizer.from_folder(folder), infos[0])
    for engine in engines:
        await engine.stop()


def wire(body: dict[str, Any]) -> CompletionRequest:
    return completion(model="tiny", prompt=LOOPING, seed=3, **body)


def reported(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """What does not hang on how tokens were drafted: texts, ids, reasons, and logprobs as far as float32 goes."""
    choices = json.loads(json.dumps(reply["choices"]), parse_float=lambda number: round(float(number), 3))
    return list(choices)


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "sampled": {"temperature": 1.2, "max_tokens": 24, "ignore_eos": True},
    "logprobs": {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True},
    "penalties": {
        **{"max_tokens": 16, "ignore_eos": True, "min_tokens": 9, "bad_words": ["a", "one"]},
        **{"presence_penalty": 1.5, "repetition_penalty": 1.3},
    },
    "grammar": {"max_tokens": 30, "structured_outputs": {"regex": "(red|green|blue)( [0-9]{3}){3}"}},
    "choices": {"temperature": 1.1, "max_tokens": 10, "n": 3, "ignore_eos": True},
}


@pytest.mark.parametrize("kind", BODIES)
async def test_wherever_the_replica_dies_the_answer_is_the_same(service: Service, kind: str) -> None:
    body = {"reproducible": True, "return_token_ids": True, **BODIES[kind]}
    undisturbed, pool = await service.answer((), body)
    assert len(pool.calls) == 1
    num_deltas = await _num_deltas(service, body)
    assert num_deltas > 3
    for death in range(num_deltas):
        service.counted("resumed")
        reply, pool = await service.answer([death], body)
        assert reported(reply) == reported(undisturbed)
        assert reply["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
        (first, _), (second, emitted) = pool.calls
        assert len(second) <= len(first) and all(name.endswith("~1") for name in second)
        assert sum(map(len, emitted.values())) < reply["usage"]["completion_tokens"]
        assert service.counted("resumed") == len(second)
    await until_idle(service.engines)


async def _num_deltas(service: Service, body: dict[str, Any]) -> int:
    front, _ = service.over(())
    job = await front.prepare(wire(body))
    return len([None async for _ in service.sources[0].stream(job.groups[0])])


async def test_without_reproducible_nothing_is_lost_or_repeated_either(service: Service) -> None:
    body = {"return_token_ids": True, "max_tokens": 24, "ignore_eos": True, "temperature": 1.0}
    for death in range(6):
        reply, pool = await service.answer([death], body)
        (choice,) = reply["choices"]
        assert len(choice["token_ids"]) == 24
        (_, emitted) = pool.calls[1]
        kept = next(iter(emitted.values()))
        assert tuple(choice["token_ids"][: len(kept)]) == kept
        assert choice["text"] == service.tokenizer.decode(choice["token_ids"], continuation=True)


async def test_a_request_that_is_not_to_be_resumed_ends_with_its_replica(service: Service) -> None:
    service.counted("failed")
    with pytest.raises(RequestAborted) as caught:
        await service.answer([2], {"resume": False, "max_tokens": 24, "ignore_eos": True})
    assert reply_for(caught.value).status == 503
    assert service.counted("failed") == 1


async def test_an_engine_that_stopped_is_left_for_another(service: Service) -> None:
    """As when a replica's engine thread is dead, and Serve has not yet seen it."""
    body = {"reproducible": True, "return_token_ids": True, "max_tokens": 12, "ignore_eos": True}
    undisturbed, _ = await service.answer((), body)
    front, pool = service.over([0, 3])
    pool.death = EngineFault("The engine stopped.")
    assert reported(await front.collect(await front.prepare(wire(body)))) == reported(undisturbed)
    front, pool = service.over([0])
    pool.death = EngineFault("The engine stopped.")
    with pytest.raises(EngineFault):
        await front.collect(await front.prepare(wire({"resume": False})))


async def test_a_request_is_not_resumed_for_ever(service: Service) -> None:
    service.sink.drain()
    with pytest.raises(RequestAborted, match="killed"):
        await service.answer([0] * 9, {"max_tokens": 24})
    batch = service.sink.drain()
    counts = {labels[-1]: value for (name, labels), value in batch.counters.items() if name.endswith("resumes_total")}
    assert counts == {"resumed": 4, "failed": 1}


async def test_one_that_lost_its_replica_waits_for_room_at_the_others(service: Service) -> None:
    body = {"reproducible": True, "return_token_ids": True, "max_tokens": 24, "ignore_eos": True}
    undisturbed, _ = await service.answer((), body)
    service.counted("resumed")
    front, pool = service.over([3, 0, 0, 2])
    pool.full = (1, 2)
    assert reported(await front.collect(await front.prepare(wire(body)))) == reported(undisturbed)
    lengths = [sum(map(len, emitted.values())) for _, emitted in pool.calls]
    assert 0 == lengths[0] < lengths[1] == lengths[2] == lengths[3] < lengths[4]
    assert service.counted("resumed") == 4, "a try counts, as with a replica that dies at once"


@pytest.mark.parametrize(("deaths", "full", "num_calls"), [((), (0,), 1), ((2,), range(1, 9), 5)], ids=["first", "all"])
async def test_where_there_is_no_room_the_client_hears_when_to_come_again(
    service: Service, deaths: Sequence[int], full: Sequence[int], num_calls: int
) -> None:
    front, pool = service.over(deaths)
    pool.full = full
    with pytest.raises(EngineOverloaded) as caught:
        await front.collect(await front.prepare(wire({"max_tokens": 24, "ignore_eos": True})))
    assert len(pool.calls) == num_calls, "nobody is resumed more than four times"
    assert reply_for(caught.value).headers == {"retry-after": "7"}


async def test_without_a_router_resume_is_refused(service: Service) -> None:
    front, _ = service.over((), resumes=None)
    with pytest.raises(UnsupportedParameter, match=r"pools\.router"):
        await front.prepare(wire({"resume": True}))
    await front.prepare(wire({"resume": False}))


async def test_one_choice_is_aborted_where_it_runs_now(service: Service) -> None:
    pool = Replicas(service.sources, [4])
    source = ResumingSource(pool, service.metrics, service.records, most_resumes=4, pause_s=0)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    group = [Request(f"c{index}", (5, 6, 7, 8), params, seed=index, resume=True) for index in range(3)]
    tokens: dict[str, int] = dict.fromkeys(("c0", "c1", "c2"), 0)
    async with contextlib.aclosing(source.stream(group)) as deltas:
        async for delta in deltas:
            tokens[delta.request_id] += len(delta.token_ids)
            if len(pool.calls) == 2 and not pool.aborted:
                await source.abort("c1")
    assert pool.aborted == ["c1~1"]
    assert tokens["c0"] == tokens["c2"] == 60 > tokens["c1"]
    await until_idle(service.engines)


async def test_the_record_reports_who_answered_and_what_was_computed_again(service: Service) -> None:
    source = ResumingSource(Replicas(service.sources, [3]), service.metrics, service.records, most_resumes=1, pause_s=0)
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0)
    request = Request("r", (5, 6, 7, 8), params, seed=1, resume=True)
    record = service.records.begin(request)
    seen: list[tuple[str, str]] = []
    async with contextlib.aclosing(source.stream([request])) as deltas:
        async for delta in deltas:
            record.take(delta)
            seen.append((record.replica, record.prefilled_by))
    service.records.end("r")
    assert list(dict.fromkeys(seen)) == [("decode-0", "prefill-1"), ("decode-1", "")]
    answer = record.answer()
    assert answer is not None and len(answer.token_ids) == 20
    moved = [("preempted" in strata) for strata in answer.strata]
    assert moved == sorted(moved) and any(moved) and not all(moved)
    assert [since is None for since in answer.rounds_since_handoff] == moved


class Hanging:
    """A pool whose first replica hangs after a token: it is not dead, and says nothing any more. `signs` of life come
    before the last token of the second one."""

    def __init__(self, signs: int = 0) -> None:
        self.avoided: list[Sequence[str]] = []
        self._signs = signs

    async def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        self.avoided.append(avoid)
        name = requests[0].request_id
        if not emitted:
            yield Streamed(TokenDelta(name, (7,)), "decode-0")
            await asyncio.Event().wait()
        assert emitted == {name: (7,)}
        yield Streamed(TokenDelta(name, (8,)), "decode-1")
        for _ in range(self._signs):
            await asyncio.sleep(0.05)
            yield Streamed(None, "decode-1")
        yield Streamed(TokenDelta(name, (9,), finish_reason=FinishReason.LENGTH), "decode-1")

    async def abort(self, request_id: str) -> None:
        raise AssertionError


def resuming(pool: Any, silence_s: float, **changes: Any) -> tuple[ResumingSource, BufferSink]:
    sink = BufferSink("router")
    metrics = Metrics(sink, model_name="tiny", pool="router")
    settings = {"most_resumes": 1, "silence_s": silence_s, **changes}
    return ResumingSource(pool, metrics, Records("router", 64), **settings), sink


async def test_a_prompt_whose_logprobs_were_reported_is_not_reported_again() -> None:
    """As when several choices share a handoff: the prompt's logprobs come before any token."""
    asked: list[Request] = []

    async def scripted(requests: Sequence[Request], emitted: Any, avoid: Any) -> AsyncGenerator[Streamed, None]:
        asked.extend(requests)
        name = requests[0].request_id
        if len(asked) == 1:
            yield Streamed(TokenDelta(name, prompt_logprobs=(TokenLogprobs(6, -1.0, 1),)), "decode-0")
            raise ReplicaLost("it was killed")
        yield Streamed(TokenDelta(name, (7,), finish_reason=FinishReason.LENGTH), "decode-1")

    source, _ = resuming(SimpleNamespace(stream=scripted), 60.0, pause_s=0)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    deltas = [delta async for delta in source.stream([Request("r", (5, 6), params, resume=True)])]
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True, False]
    assert [one.params.prompt_logprobs for one in asked] == [0, None]


async def test_a_replica_that_hangs_is_left_and_avoided_for_a_while() -> None:
    now, pool = [0.0], Hanging()
    source, _ = resuming(pool, 0.2, clock=lambda: now[0])
    request = Request("r", (5, 6), SamplingParams(max_tokens=3), resume=True)
    assert tokens_of([delta async for delta in source.stream([request])]) == [7, 8, 9]
    assert pool.avoided == [(), ("decode-0",)]
    now[0] = 61.0
    assert tokens_of([delta async for delta in source.stream([request])]) == [7, 8, 9]
    assert pool.avoided[2:] == [(), ("decode-0",)], "it is asked again in the end"


async def test_a_call_that_nobody_takes_is_made_again_whether_or_not_it_may_be_resumed() -> None:
    """As when it is sent to a replica that hangs, or while the last one is replaced."""
    asked: list[str] = []

    async def deaf(requests: Sequence[Request], emitted: Any, avoid: Any) -> AsyncGenerator[Streamed, None]:
        asked.append(requests[0].request_id)
        if len(asked) < 4:
            await asyncio.Event().wait()
        assert emitted == {} and avoid == ()
        yield Streamed(TokenDelta(asked[-1], (7,), finish_reason=FinishReason.LENGTH), "decode-1")

    source, sink = resuming(SimpleNamespace(stream=deaf), 0.1, most_resumes=0)
    request = Request("r", (5, 6), SamplingParams(max_tokens=1), resume=False)
    deltas = [delta async for delta in source.stream([request])]
    assert [(delta.request_id, delta.token_ids, delta.preempted) for delta in deltas] == [("r", (7,), False)]
    assert asked == ["r", "r~1", "r~2", "r~3"]
    assert not sink.drain().counters, "nothing was resumed"


async def test_one_that_has_nothing_to_report_yet_is_not_lost() -> None:
    pool = Hanging(signs=30)
    source, _ = resuming(pool, 1.0)
    request = Request("r", (5, 6), SamplingParams(max_tokens=3), resume=True)
    assert tokens_of([delta async for delta in source.stream([request])]) == [7, 8, 9]
    assert len(pool.avoided) == 2, "it took a second and a half, and the limit is one"


async def test_a_router_that_stood_still_itself_blames_nobody() -> None:
    """Its own loop is blocked for longer than a replica may be silent, and the replica has sent something."""
    more, asked = asyncio.Event(), list[str]()

    async def reporting(requests: Sequence[Request], emitted: Any, avoid: Any) -> AsyncGenerator[Streamed, None]:
        asked.append(requests[0].request_id)
        yield Streamed(TokenDelta("r", (7,)), "decode-0")
        await more.wait()
        yield Streamed(TokenDelta("r", (8,), finish_reason=FinishReason.LENGTH), "decode-0")

    source, _ = resuming(SimpleNamespace(stream=reporting), 0.8)
    deltas = source.stream([Request("r", (5, 6), SamplingParams(max_tokens=2), resume=True)])
    assert (await anext(deltas)).token_ids == (7,)
    rest = asyncio.create_task(anext(deltas))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.1, more.set)
    time.sleep(1.0)
    assert (await rest).token_ids == (8,)
    assert asked == ["r"]
    await deltas.aclose()


async def test_signs_of_life_stand_between_the_items_and_end_with_them() -> None:
    more, closed = asyncio.Event(), list[bool]()

    async def items(*, endless: bool) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await more.wait()
            yield 2
            if endless:
                await asyncio.Event().wait()
        finally:
            closed.append(endless)

    got: list[int | None] = []
    async with contextlib.aclosing(with_signs_of_life(items(endless=True), 0.01)) as reported:
        async for item in reported:
            got.append(item)
            if got.count(None) == 3:
                more.set()
            if 2 in got and item is None:
                break
    assert got[:4] == [1, None, None, None] and got[-2:] == [2, None] and set(got) == {1, 2, None}
    assert [item async for item in with_signs_of_life(items(endless=False), 60.0)] == [1, 2]
    assert closed == [True, False]


@pytest.mark.parametrize("death", range(9))
async def test_a_death_inside_a_character_or_a_stop_string(tokenizer: Tokenizer, death: int) -> None:
    """A fake engine says this text byte by byte, one a message."""
    said = "é🙂 aST STOP never"
    ids = [token for byte in said.encode() for token in _byte_ids(tokenizer, byte)]
    metrics = Metrics(BufferSink("router"), model_name="fake", pool="router")
    backend, _ = make_backend(tokenizer, run_length=1)
    backend._next_token = lambda request, tokens: [*ids, 0][len(tokens) - len(request.prompt_token_ids)]
    await backend.start()
    pool = Replicas([PooledTokenSource(backend, metrics)], [2 * death])
    source = ResumingSource(pool, metrics, Records("router", 256), most_resumes=1, pause_s=0)
    front = FrontEnd(source, tokenizer, backend.info, Limits(resumes=True))
    reply = await reply_to(front, completion(model="fake", prompt="x", max_tokens=60, stop="STOP", temperature=0))
    assert reply["choices"][0]["text"] == "é🙂 aST "
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert len(pool.calls) == (2 if 2 * death < len("é🙂 aST STOP".encode()) else 1)
    assert backend.num_live == 0


def _byte_ids(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([byte]))]
