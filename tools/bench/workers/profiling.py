"""The time of a step by its parts, measured from outside the engine: they are wrapped, and unwrapped again."""

import time
from collections.abc import Callable
from typing import Any

import torch

from speculative.drafting.cpu_loop import FusedDraftLoop
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.engine import EngineCore
from speculative.step import sampler

TARGET, DRAFTER, VOCABULARY, CHECKS, OTHER = "target", "drafter", "vocabulary", "checks", "other"
PARTS = (TARGET, DRAFTER, VOCABULARY, CHECKS, OTHER)


class Profile:
    """Counts from its making to `end`.

    target: the model's forward and its LM head. drafter: those of a drafter with weights (and the draws, where one call
    makes all drafts of a round), or the whole of one that looks up. vocabulary: arithmetic over the vocabulary, that is
    processors, softmax, verification, draws, logprobs. checks: the self-checks. other: the rest of the step:
    scheduling, packing, copies, bookkeeping. A part inside another counts as its own.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._clock = _synchronized if engine.device.type == "cuda" else time.perf_counter
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = 0
        self._running: list[str] = []
        self._since = 0.0
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._wrap(engine.runner, "forward_with_features", TARGET)
        self._wrap(engine.runner, "logits", TARGET)
        if isinstance(engine.drafter, ModelDrafter):
            for name in ("fuse", "run", "logits"):
                self._wrap(engine.drafter.model, name, DRAFTER)
            self._wrap(engine.drafter.sampler, "draw", VOCABULARY)
            if isinstance(engine.drafter.draft_loop, FusedDraftLoop):
                self._wrap(engine.drafter.draft_loop.head, "draft", DRAFTER)
        else:
            self._wrap(engine.drafter, "propose", DRAFTER)
        if engine.graphs is not None:  # a replayed step is seen from outside: its LM head and checks are vocabulary
            self._wrap(engine.graphs.runner.target, "run", TARGET)
            self._wrap(engine.graphs.judge, "run", VOCABULARY)
            if isinstance(engine.drafter, ModelDrafter):
                self._wrap(engine.drafter, "begin_round", DRAFTER)
                self._wrap(engine.graphs.loop, "run", DRAFTER)
        for name in ("adjust", "logprobs_to_host"):
            self._wrap(sampler, name, VOCABULARY)
        for name in ("process", "target_probs"):
            self._wrap(engine.ops, name, VOCABULARY)
        self._wrap(engine.sampler, "_verify", VOCABULARY)
        for owner, names in (
            (engine.checked_sampler, ("_check_on_device", "check")),
            (engine.self_check, ("admit", "take")),
        ):
            for name in names:
                self._wrap(owner, name, CHECKS)
        self._wrap(engine, "step", OTHER)

    def end(self) -> dict[str, float]:
        """Take the wrappers off; the seconds of each part, and the number of steps."""
        for owner, name, original in self._wrapped:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return {"num_steps": self._num_steps} | {f"{part}_s": seconds for part, seconds in self._seconds.items()}

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time between entries and exits for the innermost part that runs."""
        wrapped: Callable[..., Any] = getattr(owner, name)
        running, seconds, clock = self._running, self._seconds, self._clock

        def timed(*args: Any, **options: Any) -> Any:
            now = clock()
            if running:
                seconds[running[-1]] += now - self._since
            else:
                self._num_steps += 1
            running.append(part)
            self._since = now
            try:
                return wrapped(*args, **options)
            finally:
                now = clock()
                seconds[running.pop()] += now - self._since
                self._since = now

        self._wrapped.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, timed)


def _synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
