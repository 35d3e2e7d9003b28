"""Messages between the bench and an engine's process: one JSON object a line.

Standard library only, as every worker of an engine that lives in an environment of its own must be.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class BatchOfPrompts:
    """Answer these prompts at once, each with exactly `max_tokens` tokens, ends of text notwithstanding."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    seed: int
    engine: str = ""  # which one of those that share the process is meant

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class Engine(Protocol):
    """The engine that a worker runs. max_streams: the most prompts at once; None = any number. versions: of what it
    runs on."""

    max_streams: int | None
    versions: dict[str, str]

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """A `Meter`'s sample, with what the engine can tell beyond it."""
        ...

    def processes(self) -> list[int]:
        """The ids of the processes whose memory is the engine's."""
        ...


@dataclass
class Meter:
    """Times what the streams of one batch emit; `at` is `time.perf_counter()`, now when not given."""

    num_streams: int
    began: float = field(default_factory=time.perf_counter)
    events: list[tuple[float, int, list[int]]] = field(default_factory=list)  # time, stream, token ids

    def emit(self, stream: int, token_ids: Sequence[int], at: float | None = None) -> None:
        """A stream gave tokens."""
        if token_ids:
            self.events.append((time.perf_counter() if at is None else at, stream, list(token_ids)))

    def sample(self) -> dict[str, Any]:
        """Seconds and tokens: of the whole batch, and of its decoding, once every stream had its first token."""
        answers: list[list[int]] = [[] for _ in range(self.num_streams)]
        first: dict[int, float] = {}
        for at, stream, token_ids in self.events:
            first.setdefault(stream, at)
            answers[stream] += token_ids
        decoding_from = max(first.values())
        ended = max(at for at, _, _ in self.events)
        return {
            "wall_s": ended - self.began,
            "first_token_s": [first[stream] - self.began for stream in sorted(first)],
            "num_tokens": sum(map(len, answers)),
            "decode_s": ended - decoding_from,
            "decode_tokens": sum(len(token_ids) for at, _, token_ids in self.events if at > decoding_from),
            "token_ids": answers,
        }


def serve(start: Callable[[dict[str, Any]], Engine]) -> None:
    """Start the engine that the first line asks for, then answer line by line until the input ends.

    Whatever a library prints goes to standard error: standard output belongs to the answers.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if engine is None:
                engine = start(asked)
                reported: dict[str, Any] = {"max_streams": engine.max_streams, "versions": engine.versions}
            else:
                ask = BatchOfPrompts(**asked)
                reported = checked(ask, engine.run(ask)) | {"memory": memory(engine.processes())}
        except Exception as error:
            traceback.print_exc()
            reported = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reported) + "\n")


def checked(ask: BatchOfPrompts, sample: dict[str, Any]) -> dict[str, Any]:
    """The sample, if every stream gave what was asked for. Raises RuntimeError: one gave fewer or more tokens; its
    speed would compare with nothing."""
    lengths = [len(answer) for answer in sample["token_ids"]]
    if lengths != [ask.max_tokens] * len(ask.prompts):
        raise RuntimeError(
            f"{ask.max_tokens} tokens were requested in each of {len(ask.prompts)} streams, got {lengths}."
        )
    return sample


def memory(pids: Sequence[int]) -> dict[str, float]:
    """Resident memory of the processes, MiB: now, and the sum of each one's peak. Linux; 0 elsewhere."""
    totals = {"resident_mib": 0.0, "peak_mib": 0.0}
    names = {"VmRSS": "resident_mib", "VmHWM": "peak_mib"}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has ended
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in names:
                totals[names[name]] += int(value.split()[0]) / 1024
    return totals
