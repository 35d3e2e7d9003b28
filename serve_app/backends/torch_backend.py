"""Our own engine behind the `Backend` protocol: it runs on one thread, commands go in, deltas come out.

Serving code never touches engine state. A command is a function that the engine thread calls between two steps; a
step's output is passed to the event loop in one call.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import operator
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serve_app.backends.base import (
    SHIPPED_HEADS,
    Computing,
    DeviceHandoff,
    Handoff,
    ModelInfo,
    Numerics,
    Pace,
    PauseMode,
    Prefilled,
    Replayed,
    naming,
    precision_of,
    replayed,
)
from serve_app.errors import dead_end
from serve_app.text.grammar import StructureCompiler
from speculative.config import EngineConfig
from speculative.drafting.weights import Weights, check_same_model, load_weights
from speculative.engine import EngineCore
from speculative.errors import ConfigError, EngineFault
from speculative.model.applied import digests
from speculative.model.arithmetic import device_name
from speculative.model.config import ModelConfig
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.head_checkpoint import held_out_rates
from speculative.model.loading import choose_weights, resolve_model
from speculative.request import FinishReason, Request, Speculation, TokenDelta
from speculative.state.handoff import ComputedTokenState, Export, decode_state
from speculative.stats import DEAD_END, CheckState, EngineUsage, StepStats
from speculative.warm_up import warm_up
from speculative.weight_formats import is_rounded

_logger = logging.getLogger("truespec.engine")

_FIRST_ROUNDS = 8  # that are never joined: from then on an answer's strata no longer distinguish rounds
_IDLE_S = 0.02  # wait for a command when there is work but nothing can run (all blocks are held)
_LOOK_EVERY_S = 1.0  # checks whether an awaited engine is alive
_STALLED_AFTER_S = 120.0  # a step that takes longer counts as hung

Command = Callable[[EngineCore], None]
Event = TokenDelta | Export | Exception
"""Item of a request's queue: a delta; the handoff once it is held; or the reason that it could not start."""


def load_engine(folder: Path, config: EngineConfig) -> EngineCore:
    """Load a checkpoint folder's engine, able to constrain answers to a structure in the folder's own vocabulary.

    The drafter may be a head shipped with the package.
    """
    if config.drafter.model is not None:
        with naming("drafter.model"):
            head = str(resolve_model(config.drafter.model, SHIPPED_HEADS))
        config = replace(config, drafter=replace(config.drafter, model=head))
    model = ModelConfig.from_folder(folder)
    return EngineCore.load(folder, config, StructureCompiler(folder, model.vocab_size, model.eos_token_ids))


@dataclass(eq=False)
class TorchBackend:
    """Runs an `EngineCore` on a thread of its own."""

    source: str  # a model folder, a catalogue name, or a hub id
    model_name: str  # that clients use
    config: EngineConfig
    make_engine: Callable[[Path, EngineConfig], EngineCore] = load_engine  # tests inject faulty ones here
    pace: Pace = field(default_factory=Pace)  # at which requests are given their tokens

    def __post_init__(self) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Inbox] = {}
        self._to_export: set[str] = set()  # engine thread only
        self._engine: EngineCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="truespec-engine", daemon=True)
        self._ready = Future[ModelInfo]()
        self._stats = StepStats()
        self._stats_lock = threading.Lock()
        self._fault: Exception | None = None
        self._step_began: float | None = None
        self._folder = Path()
        self._loaded: tuple[Weights, _Form, dict[str, bytes]] | None = None
        self._form = _Form()
        self._repeats = False  # rounds a row alike in any batch
        self._begun: set[str] = set()  # requests the engine may know
        self._open = asyncio.Event()  # new requests may begin
        self._open.set()
        self._idle = asyncio.Event()  # no request has begun
        self._idle.set()
        self._frozen = False  # engine thread only: it takes commands but runs no steps

    # -- the event loop's side ----------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """Load the model, run a few tokens, and wait for requests."""
        self._loop = asyncio.get_running_loop()
        self._ready.set_running_or_notify_cancel()  # the thread settles it, whoever still waits
        self._thread.start()
        return await asyncio.wrap_future(self._ready)

    async def stop(self) -> None:
        """Stop the engine thread; running requests end with an error."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def check(self, request: Request) -> None:
        """Refuse a request before anything waits for it; its structure is compiled by then."""
        self.check_health()
        await self._prepare(request)
        self._live_engine().check(request, request.prompt_token_ids)

    def generate(self, request: Request, emitted: Sequence[int] = ()) -> AsyncGenerator[TokenDelta, None]:
        """Prefill and decode here."""
        return self._deltas(request, lambda engine: engine.add(request, emitted=emitted))

    async def resume(self, request: Request, handoff: Handoff) -> AsyncGenerator[TokenDelta, None]:
        """Continue from a handoff, which is checked beside the steps."""
        with self._timed("check_s"):
            state = await asyncio.to_thread(self._unpack, handoff)
        begin = operator.methodcaller("insert", request, state)
        del handoff, state  # it would otherwise stay in the object store for as long as the stream runs
        async with contextlib.aclosing(self._deltas(request, begin)) as deltas:
            del begin
            async for delta in deltas:
                yield delta

    async def prefill(self, request: Request, *, first_token: bool) -> Prefilled:
        """Compute the prompt and hand it off."""

        def begin(engine: EngineCore) -> None:
            engine.add(request, prefill_only_after=1 if first_token else 0)
            self._to_export.add(request.request_id)

        deltas: list[TokenDelta] = []
        exports: list[Export] = []
        async with contextlib.aclosing(self._deltas(request, begin, exports.append)) as arriving:
            async for delta in arriving:
                if delta.error is not None:
                    raise EngineFault(delta.error)
                deltas.append(delta)
        if not exports:
            return Prefilled(tuple(deltas), None)
        try:
            with self._timed("export_s"):
                sealed, values = await asyncio.to_thread(exports[0].finish), exports[0].on_device
                return Prefilled(tuple(deltas), sealed if values is None else DeviceHandoff(values, sealed))
        except EngineFault:  # one damaged prompt is no reason to stop the engine
            self._commands.put(lambda engine: engine.withdraw(exports[0]))
            raise

    def abort(self, request_id: str) -> None:
        """End a running request; its stream ends with a last delta."""
        events = self._streams.get(request_id)
        if events is not None:
            events.put(TokenDelta(request_id, finish_reason=FinishReason.ABORT), time.monotonic())

    async def replay(self, request: Request) -> Replayed:
        """Compute a teacher-forced request."""
        return replace(await replayed(self.generate(request)), numerics=self._numerics)

    def set_speculation(self, speculation: Speculation) -> None:
        """Set who may draft from the next step on."""
        self._commands.put(lambda engine: setattr(engine.scheduler, "speculation", speculation))

    def invalidate_cache(self) -> None:
        """Recompute everything, and restart the self-checks."""

        def reset(engine: EngineCore) -> None:
            engine.scheduler.invalidate_cache()
            engine.self_check.restart()

        self._commands.put(reset)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._commands.put(lambda engine: engine.scheduler.pool.drop_prefixes())

    async def load_weights(self, source: str, drafter: str | None = None) -> str:
        """Load new weights alongside those being served, on a separate thread, and compare them with what was sent."""
        engine = self._live_engine()

        def load() -> tuple[Weights, _Form, dict[str, bytes]]:
            with naming("path"):
                folder = resolve_model(source)
            check_same_model(folder, engine.model)
            has_head = engine.config.drafter.model is not None  # else `load_weights` refuses any, found or not
            with naming("drafter_path"):
                head = resolve_model(drafter, SHIPPED_HEADS) if has_head and drafter is not None else drafter
            weights = load_weights(
                folder, engine.config, engine.device, head, check=True, replaced=engine.parts.weights.networks
            )
            return weights, _Form.of(folder, engine), digests(weights.networks)

        self._loaded = None  # free what was loaded before
        loaded = self._loaded = await asyncio.to_thread(load)
        return loaded[0].fingerprint

    async def switch_weights(self, version: str) -> ModelInfo:
        """Switch to the weights loaded last, from the next step on. If that fails, or others than those are computed
        with afterwards, the engine stops."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            raise EngineFault("There are no weights to switch to; load them first.")

        weights, form, wanted = loaded

        def switch(engine: EngineCore) -> None:
            engine.switch(weights, version)
            if (found := digests(engine.parts.weights.networks)) != wanted:
                changed = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
                raise EngineFault(
                    f"After the update to {version!r} it computes with other weights than were loaded and checked: "
                    f"{changed[0]}{' and others' if changed[1:] else ''}. It serves nothing with them."
                )

        await self._run_between_steps(switch)
        self._form = form
        return self._info(self._live_engine())

    def drop_weights(self) -> None:
        """Drop weights that were loaded but will not be served."""
        self._loaded = None

    async def pause(self, mode: PauseMode) -> None:
        """Start no more requests; returns when none is running, or with `keep` when all stand still."""
        self._open.clear()
        try:
            if mode is PauseMode.ABORT:
                for request_id in self._begun:
                    self.abort(request_id)
            await self._run_between_steps(lambda _: self._freeze(frozen=mode is PauseMode.KEEP))
            if mode is not PauseMode.KEEP:
                await self._idle.wait()
        except asyncio.CancelledError:
            self._commands.put(lambda _: self._freeze(frozen=False))
            self._open.set()
            raise

    async def unpause(self) -> None:
        """Continue with suspended and newly arrived requests."""
        await self._run_between_steps(lambda _: self._freeze(frozen=False))
        self._open.set()

    def usage(self) -> EngineUsage:
        """Return what the engine holds right now, read without stopping it."""
        return self._live_engine().usage()

    def cached_blocks(self, most: int) -> list[bytes]:
        """Names of the blocks in the prefix cache, read without stopping the engine."""
        return self._live_engine().scheduler.pool.newest_prefixes(most)

    def take_stats(self) -> StepStats:
        """Counts since the last call."""
        with self._stats_lock:
            taken, self._stats = self._stats, StepStats()
        return taken

    def self_checks(self) -> tuple[CheckState, ...]:
        """State of the engine's self-checks, read without stopping it."""
        return self._live_engine().self_check.snapshot()

    def check_health(self) -> None:
        """Raise if the engine thread died or hangs in a step."""
        if self._fault is not None:
            raise EngineFault(f"The engine stopped: {self._fault}")
        if not self._thread.is_alive():
            raise EngineFault("The engine thread is not running.")
        began = self._step_began
        if began is not None and time.monotonic() - began > _STALLED_AFTER_S:
            raise EngineFault(f"A step has been running for more than {_STALLED_AFTER_S:.0f} s.")

    async def _deltas(
        self, request: Request, begin: Command, hand_off: Callable[[Export], None] | None = None
    ) -> AsyncGenerator[TokenDelta, None]:
        """A request's deltas, from its start to its end or its handoff; leaving early aborts it."""
        self.check_health()
        request_id = request.request_id
        if request_id in self._streams:
            raise EngineFault(f"A request {request_id!r} is already running.")
        events = self._streams[request_id] = _Inbox(self.pace, gathers=request.gathers)
        self.pace.num_streams += 1
        try:
            await self._prepare(request)
            await self._open.wait()
            self._begun.add(request_id)
            self._idle.clear()
            self._commands.put(functools.partial(self._begin, request_id=request_id, begin=begin))
            del begin  # a handoff would otherwise stay in the object store for as long as the stream runs
            while True:
                event = await events.get()
                if not isinstance(event, TokenDelta):
                    if isinstance(event, Exception):
                        raise event
                    assert hand_off is not None
                    hand_off(event)
                    return
                if event.broken == DEAD_END:
                    raise dead_end(request.params)
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._streams[request_id]
            self.pace.num_streams -= 1
            self._commands.put(lambda engine: self._abort(engine, request_id))
            self._begun.discard(request_id)
            if not self._begun:
                self._idle.set()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add to the engine's stats what is done for it elsewhere."""
        began = time.perf_counter()
        yield
        with self._stats_lock:
            setattr(self._stats, name, getattr(self._stats, name) + time.perf_counter() - began)

    async def _prepare(self, request: Request) -> None:
        """Compile the request's structure without blocking a step; the engine then finds it compiled."""
        if request.params.structure is not None:
            await asyncio.to_thread(self._live_engine().make_constraint, request.params.structure)

    def _unpack(self, handoff: Handoff) -> ComputedTokenState:
        engine = self._live_engine()
        if not isinstance(handoff, DeviceHandoff):
            return engine.unpack(handoff)
        from speculative.gpu.device_handoff import compared  # an engine on a CPU loads nothing of speculative.gpu

        with contextlib.nullcontext() if engine.copies is None else engine.copies.beside():
            return decode_state(handoff.sealed, engine.manifest, functools.partial(compared, handoff.values))

    def _publish(self, events: list[tuple[str, Event]]) -> None:
        now = time.monotonic()
        for request_id, event in events:
            inbox = self._streams.get(request_id)
            if inbox is not None:
                inbox.put(event, now)

    async def _run_between_steps(self, command: Command) -> None:
        """Run a command on the engine thread, and wait until it is done. If it raises, the engine stops. Raises
        EngineFault: the engine stopped, or had stopped before."""
        self.check_health()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run(engine: EngineCore) -> None:
            command(engine)
            self._call(done.set_result, None)

        self._commands.put(run)
        while not done.done():
            await asyncio.wait((done,), timeout=_LOOK_EVERY_S)
            if not done.done():
                self.check_health()

    def _live_engine(self) -> EngineCore:
        if self._engine is None:
            raise EngineFault("The engine is not started.")
        return self._engine

    # -- the engine thread's side -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with naming("model.source"):
                folder = resolve_model(self.source)
            engine = self.make_engine(folder, self.config)
            warm_up(engine)
        except Exception as error:
            if not isinstance(error, ConfigError):  # which says all that is needed
                _logger.exception("The engine could not start.")
            self._ready.set_exception(error)
            return
        self._engine = engine
        self._folder = folder
        self._form = _Form.of(folder, engine)
        self._ready.set_result(self._info(engine))
        self._serve(engine)

    def _info(self, engine: EngineCore) -> ModelInfo:
        drafter = self.config.drafter.model
        folder = None if drafter is None else resolve_model(drafter, SHIPPED_HEADS)
        arithmetic, config = engine.arithmetic, self.config
        self._repeats = not arithmetic.rounding
        computing = Computing(
            kernels=arithmetic.kernels,
            kernels_off=arithmetic.kernels_off,
            unrepeatable=arithmetic.rounding,
            drafts_shift_draws=config.drafter.kind != "none" and config.verifier != "coupled",
            couples_seeds=engine.device.type == "cpu",  # on a GPU a neighbour can change a bfloat16 text
            name=arithmetic.name,
            device=device_name(engine.device),
            weights=self._form.weights,
            dtype=config.dtype,
            numerics=self._numerics,
            logprobs_mode=config.logprobs_mode,
            keeps_rounds=True,
        )
        return ModelInfo(
            model_name=self.model_name,
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.vocab_size,
            fingerprint=engine.manifest.fingerprint,
            folder=str(self._folder),
            eos_token_ids=engine.model.eos_token_ids,
            drafter_folder="" if folder is None else str(folder),
            held_out_acceptance=held_out_rates(self.config.drafter.kind, folder),
            quantization=self._form.quantization,
            computing=computing,
        )

    @property
    def _numerics(self) -> Numerics:
        form = self._form.weights
        weights = form if is_rounded(form) else "plain"
        return Numerics("truespec", precision_of(self.config.dtype, form), weights, self._repeats)

    def _serve(self, engine: EngineCore) -> None:
        try:
            stalled = False
            while self._take_commands(engine, wait=stalled or self._frozen or not engine.has_work):
                if self._frozen:
                    continue
                self._step_began = time.monotonic()
                deltas = engine.step()
                self._step_began = None
                with self._stats_lock:
                    self._stats.merge(engine.take_stats())
                events: list[tuple[str, Event]] = [(delta.request_id, delta) for delta in deltas]
                while ready := self._to_export.intersection(engine.held_ids):  # again: copies share memory
                    request_id = ready.pop()
                    self._to_export.discard(request_id)
                    events.append((request_id, engine.export(request_id)))
                stalled = not (events or engine.scheduler.is_running or engine.is_copying)
                if events:
                    self._call(self._publish, events)
        except Exception as error:
            _logger.exception("The engine stopped; every running request fails.")
            self._fault = error
            self._call(self._fail_all, error)
            return
        self._call(self._fail_all, EngineFault("The engine was stopped."))

    def _take_commands(self, engine: EngineCore, *, wait: bool) -> bool:
        """Run pending commands; False when the engine is to stop. With nothing to do it waits for one."""
        timeout = (_IDLE_S if engine.has_work and not self._frozen else None) if wait else 0.0
        try:
            command = self._commands.get(block=timeout != 0.0, timeout=timeout)
            while command is not None:
                command(engine)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _begin(self, engine: EngineCore, request_id: str, begin: Command) -> None:
        try:
            begin(engine)
        except Exception as error:  # the fault of the request or its handoff: others must not be affected
            self._call(self._publish, [(request_id, error)])

    def _freeze(self, *, frozen: bool) -> None:
        self._frozen = frozen

    def _abort(self, engine: EngineCore, request_id: str) -> None:
        self._to_export.discard(request_id)
        engine.abort(request_id)

    def _fail_all(self, error: Exception) -> None:
        self._open.set()  # requests held back by a pause must fail as well
        for request_id, events in self._streams.items():
            end = TokenDelta(request_id, finish_reason=FinishReason.ERROR, error=str(error))
            events.put(end, time.monotonic())

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Have the event loop call something; if the loop is closed, nothing needs to be done."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


class _Inbox:
    """The events of one request, for the one task that takes them. An `asyncio.Queue`, which may have a bound and many
    takers, does several times as much for each.

    To wake that task, and all that a delta passes on its way to the client, costs many times what its tokens do: so
    deltas wait for those after them, at the pace of their stream, and are joined. What begins or ends one waits for
    nothing, and the first rounds stay apart, as answers are judged by the rounds since a handoff.

    Args:
        pace: of the streams.
        gathers: whether deltas may wait.
    """

    def __init__(self, pace: Pace, *, gathers: bool) -> None:
        self._pace = pace
        self._gathers = gathers
        self._events: deque[tuple[Event, float]] = deque()  # and when each came
        self._arrival: asyncio.Future[None] | None = None  # for which the taker waits
        self._due_at = 0.0  # when the next delta need not wait
        self._latest: asyncio.TimerHandle | None = None  # ends the wait where no more deltas come
        self._num_given = 0

    def put(self, event: Event, now: float) -> None:
        """Add an event, and wake who waits for it, if it is due."""
        self._events.append((event, now))
        if now < self._due_at and isinstance(event, TokenDelta) and event.finish_reason is None:
            if self._latest is None:
                loop = asyncio.get_running_loop()
                self._latest = loop.call_later(2 * (self._due_at - now), self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._latest is not None:
            self._latest.cancel()
            self._latest = None
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> Event:
        """The oldest event, once there is one, joined with those after it that only add to it."""
        while not self._events:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        interval_s = self._pace.interval_s if self._gathers else 0.0
        self._due_at = time.monotonic() + interval_s
        self._num_given += 1
        if interval_s and self._num_given > _FIRST_ROUNDS and len(self._events) > 1:
            joined = _joined(self._events)
            if joined is not None:
                self._events.clear()
                return joined
        return self._events.popleft()[0]


def _joined(events: Iterable[tuple[Event, float]]) -> TokenDelta | None:
    """Return one delta with all that these, which came at these times, add to a request; None where they are not of one
    kind: made with other weights, say, or the last one failed."""
    deltas = [event for event, _ in events if isinstance(event, TokenDelta) and event.rounds]
    times = [at for _, at in events]
    if len(deltas) != len(times):
        return None
    each: Any = TokenDelta._make(zip(*deltas, strict=True))  # what they have in each field
    if len(set(each.weight_version)) > 1 or len(set(each.preempted)) > 1:
        return None
    chained = itertools.chain.from_iterable
    return deltas[0]._replace(
        token_ids=tuple(chained(each.token_ids)),
        kinds=tuple(chained(each.kinds)),
        logprobs=None if deltas[-1].logprobs is None else tuple(chained(each.logprobs)),
        num_drafted=sum(each.num_drafted),
        num_accepted=sum(each.num_accepted),
        rounds=tuple(chained(each.rounds)),
        finish_reason=deltas[-1].finish_reason,
        stop_token_id=deltas[-1].stop_token_id,
        gaps_s=tuple([later - earlier for earlier, later in itertools.pairwise(times)]),
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of a folder's weights in an engine."""

    weights: str = ""  # as it has loaded them
    quantization: str | None = None  # how they are rounded, whoever did it; None = as given by `dtype`

    @classmethod
    def of(cls, folder: Path, engine: EngineCore) -> "_Form":
        """Describe a folder as this engine loads it."""
        config = engine.config
        kept = choose_weights(config.quantization, folder, dtype=config.dtype, device=engine.device)
        if is_rounded(kept):
            return cls(kept, kept)
        # Where there are others beside them, the plain weights are those values, dequantized.
        return cls(kept, "gguf" if (folder / QUANTIZED_FILE).is_file() else None)
