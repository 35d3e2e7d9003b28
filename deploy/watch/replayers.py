"""What computes watched answers again: our engine, vLLM, `transformers`, or several of one of them on Ray."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ray import serve
from ray.exceptions import RayTaskError

from serve_app.backends.base import Backend, ModelInfo, Replayed
from serve_app.backends.torch_backend import TorchBackend
from speculative.config import DrafterConfig, EngineConfig
from speculative.errors import ConfigError, TruespecError
from speculative.model.config import ModelConfig
from speculative.request import Request

EngineName = Literal["torch", "transformers", "vllm"]
ENGINES: tuple[EngineName, ...] = ("torch", "transformers", "vllm")

T = TypeVar("T")

_BLOCK = EngineConfig().block_size
_CPU_CACHE_TOKENS = 16_384
_AT_ONCE = 4  # replays of one engine
_APPLICATION = "truespec-watch"
_SCALES_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplayerOptions:
    """How answers are computed again.

    folder: the model's. engine: which one. dtype: of weights and activations. threads: CPU threads, 0 = the machine's.
    max_model_len: tokens of prompt and answer, None = the model's own limit, and on a CPU at most 16,384. max_replicas:
    engines on Ray that there may be; 0 = one in this process, without Ray. gpus: of each engine on Ray.
    """

    folder: Path
    engine: EngineName = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    max_model_len: int | None = None
    max_replicas: int = 0
    gpus: float = 0.0
    address: str | None = None


class Replayer(Protocol):
    """Computes teacher-forced requests. Its methods are called from one asyncio loop."""

    at_once: int
    """How many requests keep it busy."""

    async def start(self) -> ModelInfo:
        """Load the model."""
        ...

    async def replay(self, request: Request) -> Replayed:
        """Compute a request that has `score_from`."""
        ...

    async def stop(self) -> None:
        """Let the model go."""
        ...


def make_replayer(options: ReplayerOptions) -> Replayer:
    """The replayer of these options, not yet started."""
    if options.max_replicas:
        return _OnRay(options)
    return _Independent(options) if options.engine == "transformers" else _Engine(options)


class _Engine:
    """Our engine, or vLLM, in this process."""

    at_once = _AT_ONCE

    def __init__(self, options: ReplayerOptions) -> None:
        self._backend = _backend(options)

    async def start(self) -> ModelInfo:
        return await self._backend.start()

    async def replay(self, request: Request) -> Replayed:
        return await self._backend.replay(request)

    async def stop(self) -> None:
        await self._backend.stop()


def _backend(options: ReplayerOptions) -> Backend:
    model = ModelConfig.from_folder(options.folder)
    gpu, own = _on_gpu(), model.max_position_embeddings
    longest = min(options.max_model_len or (own if gpu else _CPU_CACHE_TOKENS), own)
    config = EngineConfig(
        dtype=options.dtype,
        quantization=options.dtype,
        max_model_len=longest,
        kv_cache_tokens=None if gpu else max(_CPU_CACHE_TOKENS, _BLOCK * -(-longest // _BLOCK)),
        max_num_seqs=_AT_ONCE,
        prefix_caching=False,
        num_threads=options.threads or os.cpu_count() or 1,
        drafter=DrafterConfig(kind="none"),
    )
    if options.engine == "torch":
        return TorchBackend(str(options.folder), "watched", config)
    from serve_app.backends.vllm_backend import VllmBackend  # vLLM has an environment of its own
    from serve_app.backends.vllm_parts.settings import VllmSettings

    return VllmBackend(str(options.folder), "watched", VllmSettings(config, given=frozenset({"max_model_len"})))


def _on_gpu() -> bool:
    import torch  # not before it is needed

    return torch.cuda.is_available()


class _Independent:
    """`transformers` in float32 on a thread of its own."""

    at_once = 1

    def __init__(self, options: ReplayerOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(1, "truespec-referee")
        self._model: Any = None
        self._compiler: Any = None

    async def start(self) -> ModelInfo:
        return await self._call(self._load)

    def _load(self) -> ModelInfo:
        import torch

        from serve_app.backends.transformers_referee import TransformersModel
        from serve_app.text.grammar import StructureCompiler

        if self._options.threads:
            torch.set_num_threads(self._options.threads)
        folder = self._options.folder
        self._model = model = TransformersModel(folder)
        self._compiler = StructureCompiler(folder, model.vocab_size, model.eos_token_ids)
        longest = min(self._options.max_model_len or model.max_model_len, model.max_model_len)
        return ModelInfo("watched", longest, model.vocab_size, "", str(folder), model.eos_token_ids)

    async def replay(self, request: Request) -> Replayed:
        def compute() -> Replayed:
            replayed: Replayed = self._model.replay(request, self._compiler)
            return replayed

        return await self._call(compute)

    async def stop(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class _OnRay:
    """Engines on a Ray cluster, between one and so many, as the backlog demands."""

    def __init__(self, options: ReplayerOptions) -> None:
        self._options = options
        self.at_once = _AT_ONCE * options.max_replicas
        self._handle: Any = None

    async def start(self) -> ModelInfo:
        return await asyncio.to_thread(self._deploy)

    def _deploy(self) -> ModelInfo:
        import ray

        ray.init(address=self._options.address, log_to_driver=False, ignore_reinit_error=True)
        cores = self._options.threads or 1
        scaling = {
            "min_replicas": 1,
            "max_replicas": self._options.max_replicas,
            "target_ongoing_requests": _AT_ONCE,
            "upscale_delay_s": _SCALES_AFTER_S,
            "downscale_delay_s": 6 * _SCALES_AFTER_S,
        }
        replica = serve.deployment(
            _Replica,
            autoscaling_config=scaling,
            max_ongoing_requests=2 * _AT_ONCE,
            ray_actor_options={"num_cpus": cores, "num_gpus": self._options.gpus},
        )
        self._handle = serve.run(replica.bind(self._options), name=_APPLICATION, route_prefix=None)
        info: ModelInfo = self._handle.info.remote().result()
        return info

    async def replay(self, request: Request) -> Replayed:
        try:
            return await self._handle.replay.remote(request)  # type: ignore[no-any-return]
        except RayTaskError as error:
            if isinstance(error.cause, TruespecError):
                raise error.cause from error
            raise

    async def stop(self) -> None:
        await asyncio.to_thread(serve.delete, _APPLICATION)


class _Replica:
    """One engine of the pool."""

    async def __init__(self, options: ReplayerOptions) -> None:  # type: ignore[misc]
        self._replayer = _Independent(options) if options.engine == "transformers" else _Engine(options)
        self._info = await self._replayer.start()

    async def info(self) -> ModelInfo:
        """The model that it has loaded."""
        return self._info

    async def replay(self, request: Request) -> Replayed:
        """Compute a request."""
        return await self._replayer.replay(request)


def check_options(options: ReplayerOptions) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: the message names the option.
    """
    if options.engine == "transformers" and options.dtype != "float32":
        raise ConfigError("--dtype: transformers computes in float32 here; leave it out, or choose --engine torch.")
    if options.address is not None and not options.max_replicas:
        raise ConfigError("--address: say with --max-replicas how many engines there may be on that cluster.")
