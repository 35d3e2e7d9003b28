import numpy as np
import pytest

from speculative.errors import EngineFault, EngineOverloaded, HandoffRefused
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta, TokenKind
from tests.support.backend_conformance import Conformance
from tests.support.fake_backend import FakeBackend, FakeConfig, fake_logprob

CONFIG = FakeConfig(vocab_size=97, multiplier=3, run_length=4)


class TestConformance(Conformance):
    """What the fake does is what every backend does: tests over it say something about the product."""

    vocab_size = CONFIG.vocab_size

    @pytest.fixture
    async def backend(self) -> FakeBackend:
        return await started()

    @pytest.fixture
    async def other(self) -> FakeBackend:
        return await started()


async def started() -> FakeBackend:
    backend = FakeBackend(CONFIG)
    await backend.start()
    return backend


def request(**params: object) -> Request:
    settings = {"max_tokens": 10, "temperature": 0, "ignore_eos": True} | params
    return Request("r", (5, 6), SamplingParams(**settings))  # type: ignore[arg-type]


def by_hand(num_tokens: int) -> list[int]:
    tokens = [5, 6]
    while len(tokens) < num_tokens + 2:
        tokens.append((tokens[-1] * 3 + len(tokens)) % 97)
    return tokens[2:]


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_tokens_come_by_the_formula_in_runs() -> None:
    backend = FakeBackend(CONFIG)
    deltas = [delta async for delta in backend.generate(request(logprobs=1))]
    assert ids_of(deltas) == by_hand(10)
    assert [len(delta.token_ids) for delta in deltas] == [1, 4, 4, 1]
    assert deltas[0].kinds == (TokenKind.FIRST,)
    assert deltas[1].kinds == (TokenKind.ACCEPTED,) * 3 + (TokenKind.RECOVERED,)
    assert (deltas[1].num_drafted, deltas[1].num_accepted) == (4, 3)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
    replayed = await backend.replay(Request("again", (5, 6, *by_hand(10)), score_from=2))
    assert list(replayed.logprobs) == logprobs == [fake_logprob(token) for token in by_hand(10)]
    assert backend.take_stats().num_emitted == 10
    assert backend.take_stats().num_emitted == 0


@pytest.mark.parametrize("first_token", [True, False])
async def test_a_handoff_goes_on_where_the_prefill_ended(first_token: bool) -> None:
    prefilled = await FakeBackend(CONFIG).prefill(request(), first_token=first_token)
    assert len(ids_of(list(prefilled.deltas))) == first_token
    assert prefilled.handoff is not None
    decoder = FakeBackend(CONFIG)
    rest = [delta async for delta in decoder.resume(request(), prefilled.handoff)]
    assert ids_of([*prefilled.deltas, *rest]) == by_hand(10)
    assert decoder.num_live == 0


async def test_generation_goes_on_after_emitted_tokens() -> None:
    rest = [delta async for delta in FakeBackend(CONFIG).generate(request(), by_hand(6))]
    assert ids_of(rest) == by_hand(10)[6:]


async def test_a_prefill_that_ends_the_request_hands_nothing_off() -> None:
    assert (await FakeBackend(CONFIG).prefill(request(max_tokens=1), first_token=True)).handoff is None


async def test_handoffs_that_do_not_fit_are_refused() -> None:
    handoff = (await FakeBackend(CONFIG).prefill(request(), first_token=False)).handoff
    assert handoff is not None
    damaged = handoff.copy()
    damaged[-3] ^= np.uint8(1)
    other_request = Request("other", (1, 2), SamplingParams())
    for backend, what, blob, reason in (
        (FakeBackend(CONFIG), request(), damaged, "damaged"),
        (FakeBackend(CONFIG), other_request, handoff, "request"),
        (FakeBackend(FakeConfig(fingerprint="another")), request(), handoff, "model"),
    ):
        with pytest.raises(HandoffRefused) as caught:
            await anext(backend.resume(what, blob))
        assert caught.value.reason == reason
        assert backend.num_live == 0


async def test_it_counts_what_it_holds_and_what_was_closed_early() -> None:
    backend = FakeBackend(FakeConfig(max_num_seqs=1))
    running = backend.generate(request())
    await anext(running)
    assert (backend.num_live, backend.usage().num_free_blocks) == (1, 0)
    with pytest.raises(EngineOverloaded):
        await anext(backend.generate(request()))
    await running.aclose()
    assert (backend.num_live, backend.aborted) == (0, ["r"])


async def test_an_aborted_request_ends_with_a_last_delta() -> None:
    backend = FakeBackend(CONFIG)
    running = backend.generate(request())
    await anext(running)
    backend.abort("r")
    assert [delta.finish_reason async for delta in running] == [FinishReason.ABORT]
    assert (backend.num_live, backend.aborted) == (0, ["r"])
    backend.abort("r")  # it is gone: nothing happens
    assert ids_of([delta async for delta in backend.generate(request())]) == by_hand(10)


async def test_it_is_healthy_between_start_and_stop() -> None:
    backend = FakeBackend()
    with pytest.raises(EngineFault):
        backend.check_health()
    await backend.start()
    backend.check_health()
    await backend.stop()
    with pytest.raises(EngineFault):
        backend.check_health()
