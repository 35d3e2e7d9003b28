"""What computes watched answers again: our engine, vLLM, `transformers`, or several of one of them on Ray."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from deploy.run.cluster import connected
from serve_app.backends.base import Backend, ModelInfo, Replayed
from serve_app.backends.torch_backend import TorchBackend
from serve_app.deployments.gpus import ONLY_GIVEN_GPUS, given_device
from serve_app.deployments.remote_errors import own_error
from speculative.config import DrafterConfig, EngineConfig
from speculative.errors import ConfigError, EngineFault, InvalidRequest
from speculative.model.config import ModelConfig
from speculative.request import Request

EngineName = Literal["torch", "transformers", "vllm"]

_logger = logging.getLogger("truespec.referee")

T = TypeVar("T")

_BLOCK = EngineConfig().block_size
_CPU_CACHE_TOKENS = 16_384
_AT_ONCE = 4  # replays of one engine
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplayerOptions:
    """How answers are computed again.

    folder: the model's. engine: which one. dtype: of weights and activations. threads: CPU threads, 0 = the machine's.
    max_model_len: tokens of prompt and answer, None = the model's own limit, and on a CPU at most 16,384. max_replicas:
    engines on Ray that there may be; 0 = one in this process, without Ray. gpus: of each engine on Ray. device: of our
    engine; on Ray, `auto` is a GPU where it was given one.
    """

    folder: Path
    engine: EngineName = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    max_model_len: int | None = None
    max_replicas: int = 0
    gpus: float = 0.0
    device: str = "auto"
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
        self._options = options
        self._backend = _backend(options)
        self._restarting = asyncio.Lock()

    async def start(self) -> ModelInfo:
        return await self._backend.start()

    async def replay(self, request: Request) -> Replayed:
        backend = self._backend
        try:
            return await backend.replay(request)
        except EngineFault:
            await self._restart(backend)
            raise

    async def _restart(self, broken: Backend) -> None:
        """Load the model again where the engine has stopped for good."""
        async with self._restarting:
            if self._backend is not broken or _is_well(broken):
                return
            _logger.error("the engine stopped, and is loaded again")
            await broken.stop()
            self._backend = _backend(self._options)
            await self._backend.start()

    async def stop(self) -> None:
        await self._backend.stop()


def _is_well(backend: Backend) -> bool:
    try:
        backend.check_health()
    except EngineFault:
        return False
    return True


def _backend(options: ReplayerOptions) -> Backend:
    model = ModelConfig.from_folder(options.folder)
    gpu, own = _on_gpu(options.device), model.max_position_embeddings
    longest = min(options.max_model_len or (own if gpu else _CPU_CACHE_TOKENS), own)
    config = EngineConfig(
        dtype=options.dtype,
        quantization=options.dtype,
        device=options.device,
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


def _on_gpu(device: str) -> bool:
    from speculative.engine import resolve_device  # imports torch, not before it is needed

    return resolve_device(device).type == "cuda"


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

        from serve_app.referee.transformers_model import TransformersModel
        from serve_app.text.grammar import StructureCompiler

        if self._options.threads:
            torch.set_num_threads(self._options.threads)
        folder = self._options.folder
        self._model = model = TransformersModel(folder)
        self._compiler = StructureCompiler(folder, model.vocab_size, model.eos_token_ids)
        longest = min(self._options.max_model_len or model.max_model_len, model.max_model_len)
        return ModelInfo("watched", longest, model.vocab_size, "", str(folder), model.eos_token_ids)

    async def replay(self, request: Request) -> Replayed:
        if not all(0 <= token < self._model.vocab_size for token in request.prompt_token_ids):
            raise InvalidRequest("prompt", f"Token ids must be between 0 and {self._model.vocab_size - 1}.")

        def compute() -> Replayed:
            replayed: Replayed = self._model.replay(request, self._compiler)
            return replayed

        return await self._call(compute)

    async def stop(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class _OnRay:
    """Engines on a Ray cluster, between one and so many, as the backlog demands.

    An engine is added when all have as much as they can do, and ends when it has had nothing to do for a minute.
    """

    def __init__(self, options: ReplayerOptions) -> None:
        self._options = options
        self.at_once = _AT_ONCE * options.max_replicas
        self._actors: list[_Actor] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._stack = ExitStack()

    async def start(self) -> ModelInfo:
        """Join or start the cluster, and load the first engine."""
        if self._options.address is None:
            self._stack.callback(ray.shutdown)
            ray.init("local", log_to_driver=False, logging_level="ERROR")
        else:
            self._stack.enter_context(connected(self._options.address))
        first = self._new_actor()
        info: ModelInfo = await first.handle.info.remote()
        self._actors.append(first)
        return info

    async def replay(self, request: Request) -> Replayed:
        """Compute a request on the engine that has the least to do."""
        self._resize()
        actor = min(self._actors, key=lambda one: one.running)
        actor.running += 1
        try:
            replayed: Replayed = await actor.handle.replay.remote(request)
            return replayed
        except RayTaskError as error:
            raise own_error(error) from error
        except RayActorError:
            self._actors = [one for one in self._actors if one is not actor] or [self._new_actor()]
            raise
        finally:
            actor.running -= 1
            actor.used_at = time.monotonic()

    async def stop(self) -> None:
        """End the engines, and the cluster if it was started here."""
        for task in self._starting:
            task.cancel()
        for actor in self._actors:
            ray.kill(actor.handle)
        self._stack.close()

    def _resize(self) -> None:
        now = time.monotonic()
        idle = [one for one in self._actors if not one.running and now - one.used_at > _IDLE_S]
        for actor in idle[: len(self._actors) - 1]:
            self._actors.remove(actor)
            ray.kill(actor.handle)
        busy = all(one.running >= _AT_ONCE for one in self._actors)
        if busy and len(self._actors) + len(self._starting) < self._options.max_replicas:
            task = asyncio.create_task(self._add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _add(self) -> None:
        actor = self._new_actor()
        try:
            await actor.handle.info.remote()
        except RayError as error:
            _logger.warning("an engine could not be started: %s", error)
            return
        self._actors.append(actor)

    def _new_actor(self) -> "_Actor":
        actor = ray.remote(_RemoteEngine).options(
            num_cpus=self._options.threads or 1,
            num_gpus=self._options.gpus,
            runtime_env={"env_vars": ONLY_GIVEN_GPUS},
        )
        own = replace(self._options, threads=self._options.threads or 1, max_replicas=0)
        return _Actor(actor.remote(own), used_at=time.monotonic())


@dataclass(slots=True, eq=False)
class _Actor:
    """One engine on Ray. running: requests under way. used_at: when it had the last one, in seconds."""

    handle: Any
    running: int = 0
    used_at: float = 0.0


class _RemoteEngine:
    """What runs in the actor."""

    def __init__(self, options: ReplayerOptions) -> None:
        device = given_device() if options.device == "auto" else options.device
        self._replayer = make_replayer(replace(options, device=device))
        self._loading: asyncio.Task[ModelInfo] | None = None

    async def info(self) -> ModelInfo:
        """The model, once it is loaded."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._replayer.start())
        return await self._loading

    async def replay(self, request: Request) -> Replayed:
        """Compute a request."""
        await self.info()
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
