"""transformers' `generate`, plain or with prompt-lookup drafts."""

import os
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from tools.bench.workers.channel import BatchOfPrompts, Meter, serve


class _Tap(BaseStreamer):
    """Hands what `generate` emits to a meter; the first call carries the prompts."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Token ids: [B], one for each stream; or several of the only stream."""
        if not self._begun:
            self._begun = True
            return
        at = time.perf_counter()
        for stream, token_ids in enumerate(value.reshape(self._meter.num_streams, -1).tolist()):
            self._meter.emit(stream, token_ids, at)

    def end(self) -> None:
        """Nothing is left to tell."""


class Transformers:
    """A model of `AutoModelForCausalLM`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._drafts: int | None = settings["k"]
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), local_files_only=True
        ).eval()
        self._pad_id = self._model.generation_config.eos_token_id
        if isinstance(self._pad_id, list):
            self._pad_id = self._pad_id[0]
        self._model.generation_config.eos_token_id = None  # every answer is of the length asked for
        self.max_streams: int | None = None if self._drafts is None else 1
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """One padded batch."""
        torch.manual_seed(ask.seed)
        longest = max(map(len, ask.prompts))
        padding = [longest - len(prompt) for prompt in ask.prompts]
        input_ids = torch.tensor([[self._pad_id] * n + p for n, p in zip(padding, ask.prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        distribution = (
            {"do_sample": False} if ask.temperature == 0 else {"do_sample": True, "temperature": ask.temperature}
        )
        meter = Meter(len(ask.prompts))
        self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=ask.max_tokens,
            pad_token_id=self._pad_id,
            prompt_lookup_num_tokens=self._drafts,
            streamer=_Tap(meter),
            **distribution,
            **({} if ask.temperature == 0 else {"top_k": 0, "top_p": 1.0}),
        )
        return meter.sample()

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]


if __name__ == "__main__":
    serve(Transformers)
