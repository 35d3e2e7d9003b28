"""llama.cpp by its Python binding: many sequences in one batch, or one with prompt-lookup drafts.

May run under the interpreter of an environment of its own.
"""

import os
import time
from itertools import islice
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from tools.bench.workers.channel import BatchOfPrompts, Meter, serve

_BATCH = 512  # rows of a prompt computed at once

Rows = list[tuple[int, int, int, bool]]  # token, position, sequence, whether its logits are wanted


class LlamaBatches:
    """The C interface: one token a sequence and step, for all sequences together."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.max_streams: int | None = settings["max_streams"]
        self.versions = _versions()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(settings["gguf"].encode(), params)
        context = llama_cpp.llama_context_default_params()
        length = -(-settings["max_model_len"] // 256) * 256
        context.n_ctx, context.n_seq_max = settings["max_streams"] * length, settings["max_streams"]
        context.n_batch = context.n_ubatch = _BATCH
        context.n_threads = context.n_threads_batch = settings["threads"]
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {settings['gguf']}.")
        self._batch = llama_cpp.llama_batch_init(max(_BATCH, settings["max_streams"]), 0, 1)

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """The prompts one after the other, then all sequences together."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        samplers = [_sampler(ask.temperature, ask.seed * len(ask.prompts) + n) for n in range(len(ask.prompts))]
        meter = Meter(len(ask.prompts))
        last = []
        for stream, prompt in enumerate(ask.prompts):
            for begin in range(0, len(prompt), _BATCH):
                chunk = prompt[begin : begin + _BATCH]
                self._decode([(token, begin + n, stream, n == len(chunk) - 1) for n, token in enumerate(chunk)])
            last.append(self._sample(samplers[stream], -1))
            meter.emit(stream, last[-1:])
        for step in range(ask.max_tokens - 1):
            self._decode([(last[n], len(prompt) + step, n, True) for n, prompt in enumerate(ask.prompts)])
            last = [self._sample(sampler, row) for row, sampler in enumerate(samplers)]
            at = time.perf_counter()
            for stream, token in enumerate(last):
                meter.emit(stream, [token], at)
        for sampler in samplers:
            llama_cpp.llama_sampler_free(sampler)
        return meter.sample()

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]

    def _decode(self, rows: Rows) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}.")

    def _sample(self, sampler: Any, row: int) -> int:
        return int(llama_cpp.llama_sampler_sample(sampler, self._context, row))


class LlamaLookup:
    """The binding's own generator, which drafts by prompt lookup; one prompt at a time."""

    max_streams: int | None = 1

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = _versions()
        self._llama = llama_cpp.Llama(
            settings["gguf"],
            n_ctx=settings["max_model_len"],
            n_batch=_BATCH,
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=settings["k"]),
            verbose=False,
        )

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """Generate until there are enough tokens; an end of text does not end it."""
        self._llama.reset()
        self._llama.set_seed(ask.seed)
        meter = Meter(1)
        tokens = self._llama.generate(ask.prompts[0], temp=ask.temperature, top_k=0, top_p=1.0, min_p=0.0)
        for token in islice(tokens, ask.max_tokens):
            meter.emit(0, [token])
        return meter.sample()

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]


def _versions() -> dict[str, str]:
    return {"llama-cpp-python": llama_cpp.__version__}


def _sampler(temperature: float, seed: int) -> Any:
    if temperature == 0:
        return llama_cpp.llama_sampler_init_greedy()
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
    return chain


if __name__ == "__main__":
    serve(lambda settings: LlamaBatches(settings) if settings["k"] is None else LlamaLookup(settings))
