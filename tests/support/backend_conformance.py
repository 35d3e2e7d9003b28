"""Behaviour of every backend: one kit of tests that our engine and vLLM pass.

A test module subclasses `EngineConformance` and gives two fixtures, `backend` and `other`: two started engines of the
same model with a drafter that finds something to draft in `PROMPT`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import numpy as np
import pytest

from serve_app.backends.base import Backend, Handoff, PauseMode
from speculative.errors import HandoffRefused, InvalidRequest
from speculative.request import FinishReason, Request, SamplingParams, Speculation, TokenDelta, TokenKind
from speculative.sampling.logprob_checks import LogprobContract

PROMPT = tuple([5, 9, 17, 33] * 5)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)
PLAIN = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, speculate=False)
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.5)
SomeBackend = TypeVar("SomeBackend", bound=Backend)


@contextlib.asynccontextmanager
async def serving(backend: SomeBackend) -> AsyncIterator[SomeBackend]:
    """Start a backend, and stop it when the block ends."""
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def collect(stream: AsyncIterator[TokenDelta]) -> list[TokenDelta]:
    return [delta async for delta in stream]


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def handed_off(backend: Backend, request: Request, *, first_token: bool = False) -> Handoff:
    """What is sent of a computed prompt."""
    handoff = (await backend.prefill(request, first_token=first_token)).handoff
    assert handoff is not None
    return handoff


async def idle(backend: Backend) -> None:
    """Wait until the engine holds nothing."""
    for _ in range(500):
        usage = backend.usage()
        if usage.num_running + usage.num_waiting + usage.num_held == 0:
            assert usage.num_free_blocks == usage.num_blocks
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still holds {backend.usage()}")


class EngineConformance:
    """Tests that any backend passes."""

    vocab_size = 512
    replay_tolerance = 1e-4  # nats

    async def test_prefill_here_and_resume_there_is_generating_here(self, backend: Backend, other: Backend) -> None:
        for length in (len(PROMPT), 1, 16, 17):
            prompt = PROMPT[:length]
            whole = tokens(await collect(backend.generate(Request("whole", prompt, GREEDY))))
            assert len(whole) == 24
            for first_token in (True, False):
                request = Request("apart", prompt, GREEDY)
                prefilled = await backend.prefill(request, first_token=first_token)
                assert prefilled.handoff is not None
                assert len(tokens(prefilled.deltas)) <= first_token
                rest = await collect(other.resume(request, prefilled.handoff))
                assert tokens(prefilled.deltas) + tokens(rest) == whole
                assert rest[-1].finish_reason is FinishReason.LENGTH
        await idle(backend)
        await idle(other)

    async def test_a_handoff_may_be_used_twice(self, backend: Backend, other: Backend) -> None:
        request = Request("shared", PROMPT, GREEDY)
        handoff = await handed_off(backend, request)
        once = await collect(other.resume(request, handoff))
        assert tokens(once) == tokens(await collect(other.resume(request, handoff)))

    async def test_it_goes_on_after_tokens_that_were_emitted_elsewhere(self, backend: Backend, other: Backend) -> None:
        whole = tokens(await collect(backend.generate(Request("whole", PROMPT, GREEDY))))
        moved = await collect(other.generate(Request("moved", PROMPT, GREEDY), emitted=whole[:9]))
        assert tokens(moved) == whole[9:]

    async def test_one_token_is_one_token_wherever_it_comes_from(self, backend: Backend, other: Backend) -> None:
        request = Request("one", PROMPT, SamplingParams(max_tokens=1, temperature=0))
        prefilled = await backend.prefill(request, first_token=True)
        deltas = list(prefilled.deltas)
        if prefilled.handoff is not None:
            deltas += await collect(other.resume(request, prefilled.handoff))
        assert len(tokens(deltas)) == 1 and deltas[-1].finished
        await idle(backend)

    async def test_what_it_says_of_its_drafts_adds_up(self, backend: Backend) -> None:
        backend.take_stats()
        deltas = await collect(backend.generate(Request("r", PROMPT, GREEDY)))
        kinds = [kind for delta in deltas for kind in delta.kinds]
        stats = backend.take_stats()
        assert len(kinds) == len(tokens(deltas)) == stats.num_emitted == 24
        assert kinds[0] is TokenKind.FIRST and TokenKind.FIRST not in kinds[1:]
        assert kinds.count(TokenKind.ACCEPTED) == sum(delta.num_accepted for delta in deltas) == stats.num_accepted
        assert sum(delta.num_drafted for delta in deltas) == stats.num_drafted >= max(stats.num_accepted, 1)
        assert stats.drafted_per_position == sorted(stats.drafted_per_position, reverse=True)
        assert backend.take_stats().num_emitted == 0

    async def test_drafts_change_nothing_that_is_said(self, backend: Backend) -> None:
        drafted = await collect(backend.generate(Request("drafted", PROMPT, GREEDY)))
        plain = await collect(backend.generate(Request("plain", PROMPT, PLAIN)))
        assert tokens(drafted) == tokens(plain)
        assert sum(delta.num_drafted for delta in drafted) > 0 == sum(delta.num_drafted for delta in plain)

    async def test_replays_equal_what_was_served(self, backend: Backend, other: Backend) -> None:
        deltas = await collect(backend.generate(Request("r", PROMPT, GREEDY)))
        served = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
        forced = Request("again", (*PROMPT, *tokens(deltas)), GREEDY, score_from=len(PROMPT))
        replayed = await other.replay(forced)
        assert list(replayed.logprobs) == pytest.approx(served, abs=self.replay_tolerance)
        assert len(served) == 24

    @pytest.mark.parametrize("speculation", Speculation)
    async def test_who_may_draft_is_switched_while_it_runs(self, backend: Backend, speculation: Speculation) -> None:
        plain = tokens(await collect(backend.generate(Request("plain", PROMPT, PLAIN))))
        backend.set_speculation(speculation)
        try:
            for canary in (False, True):
                deltas = await collect(backend.generate(Request(f"{canary}", PROMPT, GREEDY, canary=canary)))
                drafts = speculation is Speculation.ON or (speculation is Speculation.CANARY and canary)
                assert (sum(delta.num_drafted for delta in deltas) > 0) == drafts
                assert tokens(deltas) == plain
        finally:
            backend.set_speculation(Speculation.ON)

    async def test_a_request_that_runs_goes_on_when_speculation_goes_off(self, backend: Backend) -> None:
        whole = tokens(await collect(backend.generate(Request("whole", PROMPT, GREEDY))))
        stream = backend.generate(Request("r", PROMPT, GREEDY))
        deltas = [await anext(stream)]
        backend.set_speculation(Speculation.OFF)
        try:
            deltas += await collect(stream)
        finally:
            backend.set_speculation(Speculation.ON)
        assert tokens(deltas) == whole

    async def test_a_request_that_runs_goes_on_when_what_was_computed_is_distrusted(self, backend: Backend) -> None:
        whole = tokens(await collect(backend.generate(Request("whole", PROMPT, PLAIN))))
        stream = backend.generate(Request("r", PROMPT, PLAIN))
        deltas = [await anext(stream)]
        backend.invalidate_cache()
        assert tokens(deltas + await collect(stream)) == whole

    async def test_leaving_early_frees_what_was_held(self, backend: Backend) -> None:
        stream = backend.generate(Request("left", PROMPT, LONG))
        await anext(stream)
        await stream.aclose()
        await idle(backend)
        prefill = asyncio.create_task(backend.prefill(Request("cancelled", PROMPT * 4, LONG), first_token=False))
        await asyncio.sleep(0)
        prefill.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await prefill
        await idle(backend)

    async def test_an_aborted_request_ends_and_its_neighbour_goes_on(self, backend: Backend) -> None:
        stream = backend.generate(Request("aborted", PROMPT, LONG))
        neighbour = asyncio.create_task(collect(backend.generate(Request("neighbour", PROMPT, GREEDY))))
        await anext(stream)
        backend.abort("aborted")
        rest = await collect(stream)
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert len(tokens(await neighbour)) == 24
        await idle(backend)

    async def test_handoffs_that_do_not_fit_are_refused(self, backend: Backend, other: Backend) -> None:
        handoff = await handed_off(backend, Request("r", PROMPT, GREEDY))
        damaged = handoff.copy()
        damaged[-3] ^= np.uint8(1)
        for blob, prompt, reason in ((damaged, PROMPT, "damaged"), (handoff, PROMPT[1:], "request")):
            with pytest.raises(HandoffRefused) as caught:
                await collect(other.resume(Request("r", prompt, GREEDY), blob))
            assert caught.value.reason == reason
        await idle(other)

    async def test_a_prefix_is_found_within_one_salt_only_until_the_cache_is_emptied(self, backend: Backend) -> None:
        async def num_cached(name: str, salt: str) -> int:
            deltas = await collect(backend.generate(Request(name, PROMPT * 4, GREEDY, cache_salt=salt)))
            return max(delta.num_cached_tokens for delta in deltas)

        backend.reset_prefix_cache()
        found = [await num_cached(f"r{number}", salt) for number, salt in enumerate(("", "a", "b", "a", ""))]
        assert found[:3] == [0, 0, 0]
        assert found[3] == found[4] > 0
        backend.reset_prefix_cache()
        assert [await num_cached("r5", "a"), await num_cached("r6", "")] == [0, 0]

    async def test_a_request_that_cannot_be_served_harms_nobody(self, backend: Backend) -> None:
        neighbour = asyncio.create_task(collect(backend.generate(Request("neighbour", PROMPT, GREEDY))))
        with pytest.raises(InvalidRequest, match=r"vocabulary|[Tt]oken id"):
            await collect(backend.generate(Request("foreign", (self.vocab_size + 88,), GREEDY)))
        with pytest.raises(InvalidRequest, match="prompt"):
            await collect(backend.generate(Request("long", PROMPT * 2000, GREEDY)))
        with pytest.raises(HandoffRefused):
            await collect(backend.resume(Request("junk", PROMPT, GREEDY), np.zeros(100, np.uint8)))
        assert len(tokens(await neighbour)) == 24
        backend.check_health()
        await idle(backend)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "asked",
        [
            {"logprobs": 0},
            {"logprobs": 3},
            {"logprob_token_ids": (7, 3)},
            {"logprobs": 2, "logprob_token_ids": (7, 3)},
            {"logprobs": 1, "prompt_logprobs": 2},
            {"logprobs": 1, "top_k": 5},
            {"logprobs": 1, "top_p": 0.8},
            {"logprobs": 1, "frequency_penalty": 1.5, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        ],
        ids=str,
    )
    async def test_logprobs_keep_their_contract(
        self, backend: Backend, asked: dict[str, object], temperature: float
    ) -> None:
        params = SamplingParams(max_tokens=8, temperature=temperature, ignore_eos=True, **asked)  # type: ignore[arg-type]
        request = Request("r", PROMPT, params, seed=5)
        neighbour = asyncio.create_task(collect(backend.generate(Request("neighbour", PROMPT, GREEDY))))
        deltas = await collect(backend.generate(request))
        contract = LogprobContract("raw_logprobs", self.vocab_size)
        assert [contract.first_violation(delta, request) for delta in deltas] == [None] * len(deltas)
        assert len(tokens(deltas)) == 8 and deltas[-1].error is None
        assert (params.prompt_logprobs is None) == all(delta.prompt_logprobs is None for delta in deltas)
        assert all(len(entry.top) == 0 for delta in await neighbour for entry in delta.logprobs or ())
        assert backend.take_stats().logprob_violations == {}

    async def test_filters_hold_and_forbidden_tokens_stay_out(self, backend: Backend) -> None:
        allowed = (3, 40, 41, 60)
        kept = SamplingParams(max_tokens=12, temperature=1, ignore_eos=True, allowed_token_ids=allowed)
        assert set(tokens(await collect(backend.generate(Request("allowed", PROMPT, kept))))) <= set(allowed)
        plain = tokens(await collect(backend.generate(Request("plain", PROMPT, PLAIN))))
        barred = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=((plain[0],),))
        assert plain[0] not in tokens(await collect(backend.generate(Request("barred", PROMPT, barred))))
        only = SamplingParams(max_tokens=6, temperature=1, ignore_eos=True, top_k=1)
        assert tokens(await collect(backend.generate(Request("only", PROMPT, only)))) == plain[:6]

    async def test_the_seed_names_the_text(self, backend: Backend) -> None:
        hot = SamplingParams(max_tokens=24, temperature=1, ignore_eos=True)
        reported = [tokens(await collect(backend.generate(Request("r", PROMPT, hot, seed=seed)))) for seed in (1, 1, 2)]
        assert reported[0] == reported[1] != reported[2]

    async def test_a_sampled_request_is_the_same_from_a_handoff(self, backend: Backend, other: Backend) -> None:
        hot = SamplingParams(max_tokens=24, temperature=1, ignore_eos=True, top_p=0.95)
        request = Request("r", PROMPT, hot, seed=11)
        whole = tokens(await collect(backend.generate(request)))
        prefilled = await backend.prefill(request, first_token=True)
        assert prefilled.handoff is not None
        rest = await collect(other.resume(request, prefilled.handoff))
        assert tokens(prefilled.deltas) + tokens(rest) == whole

    async def test_greedy_requests_stay_so_beside_others(self, backend: Backend) -> None:
        alone = tokens(await collect(backend.generate(Request("alone", PROMPT, PLAIN))))
        hot = SamplingParams(max_tokens=24, temperature=1, ignore_eos=True, top_p=0.9)
        beside = await asyncio.gather(
            *(
                collect(backend.generate(Request(f"{index}", PROMPT, hot if index % 2 else GREEDY, seed=index)))
                for index in range(4)
            )
        )
        assert tokens(beside[0]) == tokens(beside[2]) == alone

    async def test_a_stop_token_ends_it_and_is_reported(self, backend: Backend) -> None:
        plain = tokens(await collect(backend.generate(Request("plain", PROMPT, PLAIN))))
        stop = next(token for index, token in enumerate(plain) if index >= 3 and token not in plain[:index])
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
        deltas = await collect(backend.generate(Request("stop", PROMPT, params)))
        assert tokens(deltas) == plain[: plain.index(stop) + 1]
        assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == (FinishReason.STOP, stop)

    async def test_a_pause_holds_newcomers_back(self, backend: Backend) -> None:
        for mode in PauseMode:
            running = asyncio.create_task(collect(backend.generate(Request(f"running-{mode}", PROMPT, LONG))))
            while backend.usage().num_running == 0 and not running.done():
                await asyncio.sleep(0.01)
            await backend.pause(mode)
            if mode is not PauseMode.KEEP:
                await asyncio.wait_for(asyncio.shield(running), 300)
            newcomer = asyncio.create_task(collect(backend.generate(Request(f"newcomer-{mode}", PROMPT, PLAIN))))
            await asyncio.sleep(0.1)
            assert not newcomer.done()
            await backend.unpause()
            assert len(tokens(await newcomer)) == 24
            deltas = await running
            whole = len(tokens(deltas)) == LONG.max_tokens
            assert whole or (mode is PauseMode.ABORT and deltas[-1].finish_reason is FinishReason.ABORT)
        await idle(backend)
