"""The choice of a replica for a request.

A prompt goes to the prefill replica that will finish it first: its uncached tokens, after the tokens already queued
there. A stream goes to the decode replica of its session, and without one to the replica with most room. Replicas
report what they have cached about once a second; what a router has sent since, it knows itself.

The functions and `PrefixBook` know nothing of Ray; the routers at the end plug them into Ray Serve's request router.
"""

import abc
import hashlib
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from speculative.request import Request
from speculative.state.prefix import block_chain

MOST_REPORTED = 2048  # blocks that a replica reports
_MOST_KNOWN = 16384  # blocks of each replica that a router remembers of what it sent there
_NAME_BYTES = 8  # of a block's name; a collision among a million blocks occurs once in thirty million caches
_FULL = 0.95  # KV usage from which a session is better off elsewhere


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill replica's load, for one prompt. All in tokens."""

    cached: int  # of the prompt
    backlog: int  # to be computed before it


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode replica's load, for one stream."""

    kv_usage: float  # share of its KV blocks in use
    running_share: float  # running requests, as a share of its maximum

    @property
    def fullness(self) -> float:
        """Usage of what it runs out of first."""
        return max(self.kv_usage, self.running_share)


def rank_prefill(
    loads: Mapping[str, PrefillLoad], num_tokens: int, name: str, avoid: Collection[str] = ()
) -> list[str]:
    """Replicas for a prompt of so many tokens, the earliest done first; of equals, the one with less to compute for it.

    Remaining ties are broken by `name`, so that different prompts go to different replicas. Those to `avoid` come last.
    """

    def standing(one: str) -> tuple[bool, int, int, int]:
        load = loads[one]
        return one in avoid, num_tokens - load.cached + load.backlog, -load.cached, _lot(name, one)

    return sorted(loads, key=standing)


def rank_decode(
    loads: Mapping[str, DecodeLoad], name: str, session: str = "", avoid: Collection[str] = ()
) -> list[str]:
    """Replicas for a stream, the emptiest first; its session's replica before all, while it has room. Those to `avoid`
    come last."""
    ranked = sorted(loads, key=lambda one: (loads[one].fullness, _lot(name, one)))
    if session and loads:
        home = max(loads, key=lambda one: _lot(session, one))  # the same for every router, and for most if some go
        if loads[home].kv_usage < _FULL:
            ranked.remove(home)
            ranked.insert(0, home)
    return sorted(ranked, key=lambda one: one in avoid)


def _lot(name: str, replica: str) -> int:
    digest = hashlib.blake2b(f"{name}\0{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def reported_blocks(names: Iterable[bytes]) -> bytes:
    """Names of cached blocks as a replica reports them: the newest, each truncated."""
    newest = list(names)[-MOST_REPORTED:]
    return b"".join(name[:_NAME_BYTES] for name in newest)


def _short_names(reported: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(reported) // _NAME_BYTES}Q", reported)


@dataclass(eq=False)
class PrefixBook:
    """The knowledge of a router about the prefixes that replicas have cached, and the prompts sent to them."""

    block_size: int

    def __post_init__(self) -> None:
        self._reported: dict[str, tuple[bytes, frozenset[int]]] = {}
        self._sent: dict[str, OrderedDict[int, None]] = {}
        self._backlog: dict[str, int] = {}  # as reported
        self._on_their_way: dict[Hashable, tuple[str, int]] = {}  # by call: replica, tokens

    def update(self, replica: str, reported: bytes, backlog: int = 0) -> None:
        """Record a replica's report: its cached blocks, and how many tokens wait there, from all routers."""
        self._backlog[replica] = backlog
        known = self._reported.get(replica)
        if known is None or known[0] != reported:
            self._reported[replica] = (reported, frozenset(_short_names(reported)))

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget replicas that are gone."""
        living = set(replicas)
        self._reported = {name: one for name, one in self._reported.items() if name in living}
        self._sent = {name: one for name, one in self._sent.items() if name in living}
        self._backlog = {name: one for name, one in self._backlog.items() if name in living}
        for call, (replica, _) in tuple(self._on_their_way.items()):
            if replica not in living:
                self.done(call)

    def meant(self, replica: str, call: Hashable, num_tokens: int) -> None:
        """A prompt of so many tokens is about to go to this replica, if it accepts; a later update overrides this."""
        self._on_their_way[call] = (replica, num_tokens)

    def sent(self, replica: str, call: Hashable, token_ids: Sequence[int], *, caches: bool, scope: str = "") -> None:
        """A prompt went to a replica; with `caches`, it will be cached there, for requests of the same scope."""
        self._on_their_way[call] = (replica, len(token_ids))
        if caches:
            blocks = self._sent.setdefault(replica, OrderedDict())
            for name in self._names(token_ids, scope):
                blocks[name] = None
                blocks.move_to_end(name)
            while len(blocks) > _MOST_KNOWN:
                blocks.popitem(last=False)

    def done(self, call: Hashable) -> None:
        """A prompt was computed, or abandoned."""
        self._on_their_way.pop(call, None)

    def loads(self, replicas: Iterable[str], token_ids: Sequence[int], scope: str = "") -> dict[str, PrefillLoad]:
        """The replicas' loads for a prompt of a scope (`Request.cache_scope`)."""
        names = self._names(token_ids, scope)
        own: dict[str, int] = {}
        for replica, count in tuple(self._on_their_way.values()):
            own[replica] = own.get(replica, 0) + count
        # The reported backlog includes what this router had sent by then; what it sent since may be all there is.
        backlog = {one: max(own.get(one, 0), self._backlog.get(one, 0)) for one in replicas}
        return {one: PrefillLoad(self._cached(one, names), backlog[one]) for one in backlog}

    def _cached(self, replica: str, names: Sequence[int]) -> int:
        """Tokens of the longest prefix that the replica has: the last known block's name covers all before it."""
        reported = self._reported[replica][1] if replica in self._reported else frozenset[int]()
        sent = self._sent.get(replica, OrderedDict[int, None]())
        for index in reversed(range(len(names))):
            if names[index] in reported or names[index] in sent:
                return (index + 1) * self.block_size
        return 0

    def _names(self, token_ids: Sequence[int], scope: str) -> tuple[int, ...]:
        chain = block_chain(token_ids, self.block_size, of=scope)
        return _short_names(b"".join(name[:_NAME_BYTES] for name in chain))


@dataclass(eq=False)
class _Calls:
    """Identifies the calls of a router. Serve's ids do not: all calls from within one HTTP request share one."""

    over: Callable[[int], object]  # called for each call that has ended, or was never sent

    def __post_init__(self) -> None:
        self._calls: dict[int, tuple[int, Any]] = {}  # by the pending request's `id`, which is its own while it lives
        self._num_calls = 0

    def of(self, pending: Any) -> int:
        """The number of a call that waits for its replica; it is over when Serve drops it."""
        known = self._calls.get(id(pending))
        if known is not None:
            return known[0]
        self._num_calls += 1
        call, key, calls, over = self._num_calls, id(pending), self._calls, self.over

        def dropped(_: object) -> None:
            if key in calls:
                del calls[key]
                over(call)

        calls[key] = (call, weakref.ref(pending, dropped))
        return call

    def routed(self, pending: Any, result: Any) -> None:
        """A replica has taken the call; it is over when its result arrives, which may be at once."""
        call = self.of(pending)
        del self._calls[id(pending)]
        result.add_done_callback(lambda _: self.over(call))


class _Ranking(ConsistentHashRouter):
    """Ray Serve's router with our ranking. From its base class it takes the loop, which routes each request to the
    replica chosen for it, and the fallback without a ranking."""

    @abc.abstractmethod
    def rank(self, replicas: Mapping[str, Any], pending: Any) -> list[str]:
        """The replicas, by their ids, the best first."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Called by Serve: one replica per rank, tried in turn."""
        if pending_request is None or not candidate_replicas:
            return await super().choose_replicas(candidate_replicas, pending_request)  # type: ignore[no-any-return]
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        placed = pending_request.future.done()  # by another of Serve's routing tasks, meanwhile
        return [[replicas[name]] for name in (replicas if placed else self.rank(replicas, pending_request))]

    async def _fulfill_pending_requests(self) -> None:
        """Extend the base class: requests that came while the last task was ending do not wait for the next one."""
        await super()._fulfill_pending_requests()
        if self._pending_requests_to_route:
            self._maybe_start_routing_tasks()

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> Any:
        """The request that was ranked. Its id is not enough: calls from within one HTTP request share it, and all but
        the last of them would never be sent."""
        waiting = (one for one in self._pending_requests_to_fulfill if one.metadata is request_metadata)
        return next((one for one in waiting if not one.future.done()), None)


class PrefillRouter(_Ranking):
    """Sends prompts where most of the prompt is cached and least is waiting."""

    def initialize_state(self, block_size: int) -> None:
        """Called by Serve with the deployment's `request_router_kwargs`."""
        super().initialize_state()
        self._book = PrefixBook(block_size)
        self._calls = _Calls(self._book.done)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Called by Serve when replicas come, go, or report something new."""
        super().update_replicas(replicas)
        self._book.keep_only(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            stats = replica.routing_stats
            self._book.update(replica.replica_id.unique_id, stats.get("blocks", b""), stats.get("backlog_tokens", 0))

    def rank(self, replicas: Mapping[str, Any], pending: Any) -> list[str]:
        """The replicas, the earliest done first."""
        request = _request(pending)
        prompt, scope = ((), "") if request is None else (request.prompt_token_ids, request.cache_scope)
        call = self._calls.of(pending)
        self._book.done(call)  # where it was meant to go before
        loads = self._book.loads(replicas, prompt, scope)
        ranked = rank_prefill(loads, len(prompt), str(call), _to_avoid(pending))
        self._book.meant(ranked[0], call, len(prompt))
        return ranked

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Called by Serve when a replica has taken a request."""
        request = _request(pending_request)
        if request is not None:
            call, caches = self._calls.of(pending_request), request.score_from is None
            self._book.sent(
                replica_id.unique_id, call, request.prompt_token_ids, caches=caches, scope=request.cache_scope
            )
        self._calls.routed(pending_request, result)


class DecodeRouter(_Ranking):
    """Sends streams to the replica of their session, or to the emptiest."""

    def initialize_state(self, max_num_seqs: int) -> None:
        """Called by Serve with the deployment's `request_router_kwargs`."""
        super().initialize_state()
        self._max_num_seqs = max_num_seqs
        self._running: dict[int, str] = {}  # replica, by call
        self._calls = _Calls(lambda call: self._running.pop(call, None))

    def rank(self, replicas: Mapping[str, Any], pending: Any) -> list[str]:
        """The replicas, the session's first, then the emptiest."""
        call = self._calls.of(pending)
        self._running.pop(call, None)  # where it was meant to go before
        here: dict[str, int] = dict.fromkeys(replicas, 0)
        for replica in tuple(self._running.values()):
            here[replica] = here.get(replica, 0) + 1
        loads = {
            name: DecodeLoad(
                float(one.routing_stats.get("kv_usage", 0.0)),
                max(float(one.routing_stats.get("running_share", 0.0)), here[name] / self._max_num_seqs),
            )
            for name, one in replicas.items()
        }
        ranked = rank_decode(loads, str(call), pending.metadata.session_id or "", _to_avoid(pending))
        self._running[call] = ranked[0]
        return ranked

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Called by Serve when a replica has taken a request."""
        self._running[self._calls.of(pending_request)] = replica_id.unique_id
        self._calls.routed(pending_request, result)


def _request(pending: Any) -> Request | None:
    first = pending.args[0] if pending.args else None
    return first if isinstance(first, Request) else None


def _to_avoid(pending: Any) -> Collection[str]:
    """The replicas that come last: an argument of `DecodeWorker.stream` and `EngineServer.replay`."""
    return pending.kwargs.get("avoid", ())  # type: ignore[no-any-return]
