"""Our engine, without a server around it."""

import importlib.metadata
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from deploy.bench.workers.channel import Ask, Meter, serve
from deploy.bench.workers.profiling import Profile
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import EngineFault
from speculative.model.loading import choose_weights
from speculative.request import Request, SamplingParams


class Ours:
    """An `EngineCore` on this process's main thread."""

    max_streams: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        drafter = DrafterConfig(**settings["drafter"])
        config = EngineConfig(**settings["engine"], drafter=drafter)
        folder = Path(settings["model"])
        self._engine = EngineCore.load(folder, config)
        weights = choose_weights(config.weights, folder, dtype=config.dtype, device=self._engine.device)
        self._names = (f"bench-{number}" for number in count())
        self.versions = {"truespec": importlib.metadata.version("truespec"), "torch": torch.__version__}
        self.versions["weights"] = weights or config.dtype

    def run(self, ask: Ask) -> dict[str, Any]:
        """Add all, step until all are done."""
        engine = self._engine
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, ignore_eos=True)
        streams: dict[str, int] = {}
        meter = Meter(len(ask.prompts))
        for stream, prompt in enumerate(ask.prompts):
            request = Request(next(self._names), tuple(prompt), params, seed=ask.seed * len(ask.prompts) + stream)
            streams[request.request_id] = stream
            engine.add(request)
        profile, waiting = None, set(streams)
        while engine.has_work:
            if ask.profile and profile is None and not waiting:
                profile = Profile(engine)
            deltas = engine.step()
            at = time.perf_counter()
            for delta in deltas:
                if delta.error is not None:
                    raise EngineFault(delta.error)
                waiting.discard(delta.request_id)
                meter.emit(streams[delta.request_id], delta.token_ids, at)
        sample = meter.sample() | self._counts()
        if profile is not None:
            sample["step"] = profile.end()
        return sample

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]

    def _counts(self) -> dict[str, Any]:
        stats = self._engine.take_stats()
        return {
            "rounds_with_drafts": stats.num_drafts,
            "drafted_per_position": stats.drafted_per_position,
            "accepted_per_position": stats.accepted_per_position,
            "num_steps": stats.num_steps,
        }


if __name__ == "__main__":
    serve(Ours)
