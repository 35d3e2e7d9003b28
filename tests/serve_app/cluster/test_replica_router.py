"""Which replica: tables for the ranking, what a router knows of caches, and the routers over stand-ins for replicas."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from serve_app.cluster.replica_router import (
    MOST_REPORTED,
    DecodeLoad,
    DecodeRouter,
    PrefillLoad,
    PrefillRouter,
    PrefixBook,
    rank_decode,
    rank_prefill,
    reported_blocks,
)
from speculative.request import Request
from speculative.state.prefix import block_chain

PROMPT = tuple(range(100, 140))
BLOCK = 8


@pytest.mark.parametrize(
    ("loads", "num_tokens", "first"),
    [
        ({"a": (0, 0), "b": (64, 0)}, 100, "b"),  # what is cached need not be computed
        ({"a": (0, 0), "b": (64, 60)}, 100, "b"),  # 96 tokens from done, against 100
        ({"a": (0, 0), "b": (64, 70)}, 100, "a"),  # but not behind a long line
        ({"a": (0, 500), "b": (0, 0), "c": (8, 20)}, 40, "b"),
        ({"a": (0, 0), "b": (64, 64), "c": (32, 32)}, 100, "b"),  # as soon, and less work
    ],
)
def test_a_prompt_goes_where_it_is_done_first(loads: dict[str, tuple[int, int]], num_tokens: int, first: str) -> None:
    ranked = rank_prefill({name: PrefillLoad(*load) for name, load in loads.items()}, num_tokens, "request")
    assert ranked[0] == first and sorted(ranked) == sorted(loads)


@pytest.mark.parametrize(
    ("loads", "first"),
    [
        ({"a": (0.5, 0.1), "b": (0.4, 0.2)}, "b"),
        ({"a": (0.1, 0.9), "b": (0.6, 0.1)}, "b"),  # slots run out before blocks
        ({"a": (0.0, 0.0), "b": (0.0, 0.1)}, "a"),
    ],
)
def test_a_stream_goes_to_the_emptiest(loads: dict[str, tuple[float, float]], first: str) -> None:
    assert rank_decode({name: DecodeLoad(*load) for name, load in loads.items()}, "request")[0] == first


def test_a_session_stays_where_it_is_and_moves_only_when_its_replica_is_full_or_gone() -> None:
    loads = {name: DecodeLoad(0.9 if name == "a" else 0.1, 0.5) for name in "abc"}
    homes = {f"s{n}": rank_decode(loads, f"request-{n}", f"s{n}")[0] for n in range(60)}
    assert set(homes.values()) == {"a", "b", "c"}
    assert all(rank_decode(loads, "another", session)[0] == home for session, home in homes.items())
    full = loads | {"a": DecodeLoad(0.97, 0.5)}
    for session, home in homes.items():
        now = rank_decode(full, "another", session)[0]
        assert now != "a" and (home == "a" or now == home)
    rest = {name: load for name, load in loads.items() if name != "b"}
    moved = {session for session, home in homes.items() if rank_decode(rest, "x", session)[0] != home}
    assert moved == {session for session, home in homes.items() if home == "b"}, "others moved too"


def heard(replica: str, token_ids: tuple[int, ...]) -> PrefixBook:
    book = PrefixBook(BLOCK)
    book.update(replica, reported_blocks(block_chain(token_ids, BLOCK)))
    return book


@pytest.mark.parametrize(
    ("cached", "asked", "found"),
    [
        (PROMPT, PROMPT, 40),
        (PROMPT[:20], PROMPT, 16),  # full blocks only
        (PROMPT, PROMPT[:20], 16),
        ((7, *PROMPT), PROMPT, 0),  # the same tokens at other positions
        ((*PROMPT[:8], 1, *PROMPT[9:]), PROMPT, 8),
    ],
)
def test_the_longest_cached_prefix_is_found(cached: tuple[int, ...], asked: tuple[int, ...], found: int) -> None:
    assert heard("a", cached).loads(["a", "b"], asked) == {"a": PrefillLoad(found, 0), "b": PrefillLoad(0, 0)}


def test_what_was_sent_counts_at_once_as_cached_and_as_backlog_until_it_is_done() -> None:
    book = PrefixBook(BLOCK)
    book.sent("a", "r1", PROMPT, caches=True)
    book.sent("b", "r2", PROMPT, caches=False)  # a replay: nothing of it is cached
    assert book.loads("ab", PROMPT) == {"a": PrefillLoad(40, 40), "b": PrefillLoad(0, 40)}
    book.done("r1")
    book.done("r2")
    book.done("r2")
    assert book.loads("ab", PROMPT) == {"a": PrefillLoad(40, 0), "b": PrefillLoad(0, 0)}
    book.sent("a", "r3", PROMPT, caches=True)
    book.keep_only("b")
    assert book.loads("a", PROMPT)["a"] == PrefillLoad(0, 0), "a is gone, and what was on its way there"


def test_what_other_routers_sent_is_reported_and_own_prompts_do_not_count_twice() -> None:
    book = PrefixBook(BLOCK)
    book.update("a", b"", backlog=500)
    book.sent("a", "r1", PROMPT, caches=False)
    book.sent("b", "r2", PROMPT, caches=False)
    assert book.loads("ab", PROMPT) == {"a": PrefillLoad(0, 500), "b": PrefillLoad(0, 40)}


def test_what_a_replica_reports_is_bounded_and_its_newest() -> None:
    chains = [block_chain(range(start, start + 80), BLOCK) for start in range(0, 100_000, 80)]
    reported = reported_blocks(name for chain in chains for name in chain)
    assert len(reported) == MOST_REPORTED * 8
    book = PrefixBook(BLOCK)
    book.update("a", reported)
    assert book.loads("a", tuple(range(99_920, 100_000)))["a"].cached == 80
    assert book.loads("a", tuple(range(80)))["a"].cached == 0


class Replica(SimpleNamespace):
    """What Ray Serve hands a router of a replica; a stand-in."""

    def __init__(self, name: str, **stats: Any) -> None:
        super().__init__(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


class Result:
    """What Ray Serve hands a router of a call under way; a stand-in."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


def pending(request: Request | None = None, session: str = "") -> Any:
    """All of them are calls from within one HTTP request."""
    metadata = RequestMetadata("reply", "same", session_id=session)
    return PendingRequest(args=[] if request is None else [request, True], kwargs={}, metadata=metadata)


def bare(kind: type[Any], **settings: int) -> Any:
    """A router without Ray Serve's part of it, which needs a running Serve."""
    router = kind.__new__(kind)
    router._deployment_id = "test"
    router.initialize_state(**settings)
    return router


async def first_of(router: Any, replicas: list[Any], asked: Any) -> str:
    ranks = await router.choose_replicas(replicas, asked)
    return str(ranks[0][0].replica_id.unique_id)


async def test_the_prefill_router_ranks_by_what_replicas_reported_and_what_it_sent() -> None:
    router = bare(PrefillRouter, block_size=BLOCK)
    replicas = [Replica("a"), Replica("b"), Replica("c")]
    router._book.update("b", reported_blocks(block_chain(PROMPT, BLOCK)))
    asked = pending(Request("r1", PROMPT))
    ranks = await router.choose_replicas(replicas, asked)
    assert [len(rank) for rank in ranks] == [1, 1, 1] and asked.routing_context.should_backoff
    assert ranks[0][0].replica_id.unique_id == "b"
    router.on_request_routed(asked, ranks[0][0].replica_id, Result())
    other = tuple(range(500, 540))
    ranks = await router.choose_replicas(replicas, pending(Request("r2", other)))
    assert ranks[-1][0].replica_id.unique_id == "b", "it has a prompt before it"


async def test_a_replay_goes_elsewhere_than_where_it_failed_if_it_can() -> None:
    for avoided, best in (("a", "b"), ("b", "a")):
        asked = pending(Request("r1", PROMPT, score_from=1))
        asked.kwargs["avoid"] = (avoided,)
        for router in (bare(PrefillRouter, block_size=BLOCK), bare(DecodeRouter, max_num_seqs=4)):
            assert await first_of(router, [Replica("a"), Replica("b")], asked) == best
            assert await first_of(router, [Replica(avoided)], asked) == avoided


SCOPES: list[dict[str, str]] = [{}, {"adapter": "sql"}, {"adapter": "legal"}, {"cache_salt": "tenant"}]


@pytest.mark.parametrize("computed", SCOPES, ids=str)
async def test_what_one_adapter_or_tenant_had_computed_is_no_prefix_of_anothers(computed: dict[str, str]) -> None:
    router, replicas = bare(PrefillRouter, block_size=BLOCK), [Replica("a"), Replica("b")]
    asked = pending(Request("r1", PROMPT, **computed))
    await router.choose_replicas(replicas, asked)
    router.on_request_routed(asked, replicas[1].replica_id, result := Result())
    result.end()
    for wanted in SCOPES:
        scope = Request("r2", PROMPT, **wanted).cache_scope
        cached = {name: load.cached for name, load in router._book.loads("ab", PROMPT, scope).items()}
        assert cached == {"a": 0, "b": 40 if wanted == computed else 0}
    assert await first_of(router, replicas, pending(Request("r3", PROMPT, **computed))) == "b"


def test_what_an_engine_reports_of_its_cache_is_no_adapters() -> None:
    assert heard("a", PROMPT).loads("a", PROMPT, "sql")["a"].cached == 0


async def test_the_prompts_of_one_body_are_shared_out_before_any_replica_says_a_word() -> None:
    router = bare(PrefillRouter, block_size=BLOCK)
    replicas = [Replica("a"), Replica("b")]
    prompts = [tuple(range(start, start + 40)) for start in range(0, 800, 40)]
    calls = [pending(Request(f"r{number}", prompt)) for number, prompt in enumerate(prompts)]
    chosen = [await first_of(router, replicas, call) for call in calls]
    assert chosen.count("a") == chosen.count("b") == 10
    backlog = router._book.loads("ab", ())
    assert {load.backlog for load in backlog.values()} == {400}
    assert await first_of(router, replicas, calls[0]) in "ab", "Serve asks again where a replica takes no more"
    assert sum(load.backlog for load in router._book.loads("ab", ()).values()) == 800, "it counts once all the same"


async def test_a_call_that_is_looked_at_again_after_it_was_placed_counts_once() -> None:
    """Serve's routing tasks may do so."""
    replicas = [Replica("a"), Replica("b")]
    for router in (bare(PrefillRouter, block_size=BLOCK), bare(DecodeRouter, max_num_seqs=4)):
        call = pending(Request("r", PROMPT))
        await router.choose_replicas(replicas, call)
        call.future.set_result(replicas[0])
        router.on_request_routed(call, replicas[0].replica_id, result := Result())
        assert len(await router.choose_replicas(replicas, call)) == 2
        left = router._book._on_their_way if isinstance(router, PrefillRouter) else router._running
        assert len(left) == 1
        result.end()
        assert len(left) == 0


async def test_a_call_counts_where_it_went_until_it_ends() -> None:
    router = bare(PrefillRouter, block_size=BLOCK)
    replicas = {name: Replica(name) for name in "ab"}
    calls = [pending(Request(f"r{number}", PROMPT)) for number in range(3)]
    results = [Result() for _ in calls]
    for call, result in zip(calls, results, strict=True):
        await router.choose_replicas(list(replicas.values()), call)
        router.on_request_routed(call, replicas["b"].replica_id, result)  # whichever was meant, b took it
    assert [router._book.loads("ab", ())[name].backlog for name in "ab"] == [0, 120]
    for count, result in enumerate(results, start=1):
        result.end()
        assert router._book.loads("ab", ())["b"].backlog == 120 - 40 * count


async def test_a_call_that_was_never_sent_leaves_nothing_behind() -> None:
    for router in (bare(PrefillRouter, block_size=BLOCK), bare(DecodeRouter, max_num_seqs=4)):
        call = pending(Request("r", PROMPT))
        await router.choose_replicas([Replica("a")], call)
        left = router._book._on_their_way if isinstance(router, PrefillRouter) else router._running
        assert len(left) == 1
        del call  # a client that leaves
        gc.collect()
        assert len(left) == 0


async def test_the_decode_router_counts_what_it_has_sent_since_it_was_reported() -> None:
    router = bare(DecodeRouter, max_num_seqs=4)
    replicas = [Replica("a", kv_usage=0.2, running_share=0.2), Replica("b", kv_usage=0.3, running_share=0.3)]
    calls, gone = [pending() for _ in range(4)], list[str]()
    results = [Result() for _ in calls]
    for call, result in zip(calls, results, strict=True):
        ranks = await router.choose_replicas(replicas, call)
        gone.append(ranks[0][0].replica_id.unique_id)
        router.on_request_routed(call, ranks[0][0].replica_id, result)
    assert gone == ["a", "a", "b", "b"]
    results[0].end()
    results[1].end()
    assert await first_of(router, replicas, pending()) == "a", "its streams have ended"
    home = await first_of(router, replicas, pending(session="s"))
    for _ in range(10):
        assert await first_of(router, replicas, pending(session="s")) == home


async def test_what_is_to_be_avoided_comes_last_whatever_its_load_and_the_session() -> None:
    router = bare(DecodeRouter, max_num_seqs=4)
    replicas = [Replica("a"), Replica("b", kv_usage=0.9), Replica("c", kv_usage=0.8)]
    for session in ("", "s1", "s2", "s3"):
        call = pending(session=session)
        call.kwargs["avoid"] = ("a",)
        ranks = await router.choose_replicas(replicas, call)
        names = [rank[0].replica_id.unique_id for rank in ranks]
        assert sorted(names) == ["a", "b", "c"] and names[-1] == "a"


def test_calls_that_share_an_id_are_reported_apart() -> None:
    """Serve gives all calls from within one HTTP request the same internal id."""

    def pending(done: bool = False) -> Any:
        future = SimpleNamespace(done=lambda: done)
        return SimpleNamespace(metadata=SimpleNamespace(internal_request_id="same"), future=future)

    first, second, over = pending(), pending(), pending(done=True)
    router: Any = SimpleNamespace(_pending_requests_to_fulfill=[over, first, second])
    find = PrefillRouter._get_pending_request_matching_internal_request_id
    assert find(router, first.metadata) is first
    assert find(router, second.metadata) is second
    assert find(router, over.metadata) is None
