"""Ask the same questions twice, the second time while replicas are killed, and compare what clients received."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import httpx

from deploy.exchange.client import Attempt
from serve_app.referee.wire.reply import Json
from tools.chaos.replicas import Killer, ObjectStore, num_nodes
from tools.chaos.streams import ask_all, complete, differences

Progress = Callable[[str], None]

_HELD = {
    "requests": ("truespec_requests_in_flight", "truespec_requests_running", "truespec_requests_waiting"),
    "kv_blocks": ("truespec_kv_cache_usage_ratio",),
    "replays": ("truespec_replay_lag_seconds", "truespec_replays_running"),
}
_TIMED_HANDOFFS = 40
_COUNTED_WITHIN_S = 10.0  # replicas report every second
_IDLE_WITHIN_S = 90.0  # dead replicas' gauges vanish after some seconds


@dataclass(frozen=True, slots=True)
class ChaosFigures:
    """The results of a run. Tokens are counted over all requests."""

    requests: int
    complete: int
    identical: int
    duplicated_tokens: int
    missing_tokens: int
    leaks: int  # requests, KV blocks, replays and objects still held with no client left
    nodes: int  # that it ran on
    kills: int
    kills_by_deployment: dict[str, int]
    nodes_killed: int  # whole, with a replica that counts among the kills
    leaked: dict[str, float]
    unpinned_objects: int  # that the object store keeps until it needs the space
    resumed: int  # requests that continued on another replica
    prefill_failures: int
    handoff_mib: float  # mean, of requests that came one at a time
    handoff_transfer_ms: float  # mean, from the prefill replica to the one that decodes, and the call's way there
    tokens: int
    undisturbed_s: float
    disturbed_s: float
    errors: list[str]  # of requests that did not complete

    @property
    def sound(self) -> bool:
        """Return whether nothing was lost, repeated, changed or leaked."""
        damage = self.duplicated_tokens + self.missing_tokens + self.leaks
        return self.complete == self.identical == self.requests and not damage

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Strikes:
    """Times at which replicas are killed."""

    every_s: float
    longest_s: float  # no more after that
    most: int | None = None  # no more than so many; None = any number


class _Service:
    """The service's reports about itself."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def total(self, name: str, **labels: str) -> float:
        """A metric, summed over all series with these labels."""
        text = httpx.get(f"{self._base_url}/metrics", timeout=60).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))

    def held(self) -> dict[str, float]:
        """Return what is held, by kind."""
        return {kind: sum(self.total(name) for name in names) for kind, names in _HELD.items()}


def run_chaos(
    base_url: str, killer: Killer, bodies: Sequence[Json], concurrency: int, strikes: Strikes, progress: Progress
) -> ChaosFigures:
    """Ask, ask again under fire, wait for quiet, and compare."""
    service, nodes = _Service(base_url), num_nodes()
    progress(f"{_TIMED_HANDOFFS} short requests, one at a time, which times handoffs")
    handoff_mib, handoff_transfer_ms = _timed_handoffs(base_url, service, bodies)
    progress(f"{len(bodies)} requests, {concurrency} at once, undisturbed")
    undisturbed, undisturbed_s = _asked(base_url, bodies, concurrency, progress)
    _wait_for_quiet(service)
    before = ObjectStore.read()
    resumed, failed = _recoveries(service)
    progress(f"the same, and about every {strikes.every_s:g} s a replica is killed, or its node with it")
    with _under_fire(killer, strikes, progress):
        disturbed, disturbed_s = _asked(base_url, bodies, concurrency, progress)
    progress("waiting for the pools to be whole, and for quiet")
    killer.wait_until_whole()
    leaked, unpinned = _leaked(service, before)
    resumed_now, failed_now = _recoveries(service)
    found = [differences(one, other) for one, other in zip(undisturbed, disturbed, strict=True)]
    failures = [f"{one.status or 0} {one.error}" for one in disturbed if not complete(one)]
    return ChaosFigures(
        requests=len(bodies),
        complete=sum(map(complete, disturbed)),
        identical=sum(one.identical for one in found),
        duplicated_tokens=sum(one.duplicated_tokens for one in found),
        missing_tokens=sum(one.missing_tokens for one in found),
        leaks=sum(value > 0 for value in leaked.values()),
        nodes=nodes,
        kills=sum(killer.kills.values()),
        kills_by_deployment=dict(killer.kills),
        nodes_killed=killer.nodes_killed,
        leaked=leaked,
        unpinned_objects=unpinned,
        resumed=int(resumed_now - resumed),
        prefill_failures=int(failed_now - failed),
        handoff_mib=handoff_mib,
        handoff_transfer_ms=handoff_transfer_ms,
        tokens=sum(len(one.reply.first.token_ids or ()) for one in disturbed),
        undisturbed_s=round(undisturbed_s, 1),
        disturbed_s=round(disturbed_s, 1),
        errors=[re.sub(r"(/[\w.-]+)+", "…", failure)[:200] for failure in failures],  # without processes and paths
    )


def _asked(base_url: str, bodies: Sequence[Json], concurrency: int, progress: Progress) -> tuple[list[Attempt], float]:
    def done(number: int) -> None:
        if number % max(1, len(bodies) // 10) == 0:
            progress(f"  {number} of {len(bodies)}")

    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may have an event loop of its own
        reported = thread.submit(lambda: asyncio.run(ask_all(base_url, bodies, concurrency, done))).result()
    return reported, time.monotonic() - began


def _timed_handoffs(base_url: str, service: _Service, bodies: Sequence[Json]) -> tuple[float, float]:
    """Mean MiB of a handoff, and mean ms that its transfer takes where nothing else goes on; zeros without handoffs."""

    def counts() -> tuple[float, float, float]:
        number = service.total("truespec_handoffs_total", result="ok")
        seconds = service.total("truespec_handoff_seconds_total", phase="transfer")
        return number, service.total("truespec_handoff_bytes_total"), seconds

    before = counts()
    short = [bodies[number % len(bodies)] | {"max_tokens": 4} for number in range(_TIMED_HANDOFFS)]
    _asked(base_url, short, 1, lambda line: None)
    deadline = time.monotonic() + _COUNTED_WITHIN_S
    while (after := counts())[0] < before[0] + _TIMED_HANDOFFS and time.monotonic() < deadline:
        time.sleep(0.5)
    number, num_bytes, seconds = (now - then for now, then in zip(after, before, strict=True))
    return (round(num_bytes / number / 2**20, 2), round(1000 * seconds / number, 2)) if number else (0.0, 0.0)


def _recoveries(service: _Service) -> tuple[float, float]:
    return service.total("truespec_resumes_total", result="resumed"), service.total("truespec_prefill_failures_total")


@contextmanager
def _under_fire(killer: Killer, strikes: Strikes, progress: Progress) -> Iterator[None]:
    over = threading.Event()
    deadline = time.monotonic() + strikes.longest_s

    def fire() -> None:
        while not over.wait(strikes.every_s) and time.monotonic() < deadline:
            if sum(killer.kills.values()) == strikes.most:
                return
            if killer.strike():
                progress(f"  killed so far: {killer.kills}, whole nodes: {killer.nodes_killed}")

    with ThreadPoolExecutor(1) as thread:
        firing = thread.submit(fire)
        try:
            yield
        finally:
            over.set()
            firing.result()


def _leaked(service: _Service, before: ObjectStore) -> tuple[dict[str, float], int]:
    """Return what is held although there are no requests, and the new objects that are not held."""
    held = _wait_for_quiet(service)
    deadline = time.monotonic() + _IDLE_WITHIN_S
    while (after := ObjectStore.read()).num_pinned > before.num_pinned and time.monotonic() < deadline:
        time.sleep(1.0)
    leaked = held | {"pinned_objects": max(0, after.num_pinned - before.num_pinned)}
    return leaked, max(0, after.num_unpinned - before.num_unpinned)


def _wait_for_quiet(service: _Service) -> dict[str, float]:
    deadline = time.monotonic() + _IDLE_WITHIN_S
    while any((held := service.held()).values()) and time.monotonic() < deadline:
        time.sleep(1.0)
    return held
