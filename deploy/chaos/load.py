"""Ask more of the service than it can do, and see whether it says so in good order."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from deploy.chaos.streams import complete, until_admitted
from deploy.exchange.answers import Json
from deploy.exchange.client import AsyncClient, Attempt

Progress = Callable[[str], None]

ALLOWED = frozenset({200, 429, 503})
_SAMPLE_EVERY_S = 5.0  # a sample walks over the pages of all replicas
_MIB = 2**20
_OK = 200


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One stretch of load. Latencies are those of requests that were let in, in seconds."""

    rate_per_s: float  # that requests came at
    seconds: float
    statuses: dict[str, int]  # how often each HTTP status was answered; 0 = no answer
    broken: int  # let in, and not complete
    served_per_s: float
    first_token_p50_s: float
    first_token_p95_s: float
    whole_p50_s: float
    whole_p95_s: float
    whole_max_s: float
    memory_begin_mib: float  # of replicas and object store, median of the first quarter
    memory_end_mib: float  # of the last quarter

    @property
    def in_order(self) -> bool:
        """Return whether nothing but full service and polite refusals was seen."""
        return self.broken == 0 and {int(status) for status in self.statuses} <= ALLOWED

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def saturation_per_s(base_url: str, bodies: Sequence[Json], concurrency: int, seconds: float) -> float:
    """Requests a second that the service completes when this many clients ask without a pause.

    Args:
        base_url: of the service.
        bodies: asked in turn, again and again.
        concurrency: clients; as many as the service lets in at once.
        seconds: how long they ask.
    """
    return asyncio.run(_closed_loop(base_url, bodies, concurrency, seconds))


async def _closed_loop(base_url: str, bodies: Sequence[Json], concurrency: int, seconds: float) -> float:
    num_warm = num_completed = 0
    counts_until: float | None = None  # it counts from when every client has had its first answer
    async with AsyncClient(base_url) as http:

        async def client(number: int) -> None:
            nonlocal num_warm, num_completed, counts_until
            await until_admitted(http, bodies[number % len(bodies)])
            num_warm += 1
            if num_warm == concurrency:
                counts_until = time.monotonic() + seconds
            while counts_until is None or time.monotonic() < counts_until:
                number += concurrency
                attempt = await until_admitted(http, bodies[number % len(bodies)])
                num_completed += complete(attempt) and counts_until is not None and time.monotonic() < counts_until

        await asyncio.gather(*(client(number) for number in range(concurrency)))
    return num_completed / seconds


def run_load(
    base_url: str, bodies: Sequence[Json], rate_per_s: float, seconds: float, memory_bytes: Callable[[], int], seed: int
) -> LoadFigures:
    """Send requests at a rate, at times drawn as a Poisson process, whether or not the earlier ones are answered."""
    return asyncio.run(_open_loop(base_url, bodies, rate_per_s, seconds, memory_bytes, seed))


async def _open_loop(
    base_url: str, bodies: Sequence[Json], rate_per_s: float, seconds: float, memory_bytes: Callable[[], int], seed: int
) -> LoadFigures:
    rng = random.Random(seed)
    memory: list[int] = []
    sampling = asyncio.create_task(_sample(memory, memory_bytes))
    began = time.monotonic()
    asking: list[asyncio.Task[Attempt]] = []
    async with AsyncClient(base_url) as http:
        due = began
        while (due := due + rng.expovariate(rate_per_s)) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            asking.append(asyncio.create_task(http.ask(bodies[len(asking) % len(bodies)])))
        attempts = await asyncio.gather(*asking)
    elapsed = time.monotonic() - began
    sampling.cancel()
    return _figures(attempts, rate_per_s, elapsed, memory)


async def _sample(memory: list[int], memory_bytes: Callable[[], int]) -> None:
    while True:
        memory.append(await asyncio.to_thread(memory_bytes))
        await asyncio.sleep(_SAMPLE_EVERY_S)


def _figures(attempts: Sequence[Attempt], rate_per_s: float, elapsed_s: float, memory: Sequence[int]) -> LoadFigures:
    admitted = [one for one in attempts if one.status == _OK]
    whole = [one for one in admitted if complete(one)]
    quarter = max(1, len(memory) // 4)
    first_s, whole_s = [one.first_s for one in whole], [one.seconds for one in whole]
    return LoadFigures(
        rate_per_s=round(rate_per_s, 2),
        seconds=round(elapsed_s, 1),
        statuses={str(status): count for status, count in sorted(Counter(one.status or 0 for one in attempts).items())},
        broken=len(admitted) - len(whole),
        served_per_s=round(len(whole) / elapsed_s, 2),
        first_token_p50_s=quantile(first_s, 0.5),
        first_token_p95_s=quantile(first_s, 0.95),
        whole_p50_s=quantile(whole_s, 0.5),
        whole_p95_s=quantile(whole_s, 0.95),
        whole_max_s=quantile(whole_s, 1.0),
        memory_begin_mib=round(statistics.median(memory[:quarter] or [0]) / _MIB, 1),
        memory_end_mib=round(statistics.median(memory[-quarter:] or [0]) / _MIB, 1),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed; 0 of none."""
    ordered = sorted(values)
    return round(ordered[max(0, -int(-len(ordered) * share // 1) - 1)], 3) if ordered else 0.0
