"""Send the requests of a batch that have no line in its output yet."""

import asyncio
import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.exchange.client import AsyncClient, Attempt, Client, ServiceError
from deploy.jobs.batch_files import BatchOutput, BatchRequest
from deploy.reports.progress import View

_LONGEST_WAIT_S = 300.0  # between two tries, whatever a server asks for


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The way in which requests are sent."""

    url: str
    concurrency: int = 16  # requests in flight
    retries: int = 8  # tries of a request after the first one
    timeout: float = 600.0  # of one try, seconds
    verify: bool = False  # ask for the verdict of every answer
    api_key: str | None = None  # sent as a bearer token; None sends none


def run_batch(requests: Mapping[str, BatchRequest], output: BatchOutput, options: BatchOptions, view: View) -> None:
    """Send every request that the output does not have, and add its answer or refusal.

    One that got neither, after all its tries, is reported and left out, so that the next run sends it again. Raises
    ServiceError: the server is gone, or it refuses the key."""
    try:
        asyncio.run(_send([requests[one] for one in requests if one not in output.outcomes], output, options, view))
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


def retry_wait_s(tries: int, retry_after: str) -> float:
    """Seconds before the next try: those of the server's header, else 1, 2, 4 and so on to 60."""
    doubled = min(60.0, 2.0 ** (tries - 1))
    return min(_LONGEST_WAIT_S, float(retry_after) if retry_after.isdecimal() else doubled)


async def _send(left: list[BatchRequest], output: BatchOutput, options: BatchOptions, view: View) -> None:
    view.stage(f"answering {len(left)} requests", lambda: f"{len(output.outcomes)} done, with those of earlier runs")
    requests = iter(left)
    async with AsyncClient(options.url, options.api_key, options.timeout) as client, asyncio.TaskGroup() as workers:

        async def work() -> None:
            for request in requests:
                attempt = await _ask(client, request, options, view)
                if attempt.status in (401, 403):
                    raise ServiceError(f"{options.url} refuses the key ({attempt.reported()}).")
                body = _object(attempt.content)
                is_final = attempt.refused and not _may_pass(attempt)
                if body is not None and (is_final or (attempt.status == 200 and not body.get("error"))):
                    output.append(request.custom_id, attempt, body)
                    continue
                view.say(f"{request.custom_id} has no answer: {attempt.reported()}")
                if attempt.status in (None, 404) and not await asyncio.to_thread(_is_alive, options):
                    raise ServiceError(f"{options.url} does not answer; run the same command when it does.")

        for _ in range(options.concurrency):
            workers.create_task(work())


async def _ask(client: AsyncClient, request: BatchRequest, options: BatchOptions, view: View) -> Attempt:
    """The last of as many tries as needed and allowed."""
    body = {"verify": True, **request.body} if options.verify else request.body
    for tries in itertools.count(1):
        attempt = await client.ask(body, request.path)
        if not _may_pass(attempt) or tries > options.retries:
            break
        wait_s = retry_wait_s(tries, attempt.headers.get("retry-after", "")) * random.uniform(1, 1.25)
        view.say(f"{request.custom_id}: {attempt.reported()}; retry {tries} of {options.retries} in {wait_s:.0f} s")
        await asyncio.sleep(wait_s)
    return attempt


def _may_pass(attempt: Attempt) -> bool:
    if attempt.status == 404:  # a server's own is JSON; a proxy that starts and knows no application yet has text
        return _object(attempt.content) is None
    return attempt.status is None or attempt.status in (408, 429) or attempt.status >= 500


def _is_alive(options: BatchOptions) -> bool:
    with Client(options.url, options.api_key, timeout_s=10) as client:
        return client.alive()


def _object(content: bytes) -> dict[str, Any] | None:
    """The object of a reply; None where it is something else, a proxy's page say."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
