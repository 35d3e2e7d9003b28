"""`truespec batch`: answer a file of requests, each line once, however often the run is interrupted.

On a Ray cluster: `ray job submit -- truespec batch IN OUT --config FILE`.
"""

import asyncio
import contextlib
import email.utils
import json
import random
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.exchange.client import ServiceError
from deploy.jobs.batch_files import ID_PREFIX, BatchInput, BatchLine, BatchOutput
from deploy.reports.progress import View

_LONGEST_WAIT_S = 300.0  # between two attempts, whatever a server asks for
_LONGEST_BACKOFF_S = 60.0
_VERIFIED_URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_ERROR_TEXT = 1000  # characters kept of an answer that is not JSON
_FIRST_RETRIES = 4  # at most, for a server that has never answered: no long wait for a wrong URL


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The way in which the requests are sent.

    url: of the server, with or without /v1.
    concurrency: requests in flight.
    retries: tries of a request after the first one.
    timeout_s: of one try.
    verify: ask for the verdict of every generated answer.
    api_key: sent as a bearer token; None sends none.
    backoff_s: wait before the second try, where the server does not say how long; doubles with each further try.
    """

    url: str
    concurrency: int = 16
    retries: int = 8
    timeout_s: float = 600.0
    verify: bool = False
    api_key: str | None = None
    backoff_s: float = 1.0


class BatchStopped(ServiceError):
    """The batch cannot continue now; what was answered is kept."""


def run_batch(batch: BatchInput, output: BatchOutput, options: BatchOptions, view: View) -> dict[str, Any]:
    """Answer every line that is missing in the output, and return the figures of the output and of this run.

    Raises:
        BatchStopped: interrupted, the server is gone, or it refuses the key; the same call continues from there.
    """
    return asyncio.run(_Sender(batch, output, options, view).run())


def retry_wait_s(tries: int, retry_after: str | None, first_s: float, spread: float) -> float:
    """Seconds before the next try: what the server asked for, else doubling from `first_s`.

    Args:
        tries: made so far, 1 or more.
        retry_after: the header: seconds or an HTTP date (RFC 9110, 10.2.3); None where there is none.
        first_s: the first wait without a header.
        spread: 0 to 1, the share of a quarter that is added as jitter, so that many clients do not retry at once.
    """
    asked = _asked_wait_s(retry_after)
    wait = min(_LONGEST_BACKOFF_S, first_s * 2 ** (tries - 1)) if asked is None else asked
    return min(_LONGEST_WAIT_S, wait * (1 + spread / 4))


def _asked_wait_s(retry_after: str | None) -> float | None:
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class _Try:
    """The end of one try: an answer, or an error without one; `retry_after` as the server sent it."""

    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    retry_after: str | None = None

    @property
    def is_worth_another(self) -> bool:
        if self.response is None:
            return True
        status = self.response["status_code"]
        return bool(status in (408, 429) or status >= 500)


class _Sender:
    """One run over the rest of a batch."""

    def __init__(self, batch: BatchInput, output: BatchOutput, options: BatchOptions, view: View) -> None:
        self._batch, self._output, self._options, self._view = batch, output, options, view
        self._done_before = len(output.done)
        self._retries = 0
        self._has_answered = False
        self._failures_said = 0  # since the server answered last
        self._answered: list[dict[str, Any]] = []  # not on the disk yet
        self._writing = asyncio.Lock()
        self._began = time.monotonic()

    async def run(self) -> dict[str, Any]:
        left = len(self._batch) - self._done_before
        self._view.say(f"{len(self._batch)} requests, {self._done_before} of them done; {left} to do")
        self._view.stage("answering")
        lines = self._batch.lines(but=self._output.done)
        try:
            async with self._client() as client, _stop_on_signals(), asyncio.TaskGroup() as workers:
                for _ in range(min(self._options.concurrency, left)):
                    workers.create_task(self._work(client, lines))
        except BaseExceptionGroup as ended:
            stopped, others = ended.split(BatchStopped)
            if stopped is None or others is not None:
                raise
            raise BatchStopped(f"{stopped.exceptions[0]} {self._how_far()}") from stopped
        except asyncio.CancelledError as cancelled:
            raise BatchStopped(f"Interrupted. {self._how_far()}") from cancelled
        finally:
            self._output.append(self._answered)
        return self._figures()

    def _client(self) -> httpx.AsyncClient:
        key = self._options.api_key
        return httpx.AsyncClient(
            base_url=self._options.url.rstrip("/").removesuffix("/v1"),
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=self._options.timeout_s,
            limits=httpx.Limits(max_connections=self._options.concurrency),
        )

    async def _work(self, client: httpx.AsyncClient, lines: Iterator[BatchLine]) -> None:
        """Take line after line, until none is left."""
        for line in lines:
            await self._keep(await self._answer(client, line))

    async def _answer(self, client: httpx.AsyncClient, line: BatchLine) -> dict[str, Any]:
        """The line's result, after as many attempts as needed and allowed."""
        request_id = f"{ID_PREFIX}{uuid.uuid4().hex}"
        tries = 1
        while (ended := await self._try(client, line, request_id)).is_worth_another and tries <= self._most_retries:
            wait = retry_wait_s(tries, ended.retry_after, self._options.backoff_s, random.random())
            self._report(ended, tries, wait)
            await asyncio.sleep(wait)
            tries += 1
            self._retries += 1
        if ended.error is not None and ended.error["code"] == "unreachable":
            raise BatchStopped(
                f"{self._options.url} cannot be reached: {ended.error['message']}, tried {tries} times. Start the "
                "server, or check --url."
            )
        return {"id": request_id, "custom_id": line.custom_id, "response": ended.response, "error": ended.error}

    @property
    def _most_retries(self) -> int:
        return self._options.retries if self._has_answered else min(self._options.retries, _FIRST_RETRIES)

    def _report(self, ended: _Try, tries: int, wait_s: float) -> None:
        """Report that the server is unreachable, or reachable again: once for all requests in flight."""
        if ended.error is None or ended.error["code"] != "unreachable" or tries <= self._failures_said:
            return
        self._failures_said = tries
        self._view.say(
            f"{self._options.url} does not answer ({ended.error['message']}); retry {tries} of {self._most_retries} in "
            f"{wait_s:.0f} s"
        )

    async def _try(self, client: httpx.AsyncClient, line: BatchLine, request_id: str) -> _Try:
        body = {"verify": True, **line.body} if self._options.verify and line.url in _VERIFIED_URLS else line.body
        try:
            # By json itself: httpx's own way fails at what an input file may hold (NaN, half a surrogate pair).
            headers = {"content-type": "application/json", "x-request-id": request_id}
            response = await client.post(line.url, content=json.dumps(body), headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return _Try(error={"code": "unreachable", "message": _reported(error)})
        except httpx.TimeoutException as error:
            return _Try(error={"code": "timeout", "message": _reported(error)})
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:  # not shown: it may contain the key
            reported = f"{self._options.url} cannot be asked ({type(error).__name__}); check the URL and the key."
            raise BatchStopped(reported) from error
        except httpx.TransportError as error:
            return _Try(error={"code": "connection_broken", "message": _reported(error)})
        if self._failures_said:
            self._view.say(f"{self._options.url} answers again")
        self._has_answered, self._failures_said = True, 0
        if response.status_code in (401, 403):
            raise BatchStopped(f"{self._options.url} refuses the key ({response.status_code}): {response.text[:200]}")
        answer = {
            "status_code": response.status_code,
            # A proxy may have added the header again.
            "request_id": next(iter(response.headers.get_list("x-request-id")), request_id),
            "body": _body(response),
        }
        return _Try(response=answer, retry_after=response.headers.get("retry-after"))

    async def _keep(self, result: dict[str, Any]) -> None:
        """Write a result to disk; those that arrive during a write are written together."""
        self._answered.append(result)
        async with self._writing:
            together, self._answered = self._answered, []
            if together:
                await asyncio.to_thread(self._output.append, together)
        tally = self._output.tally
        speed = (tally.done - self._done_before) / max(1e-9, time.monotonic() - self._began)
        note = f"{tally.done} of {len(self._batch)} requests, {tally.failed} failed, {speed:.2f}/s"
        self._view.advance(tally.done / len(self._batch), note)

    def _how_far(self) -> str:
        done = self._output.tally.done + len(self._answered)
        return f"{done} of {len(self._batch)} requests are done; the same command continues from there."

    def _figures(self) -> dict[str, Any]:
        tally = self._output.tally
        return {
            "requests": len(self._batch),
            "done": tally.done,
            "done_before": self._done_before,
            "failed": tally.failed,
            "failures": dict(tally.failures),
            "verdicts": dict(tally.verdicts),
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "retries": self._retries,
            "seconds": round(time.monotonic() - self._began, 3),
        }


@contextlib.asynccontextmanager
async def _stop_on_signals() -> AsyncIterator[None]:
    """Within the block, an interrupt and a request to terminate cancel the task that entered it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _body(response: httpx.Response) -> dict[str, Any]:
    """The answer's object; anything else (a proxy's page, say) is reported as an error."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    return {"error": {"message": response.text[:_ERROR_TEXT], "type": "not_json", "param": None, "code": "not_json"}}


def _reported(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def summary(figures: dict[str, Any]) -> list[str]:
    """The final summary for people, line by line."""
    lines = [
        f"{figures['done']} of {figures['requests']} requests done, {figures['done_before']} of them before; "
        f"{figures['completion_tokens']} tokens written from {figures['prompt_tokens']}; "
        f"{figures['retries']} retries; {figures['seconds']:.1f} s"
    ]
    if figures["verdicts"]:
        lines.append("verdicts: " + _counts(figures["verdicts"]))
    if figures["failed"]:
        lines.append(f"{figures['failed']} failed: {_counts(figures['failures'])}")
    return lines


def complaint(figures: dict[str, Any]) -> str | None:
    """Return what is wrong with a finished batch; None if every line has an answer and none is suspect."""
    suspect = figures["verdicts"].get("suspect", 0)
    if unread := figures["requests"] - figures["done"]:
        return f"{unread} requests were not read; did the input change?"
    if figures["failed"]:
        return f"{figures['failed']} requests have no answer; their lines say why. --retry-failed asks them again."
    if suspect:
        return f"{suspect} answers are suspect: their replay did not confirm them. Do not use these."
    return None


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
