"""vLLM's own counters, and ours of what it said, in the words of our catalogue."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from serve_app.backends.vllm_parts.deltas import SpeculationRound
from speculative.request import Request, TokenDelta
from speculative.stats import EngineUsage, Evidence, StepStats


class Counts:
    """Counts of one engine since the last time, and what it holds. Used from the event loop only."""

    def __init__(self) -> None:
        self._num_blocks = self._block_size = 1
        self._stats = StepStats()
        self._kv_usage = 0.0
        self._num_running = 0
        self._accepted = self._expected = 0.0  # since they were last compared; what is not reported yet
        self.last_step_at = time.monotonic()  # when vLLM last reported one

    def set_sizes(self, num_blocks: int, block_size: int) -> None:
        """Set the size of vLLM's cache: its blocks, and the tokens of each."""
        self._num_blocks, self._block_size = num_blocks, block_size

    def begin(self) -> None:
        """A request comes; when none was there before, the time until its first step begins now."""
        self.last_step_at = time.monotonic()

    def add_step(self, scheduler: Any, iteration: Any) -> None:
        """Take in vLLM's counters of a step. The time since the last step, or since work came, stands for its own."""
        now = time.monotonic()
        stats = self._stats
        stats.num_steps += 1
        stats.verify_s += now - self.last_step_at
        self.last_step_at = now
        if scheduler is not None:
            self._kv_usage, self._num_running = scheduler.kv_cache_usage, scheduler.num_running_reqs
            stats.prefix_cache_queries += scheduler.prefix_cache_stats.queries
            stats.prefix_cache_hits += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            stats.num_preemptions += iteration.num_preempted_reqs
            stats.num_prompt_tokens += iteration.prompt_token_stats.computed

    def add_rounds(self, request: Request, delta: TokenDelta, rounds: Sequence[SpeculationRound]) -> None:
        """Count what one request was given. vLLM's own counts of drafts have placeholders among them."""
        stats = self._stats
        stats.num_emitted += len(delta.token_ids)
        for one in rounds:
            stats.count_round(one.num_drafted, one.num_accepted)
            self._accepted += one.num_accepted
            if request.params.returns_logprobs:
                stats.num_rounds_with_logprobs += 1
                stats.num_drafted_with_logprobs += one.num_drafted

    def add_excess(self, excess: float) -> None:
        """Count the drafts that were expected to be accepted since the last call: those that were, and so many more.

        vLLM's probabilities are known of checked steps alone, and `excess` is theirs: what was accepted stands for
        itself elsewhere, so that chance puts no more between the two counts than in our own engine. A counter cannot
        fall: what is below 0 waits.
        """
        expected = self._expected + self._accepted + excess
        self._accepted, self._expected = 0.0, min(expected, 0.0)
        self._stats.expected_accepted += max(expected, 0.0)

    def add_breach(self, kind: str, evidence: Evidence) -> None:
        """Logprobs broke their contract."""
        self._stats.evidence += (evidence,)
        self._stats.logprob_violations[kind] = self._stats.logprob_violations.get(kind, 0) + 1

    @property
    def stats(self) -> StepStats:
        """The counts so far, to be added to."""
        return self._stats

    def take(self) -> StepStats:
        """Counts since the last call."""
        taken, self._stats = self._stats, StepStats()
        return taken

    def usage(self, num_live: int, num_replays: int) -> EngineUsage:
        """Return what the engine holds, where so many requests are there, so many of them replays. vLLM reports nothing
        while it stands still, and counts replays like other requests: they are taken for those that run."""
        used = math.ceil(self._kv_usage * self._num_blocks) if num_live else 0
        num_running = max(min(num_live, self._num_running) - num_replays, 0)
        return EngineUsage(
            num_running=num_running,
            num_waiting=num_live - num_replays - num_running,
            num_held=0,
            num_free_blocks=self._num_blocks - used,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            num_replays=num_replays,
        )


def logger_for(take_in: Callable[[Any, Any], None]) -> Callable[[Any, int], StatLoggerBase]:
    """vLLM's factory of a logger that passes its counters on."""

    class Logger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            take_in(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger
