"""The referee has finished requests computed again, without speculation and on fresh KV, and compares the logprobs.

With g the logprob that was served and t the replayed one, TME (token multiplicative probability error, NeMo-RL) is the
mean of exp|g - t|: 1.00 in float32, up to 1.03 in bfloat16.
"""

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from serve_app.metric_names import DRIFT_CLIP_NATS, DRIFT_THRESHOLDS_NATS
from serve_app.metrics import Metrics

_logger = logging.getLogger("truespec.referee")

Replay = Callable[[Sequence[int], int], Awaitable[list[float]]]
"""(token ids, first) -> teacher-forced raw logprobs of token_ids[first:]."""


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A finished request to check: its tokens, where its output begins, and the logprobs served for the output."""

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt: int
    logprobs: tuple[float, ...]


def chosen(request_id: str, share: float) -> bool:
    """Whether a request is in the replayed share: a function of its id alone, so that every replica agrees."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


class Referee:
    """Replays jobs one after another from a bounded queue; a job that finds it full is skipped and counted."""

    def __init__(self, replay: Replay, metrics: Metrics, max_queue: int) -> None:
        self._replay = replay
        self._metrics = metrics
        self._max_queue = max_queue
        self._queue: deque[ReplayJob] = deque()
        self._wake = asyncio.Event()
        for result in ("ok", "failed", "skipped"):
            metrics.count("truespec_replays_total", 0, result=result)

    def submit(self, job: ReplayJob) -> None:
        """Queue a job; returns at once."""
        if len(self._queue) >= self._max_queue:
            self._metrics.count("truespec_replays_total", result="skipped")
            return
        self._queue.append(job)
        self._wake.set()

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        while True:
            while self._queue:
                await self._check(self._queue.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _check(self, job: ReplayJob) -> None:
        try:
            replayed = await self._replay(job.token_ids, job.num_prompt)
            drifts = [_drift(*pair) for pair in zip(job.logprobs, replayed, strict=True)]
        except Exception as error:  # a replica died, or was too busy: the check is lost, the referee is not
            self._metrics.count("truespec_replays_total", result="failed")
            _logger.warning("replay of %s failed: %s", job.request_id, error)
            return
        self._record(job, drifts)

    def _record(self, job: ReplayJob, drifts: Sequence[float]) -> None:
        for drift in drifts:
            self._metrics.observe("truespec_replay_drift_nats", min(drift, DRIFT_CLIP_NATS))
        for threshold in DRIFT_THRESHOLDS_NATS:
            over = sum(drift > threshold for drift in drifts)
            self._metrics.count("truespec_replay_drift_over_total", over, nats=f"{threshold:g}")
        excess = sum(math.expm1(min(drift, DRIFT_CLIP_NATS)) for drift in drifts)
        self._metrics.count("truespec_replay_tme_excess_total", excess)
        self._metrics.count("truespec_replay_tokens_total", len(drifts))
        self._metrics.count("truespec_replays_total", result="ok")
        _logger.debug("replayed %s: worst drift %.2g nats", job.request_id, max(drifts, default=0.0))


def _drift(served: float, replayed: float) -> float:
    """|served - replayed| in nats; what is no number has drifted without bound."""
    drift = abs(served - replayed)
    return math.inf if math.isnan(drift) else drift
