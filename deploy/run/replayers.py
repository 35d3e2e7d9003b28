"""Replayers for the watch and for `verify`: our engine, vLLM or `transformers`, in this process and without Ray."""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from serve_app.backends.base import Backend, ModelInfo, Replayed
from serve_app.backends.torch_backend import TorchBackend
from speculative.config import CPU_CACHE_TOKENS, DrafterConfig, EngineConfig, WeightsName
from speculative.errors import EngineFault
from speculative.model.config import ModelConfig
from speculative.request import Request

EngineName = Literal["torch", "transformers", "vllm"]

_logger = logging.getLogger("truespec.referee")

_BLOCK = EngineConfig().block_size


@dataclass(frozen=True, slots=True)
class ReplayerOptions:
    """The engines that compute answers again.

    max_model_len: tokens of prompt and answer, None = the model's own limit, and on a CPU at most 16,384.
    """

    folder: Path  # the model's
    engine: EngineName = "torch"  # which one
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations
    quantization: WeightsName | None = None  # form of the weights; None = as `dtype`
    threads: int = 0  # CPU threads, 0 = the machine's
    max_model_len: int | None = None
    at_once: int = 4  # requests that an engine computes together
    device: str = "auto"  # of our engine


class Replayer(Protocol):
    """Computes what was generated again, given prompt and answer, with a model of its own.

    `tests/support/replayer_conformance.py` is what each passes. Its methods are called from one asyncio loop:

        replayed = await replayer.replay(answer.scored("replay-1"))
        judgement = judge.judge(answer, replayed)
    """

    at_once: int
    """Number of requests that keep it busy."""

    async def start(self) -> ModelInfo:
        """Load the model."""

    async def replay(self, request: Request) -> Replayed:
        """Compute a request that has `score_from`, on fresh KV and without speculation.

        Of each token from there on: its raw logprob (nats), and where it lies in the distribution that the request's
        parameters demand; `Replayed.replayed` is None where only logprobs can be computed.

        Raises:
            InvalidRequest: of field `prompt`, where an id is no token of the model.
            SequenceTooLong: the model takes fewer tokens.
        """

    async def stop(self) -> None:
        """Let the model go."""


def make_replayer(options: ReplayerOptions) -> Replayer:
    """The replayer of these options in this process, not yet started."""
    if options.engine == "transformers":
        from serve_app.referee.book.transformers_model import TransformersReplayer  # imports transformers' models

        form = options.quantization or "plain"
        return TransformersReplayer(options.folder, options.max_model_len, options.threads, form)
    return EngineReplayer(options)


class EngineReplayer:
    """Our engine, or vLLM, in this process."""

    def __init__(self, options: ReplayerOptions) -> None:
        self._options = options
        self.at_once = options.at_once
        self._backend = _backend(options)
        self._restarting = asyncio.Lock()

    async def start(self) -> ModelInfo:
        return await self._backend.start()

    async def replay(self, request: Request) -> Replayed:
        try:
            return await self._backend.replay(request)
        except EngineFault:
            async with self._restarting:
                try:
                    self._backend.check_health()
                except EngineFault:  # it has stopped for good, and no other request has had it loaded again
                    _logger.error("the engine stopped, and is loaded again")
                    await self._backend.stop()
                    self._backend = _backend(self._options)
                    await self._backend.start()
            raise

    async def stop(self) -> None:
        await self._backend.stop()


def _backend(options: ReplayerOptions) -> Backend:
    from speculative.assembly import resolve_device  # imports torch, not before it is needed

    own = ModelConfig.from_folder(options.folder).max_position_embeddings
    gpu = resolve_device(options.device).type == "cuda"
    longest = min(options.max_model_len or (own if gpu else CPU_CACHE_TOKENS), own)
    cached = max(longest, CPU_CACHE_TOKENS) if options.at_once > 1 else longest
    config = EngineConfig(
        dtype=options.dtype,
        quantization=options.quantization or options.dtype,
        device=options.device,
        max_model_len=longest,
        kv_cache_tokens=None if gpu else _BLOCK * -(-cached // _BLOCK),
        max_num_seqs=options.at_once,
        prefix_caching=False,
        num_threads=options.threads or os.cpu_count() or 1,
        drafter=DrafterConfig(kind="none"),
    )
    if options.engine == "torch":
        return TorchBackend(str(options.folder), "watched", config)
    from serve_app.backends.vllm_backend import VllmBackend  # vLLM has an environment of its own
    from serve_app.backends.vllm_parts.settings import VllmSettings

    return VllmBackend(str(options.folder), "watched", VllmSettings(config, given=frozenset({"max_model_len"})))
