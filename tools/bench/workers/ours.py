"""Our engine, without a server around it."""

import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from serve_app.versions import version_of
from speculative.assembly import Assembly, resolve_device
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.weights import load_weights
from speculative.engine import EngineCore
from speculative.errors import EngineFault
from speculative.model.loading import choose_weights
from speculative.request import Request, SamplingParams
from speculative.warm_up import warm_up
from tools.bench.workers.channel import BatchOfPrompts, Meter, serve


class Ours:
    """Engines on this process's main thread, by name, one at a time. They share the target's weights."""

    max_streams: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        folder, decoder = Path(settings["model"]), None
        self._engines: dict[str, EngineCore] = {}
        for name, own in settings["engines"].items():
            config = EngineConfig(**own["engine"], drafter=DrafterConfig.of(**own["drafter"]))
            torch.set_num_threads(config.num_threads)
            device = resolve_device(config.device)
            loaded = load_weights(folder, config, device, decoder=decoder)
            decoder = loaded.decoder
            engine = EngineCore(Assembly(loaded, config))
            warm_up(engine)
            self._engines[name] = engine
        weights = choose_weights(config.quantization, folder, dtype=config.dtype, device=device)
        self._names = (f"bench-{number}" for number in count())
        self.versions = {"truespec": version_of("truespec"), "torch": torch.__version__}
        self.versions["weights"] = weights

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """Add all, step until all are done."""
        engine = self._engines[ask.engine]
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, ignore_eos=True)
        streams: dict[str, int] = {}
        meter = Meter(len(ask.prompts))
        for stream, prompt in enumerate(ask.prompts):
            request = Request(next(self._names), tuple(prompt), params, seed=ask.seed * len(ask.prompts) + stream)
            streams[request.request_id] = stream
            engine.add(request)
        while engine.has_work:
            deltas = engine.step()
            at = time.perf_counter()
            for delta in deltas:
                if delta.error is not None:
                    raise EngineFault(delta.error)
                meter.emit(streams[delta.request_id], delta.token_ids, at)
        return meter.sample() | _counts(engine)

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]


def _counts(engine: EngineCore) -> dict[str, Any]:
    stats = engine.take_stats()
    return {
        "rounds_with_drafts": stats.num_drafts,
        "drafted_per_position": stats.drafted_per_position,
        "accepted_per_position": stats.accepted_per_position,
        "num_steps": stats.num_steps,
    }


if __name__ == "__main__":
    serve(Ours)
