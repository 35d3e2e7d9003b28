"""vLLM behind the `Backend` protocol: for models and machines that our own engine lacks, checked from outside.

vLLM's engine runs in a process of its own. We talk to it through `AsyncLLM`; in its process run our scheduler, which
withholds drafts that must not be verified (`vllm_parts.scheduler`), our connector, which copies keys and values out and
in (`vllm_parts.connector`) or has NIXL read them (`vllm_parts.pull_connector`), and workarounds for worker faults
(`vllm_parts.worker`). A prefill samples nothing: the decode side computes the prompt's last token, so one engine
samples every token of a request.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.backends.base import (
    SHIPPED_HEADS,
    Backend,
    Computing,
    Handoff,
    ModelInfo,
    Numerics,
    PauseMode,
    Prefilled,
    Replayed,
    naming,
    precision_of,
    replayed,
)
from serve_app.backends.vllm_parts import checkpoint, settings
from serve_app.backends.vllm_parts.adapters import Adapters, read_adapters
from serve_app.backends.vllm_parts.deltas import GAVE_UP, DeltaReader, prompt_logprobs, queue_s, scored
from serve_app.backends.vllm_parts.replay_room import needs_of, no_room, vllms_share
from serve_app.backends.vllm_parts.scratch import Scratch
from serve_app.backends.vllm_parts.settings import LEASE_S, SHARE, TERMS, TESTED, VllmSettings
from serve_app.backends.vllm_parts.vllm_handoff import Readings, VllmManifest, pack, source_of, unpack
from speculative.errors import ConfigError, EngineFault, HandoffRefused, InvalidRequest
from speculative.model.end_tokens import end_tokens
from speculative.model.head_checkpoint import held_out_rates
from speculative.model.loading import resolve_model
from speculative.request import DEFAULT_VERSION, FinishReason, Request, Speculation, TokenDelta
from speculative.sampling.logprob_checks import LogprobContract
from speculative.selfcheck.monitor import SelfCheck
from speculative.state.batch import Terms
from speculative.stats import INVARIANTS, LOGPROB_RULES, CheckState, EngineUsage, Evidence, StepStats

_logger = logging.getLogger("truespec.vllm")

_STALLED_AFTER_S = 300.0
_FORGET_WITHIN_S = 2.0 * LEASE_S
_FORGET_EVERY_S = 0.02
_TERMS_EVERY_S = 1.0
_ADVICE = {
    "q_missing": " vLLM's log says for which requests; set drafter.sampled to false until vLLM keeps the distribution."
}
ENVIRONMENT = {  # unless set otherwise
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `vllm_parts.worker` knows the other one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all replicas would take the same cores
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the number of blocks is set separately
}


@dataclasses.dataclass(eq=False)
class VllmBackend:
    """Runs vLLM's `AsyncLLM`."""

    source: str  # a model folder, a catalogue name, or a hub id
    model_name: str  # that clients use
    settings: VllmSettings
    replayer: Backend | None = None  # an engine of our own that replays in vLLM's place
    _: dataclasses.KW_ONLY
    only_known: bool = False  # whether vLLM replays where our engine does not know the model; else that is an error

    def __post_init__(self) -> None:
        self._llm: Any = None
        self._device, self._device_bytes = "", 0
        self._live = 0  # requests under way
        self._lately: deque[Request] = deque(maxlen=64)  # begun, the newest last
        self._live_replays = 0  # those of them that are replays
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders: asyncio.Task[None] | None = None  # the last engine-wide order
        self._fault: Exception | None = None
        self._ends: tuple[int, ...] = ()  # the checkpoint's end tokens
        self._version = DEFAULT_VERSION
        self._loaded: tuple[Path, Path | None, str] | None = None  # the model's folder, the drafter's, its fingerprint
        self._drafter_fingerprint = ""
        self._paused = False
        self._readings = Readings()
        self._adapters = Adapters({})
        self._keeps_draws = False  # whether the referee can make vLLM's draws again
        self._self_check = SelfCheck(self.settings.self_check_sample_rate)

    async def start(self) -> ModelInfo:
        """Start vLLM's process, and wait until it has loaded the model."""
        version = settings.installed_version(allow_untested=self.settings.allow_untested)
        if not settings.is_tested(version):
            _logger.warning(
                "vLLM %s has not been tested for known faults (%s was): all workarounds stay on, every step is "
                "checked.",
                version,
                TESTED,
            )
            self.settings = dataclasses.replace(self.settings, self_check_sample_rate=1.0)
            self._self_check = SelfCheck(1.0)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with naming("model.source"):
            self._folder = await asyncio.to_thread(resolve_model, self.source)
            checkpoint.check_rotary(self._folder)
            await asyncio.to_thread(checkpoint.check_lm_head, self._folder)
            self._ends = tuple(end_tokens(self._folder))
        self._device, self._device_bytes = await asyncio.to_thread(
            _device, settings.ranks_of(self.settings.engine_args).by_ray
        )
        if self.replayer is not None:
            await asyncio.to_thread(self._make_room_for_replays)
        drafter = self.settings.engine.drafter
        self._drafter_folder = None
        if drafter.model is not None:
            with naming("drafter.model"):
                self._drafter_folder = await asyncio.to_thread(resolve_model, drafter.model, SHIPPED_HEADS)
        self._adapters = await asyncio.to_thread(read_adapters, self.settings.lora_modules, self._folder)
        self._scratch = await asyncio.to_thread(Scratch, Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None)
        try:
            self._llm = await asyncio.to_thread(self._start_engine)
        except Exception as error:
            self._scratch.remove()
            if isinstance(error, ConfigError):
                raise
            raise EngineFault(f"vLLM {version} could not start: {error}") from error
        for fault, fix in (  # known ones of vLLM's workers
            (self._faults.chunked_seeds, "keep_draws_of_chunks"),
            (self.settings.engine.logprobs_mode == "raw_logprobs", "keep_raw_logprobs"),
            (self._faults.mixed_adapters and self._adapters, "keep_adapters_apart"),
        ):
            if fault:
                await self._llm.collective_rpc(fix)
        try:
            await self._load_adapters()
        except ConfigError:
            await self._end_engine()
            raise
        if self.replayer is not None:  # the referee may be able to make this vLLM's draws again
            self._keeps_draws = all(await self._llm.collective_rpc("draws_can_be_repeated"))
        if self._watches:
            watched = (self.settings.self_check_sample_rate, settings.draws_drafts(drafter))
            await self._llm.collective_rpc("watch_sampler", args=watched)
            self._spawn(self._take_terms_forever())
        parallel, cache = self._llm.vllm_config.parallel_config, self._llm.vllm_config.cache_config
        await asyncio.to_thread(self._identify)
        layout = f"{cache.cache_dtype} {self.settings.engine.dtype} {cache.block_size}"
        if self._pulls:
            layout += f" {(await self._llm.collective_rpc('cache_layout'))[0]}"
        self._manifest = VllmManifest(
            fingerprint=self._fingerprint,
            drafter=self._drafter_identity,
            vllm=version,
            layout=layout,
            num_ranks=parallel.world_size,
            way=self.settings.handoff,
        )
        self._contract = LogprobContract(self.settings.engine.logprobs_mode, self._info().vocab_size)
        if self.replayer is not None:
            await self.replayer.start()
        return self._info()

    def _make_room_for_replays(self) -> None:
        """Shrink vLLM's share of a GPU for our engine's replays; vLLM replays if ours lacks room or the model. Raises
        ConfigError: our engine has no room, and must replay."""
        arguments, why_not = self.settings.engine_args, None
        if self.only_known and (unlike := checkpoint.why_not_ours(self._folder, arguments)):
            why_not = f"our own engine does not compute what this vLLM does ({unlike})"
        elif self._device_bytes:
            from speculative.gpu.triton_here import why_no_triton

            needs = needs_of(self._folder, self.settings.engine, arguments)
            share = vllms_share(needs, self._device_bytes, arguments.get(SHARE))
            if lacking := why_no_triton():
                why_not = f"our own engine has no kernels here ({lacking})"
            elif share is None:
                why_not = no_room(needs, self._device_bytes, arguments.get(SHARE))
            elif SHARE not in arguments:
                _logger.info("vLLM takes %.2f of the GPU's memory; truespec's engine replays beside it.", share)
                self.settings = dataclasses.replace(self.settings, engine_args={**arguments, SHARE: share})
        if why_not is None:
            return
        if not self.only_known:
            raise ConfigError(f"vllm.replays is torch, but {why_not}; remove it, or set it to vllm.")
        self.replayer = None
        _logger.warning(
            "vLLM replays its own answers, which compares logprobs, and the distribution of greedy answers only: %s.",
            why_not,
        )

    async def stop(self) -> None:
        """Stop vLLM's process; running requests end with an error."""
        if self.replayer is not None:
            await self.replayer.stop()
        if self._llm is not None:
            self._fault = EngineFault("The engine was stopped.")
            await self._end_engine()

    async def check(self, request: Request) -> None:
        """Refuse a request before anything waits for it."""
        self._check(request)

    def generate(self, request: Request, emitted: Sequence[int] = ()) -> AsyncGenerator[TokenDelta, None]:
        """Prefill and decode here."""
        return self._deltas(request, emitted, {})

    async def prefill(self, request: Request, *, first_token: bool) -> Prefilled:
        """Compute the prompt and hand it off. No token is sampled here, even if requested."""
        self._check(request)
        path = self._scratch.folder / uuid.uuid4().hex
        parts = [Path(f"{path}.{rank}") for rank in range(self._manifest.num_ranks)]
        delta = TokenDelta(request.request_id, weight_version=self._version)
        source: dict[str, Any] = {}
        handed_off = False
        try:
            transfer = {"save": str(path), "do_remote_decode": self._pulls}
            params = self._params.prefilling(request, transfer)
            async for output in self._outputs(request, request.prompt_token_ids, params):
                logprobs = prompt_logprobs(request, output)
                if logprobs is not None:
                    delta = delta._replace(prompt_logprobs=logprobs)
                if output.outputs[0].finish_reason == "abort":
                    return Prefilled((delta._replace(finish_reason=FinishReason.ABORT),), None)
                delta = delta._replace(num_cached_tokens=output.num_cached_tokens or 0, queue_s=queue_s(output))
                if self._pulls:
                    source = source_of(output)
            manifest = self._manifest_for(request)  # of what computed it, whatever changes while it is packed
            first_violation = self._contract.first_violation(delta, request)
            if first_violation is not None:
                self._counts.add_breach(first_violation, Evidence(request, refused=delta.token_ids))
                raise EngineFault(_broken(first_violation))
            handoff = await asyncio.to_thread(_packed, manifest, request, parts, source)
            handed_off = True
            return Prefilled((delta,), handoff)
        finally:
            if self._pulls and not handed_off:
                self._hand_back({"release": request.request_id})  # it may be computed, and nobody knows of it
            for part in parts:
                part.unlink(missing_ok=True)

    async def resume(self, request: Request, handoff: Handoff) -> AsyncGenerator[TokenDelta, None]:
        """Continue from a handoff. One read from memory is read only once; a second use finds it cached."""
        sent = unpack(handoff)
        try:
            sent.check(self._manifest_for(request), request.prompt_token_ids)
        except HandoffRefused:
            if sent.source:
                self._hand_back(sent.source | {"decline": True, "do_remote_prefill": False})
            raise
        if not sent.source:
            stream = self._from_files(request, sent.parts, {"num_tokens": sent.num_computed})
        elif reading := self._readings.begin(sent.source):
            stream = self._read(reading, self._from_files(request, sent.parts, sent.source))
        elif await self._readings.end(sent.source) and self.settings.engine.prefix_caching:
            stream = self._deltas(request, (), {"do_remote_prefill": False})
        else:
            raise HandoffRefused("lost", "The handoff has already been read, and can be read only once.")
        del handoff, sent  # the object store keeps it for as long as anything refers to it
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str) -> None:
        """End a running request; its stream ends with a last delta."""
        self._spawn(self._engine().abort(request_id))

    async def replay(self, request: Request) -> Replayed:
        """Compute a teacher-forced request: vLLM uses no prefix cache for it, and drafts nothing.

        An adapter's answers can only be replayed by vLLM itself.
        """
        if self.replayer is not None and not request.adapter:
            replay = await self.replayer.replay(request)
            structure = request.params.structure
            if structure is None or self._params.allows_what_ours_allows(structure):
                return replay
            return dataclasses.replace(replay, replayed=None)  # the distribution was a different one
        self._live_replays += 1
        try:  # of a prompt, vLLM returns the likeliest tokens' logprobs, and none of tokens that one names
            replay = await replayed(self.generate(dataclasses.replace(request, scored_ids=())))
            return dataclasses.replace(replay, numerics=self._numerics)
        finally:
            self._live_replays -= 1

    def set_speculation(self, speculation: Speculation) -> None:
        """Set who may draft from the next step on; vLLM keeps running."""
        if self._speculates:
            self._order(self._report(self._params.order(speculation=speculation.value)))

    def invalidate_cache(self) -> None:
        """Recompute running requests from an empty prefix cache, and restart the self-checks."""
        self._self_check.restart()
        self._order(self._forget())

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; vLLM recomputes the running requests, whose blocks are in it."""
        self._order(self._forget())

    async def load_weights(self, source: str, drafter: str | None = None) -> str:
        """Check new weights; vLLM reads them at the switch. Without a drafter's among them, the configured one's."""
        with naming("path"):
            folder = await asyncio.to_thread(resolve_model, source)
            checkpoint.check_same_model(folder, self._folder)
            await asyncio.to_thread(checkpoint.check_lm_head, folder)
        head = await self._drafter_with(folder, drafter)
        await asyncio.to_thread(self._adapters.check_unchanged)
        if self.replayer is not None:
            await self.replayer.load_weights(source)
        fingerprint = head_fingerprint = await asyncio.to_thread(checkpoint.folder_fingerprint, folder)
        if head != folder:
            head_fingerprint = "" if head is None else await asyncio.to_thread(checkpoint.folder_fingerprint, head)
        self._loaded = folder, head, head_fingerprint
        return self._adapters.with_model(fingerprint)

    async def _drafter_with(self, folder: Path, named: str | None) -> Path | None:
        """The folder of the drafter that goes with new weights in `folder`; None where it has no weights. Raises
        ConfigError: what the update names is of another drafter."""
        configured, kind = self._drafter_folder, self.settings.engine.drafter.kind
        if named is None:
            in_checkpoint = kind == "mtp" and configured == self._folder
            return folder if in_checkpoint else configured
        if configured is None:
            raise ConfigError(f"drafter.kind {kind} has no weights, but an update names some ({named}).")
        with naming("drafter_path"):
            head = await asyncio.to_thread(resolve_model, named, SHIPPED_HEADS)
            checkpoint.check_same_model(head, configured)
        return head

    async def switch_weights(self, version: str) -> ModelInfo:
        """Switch to the weights checked last; running requests are recomputed from their tokens."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            raise EngineFault("There are no weights to switch to; load them first.")
        (folder, head, head_fingerprint), was_paused = loaded, self._paused
        if not was_paused:
            await self.pause(PauseMode.KEEP)
        try:
            await asyncio.to_thread(self._adapters.check_unchanged)
            await self._llm.collective_rpc("reload_target", args=(str(folder),))
            if head is not None and head_fingerprint != self._drafter_fingerprint:
                await self._llm.collective_rpc("reload_drafter", args=(str(head),))
                self._drafter_fingerprint = head_fingerprint
            await self._load_adapters()
            await self._forget()
            self._fingerprint = await asyncio.to_thread(checkpoint.folder_fingerprint, folder)
            self._came_quantized = checkpoint.came_quantized(folder)
            self._manifest = dataclasses.replace(
                self._manifest, fingerprint=self._fingerprint, drafter=self._drafter_identity
            )
            self._version = version
            if self.replayer is not None:
                await self.replayer.switch_weights(version)
        except Exception as error:
            self._fault = error  # partly old, partly new: it must not serve
            raise EngineFault(f"vLLM could not load the new weights: {error}") from error
        finally:
            if not was_paused:
                await self.unpause()
        return self._info()

    def drop_weights(self) -> None:
        """Drop weights that were checked but will not be served."""
        self._loaded = None
        if self.replayer is not None:
            self.replayer.drop_weights()

    async def pause(self, mode: PauseMode) -> None:
        """Start no more requests; returns when none is running, or with `keep` when all stand still."""
        self._paused = True
        try:
            if self._pulls and mode is not PauseMode.WAIT:  # it pauses once nothing waits to be read
                await self._report(self._params.order(transfer={"recall": True}))
            await self._engine().pause_generation(mode=mode.value, clear_cache=False)
        except asyncio.CancelledError:
            await self._llm.resume_generation()
            self._paused = False
            raise

    async def unpause(self) -> None:
        """Continue with suspended and newly arrived requests."""
        await self._engine().resume_generation()
        self._paused = False

    def usage(self) -> EngineUsage:
        """Return what the engine holds, as of its last step."""
        return self._counts.usage(self._live, self._live_replays)

    def cached_blocks(self, most: int) -> list[bytes]:
        """Empty: vLLM's blocks have names of its own."""
        return []

    def take_stats(self) -> StepStats:
        """Counts since the last call."""
        return self._counts.take()

    def self_checks(self) -> tuple[CheckState, ...]:
        """State of the self-checks of vLLM's sampler; none if they are off: then only replays check its output."""
        return self._self_check.snapshot() if self._watches else ()

    def check_health(self) -> None:
        """Raise if vLLM's process died, hangs, or did not follow an order."""
        if self._fault is not None:
            raise EngineFault(f"The engine stopped: {self._fault}")
        if self._engine().errored:
            raise EngineFault("vLLM's engine died; its log says why.")
        if self._live and not self._paused and time.monotonic() - self._counts.last_step_at > _STALLED_AFTER_S:
            raise EngineFault(f"vLLM has made no step for more than {_STALLED_AFTER_S:.0f} s.")

    # -- requests -----------------------------------------------------------------------------------------------

    async def _deltas(
        self, request: Request, emitted: Sequence[int], transfer: dict[str, Any]
    ) -> AsyncGenerator[TokenDelta, None]:
        self._check(request)
        prompt = [*request.prompt_token_ids, *emitted]
        room = self._max_model_len - len(prompt)
        if room <= 0 and request.score_from is None:
            yield TokenDelta(request.request_id, finish_reason=FinishReason.LENGTH, weight_version=self._version)
            return
        params = self._params.to_vllm(request, emitted=emitted, room=room, transfer=transfer, ends=self._ends)
        reader = DeltaReader(request, len(emitted), handed_off=bool(transfer), keeps_draws=self._keeps_draws)
        try:
            async with contextlib.aclosing(self._outputs(request, prompt, params)) as outputs:
                async for output in outputs:
                    if request.score_from is None:
                        delta, rounds = reader.read(output, self._version)
                    else:
                        delta, rounds = scored(request, output, self._version)
                    first_violation = self._contract.first_violation(delta, request)
                    if first_violation is not None:
                        self._counts.add_breach(first_violation, Evidence(request, refused=delta.token_ids))
                        delta = _failed(request, _broken(first_violation))
                    self._counts.add_rounds(request, delta, rounds)
                    yield delta
                    if delta.finished:
                        return
        except EngineFault as error:
            yield _failed(request, str(error))

    async def _from_files(
        self, request: Request, parts: Sequence[memoryview], transfer: dict[str, Any]
    ) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of a request whose handoff the workers find in files."""
        path = self._scratch.folder / uuid.uuid4().hex
        files = [Path(f"{path}.{rank}") for rank in range(len(parts))]
        try:
            await asyncio.to_thread(_write, files, parts)
            parts = ()
            async with contextlib.aclosing(self._deltas(request, (), transfer | {"load": str(path)})) as deltas:
                async for delta in deltas:
                    for file in files:
                        file.unlink(missing_ok=True)
                    yield delta
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    async def _read(
        self, reading: asyncio.Future[bool], stream: AsyncGenerator[TokenDelta, None]
    ) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of a request whose handoff is read from memory; others wait until that is done."""
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    if delta.error == GAVE_UP and not reading.done():
                        raise HandoffRefused("lost", "The KV files of the prefill are missing or truncated.")
                    if not reading.done():
                        reading.set_result(delta.error is None)
                    yield delta
        finally:
            if not reading.done():
                reading.set_result(False)

    async def _outputs(self, request: Request, prompt: Sequence[int], params: Any) -> AsyncGenerator[Any, None]:
        """vLLM's outputs; leaving early aborts the request."""
        if self._orders is not None:
            await asyncio.wait((self._orders,))  # it came before this request, and takes effect before it
        self.check_health()
        if self._live == 0:
            self._counts.begin()
        self._live += 1
        self._lately.append(request)
        outputs = self._llm.generate(
            {"prompt_token_ids": list(prompt)} | ({"cache_salt": request.cache_salt} if request.cache_salt else {}),
            params,
            request.request_id,
            lora_request=self._params.lora(self._adapters.find(request.adapter)),
            priority=request.priority,
        )
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except self._client_error as error:
            raise InvalidRequest(getattr(error, "parameter", None) or "request", str(error)) from error
        except self._server_error as error:
            cause = error.__cause__ or error  # vLLM wraps unexpected errors
            if isinstance(cause, self._client_error):
                raise InvalidRequest("request", str(cause)) from error
            raise EngineFault(f"vLLM's engine failed: {cause}") from error
        finally:
            self._live -= 1

    def _manifest_for(self, request: Request) -> VllmManifest:
        return dataclasses.replace(self._manifest, adapter=self._adapters.identity(request.adapter))

    def _check(self, request: Request) -> None:
        self.check_health()
        self._adapters.find(request.adapter)
        self._params.check(
            request,
            speculates=self._speculates,
            max_model_len=self._max_model_len,
            vocab_size=self._contract.vocab_size,
        )

    # -- the engine as a whole ----------------------------------------------------------------------------------

    async def _end_engine(self) -> None:
        llm, self._llm = self._llm, None
        await asyncio.to_thread(llm.shutdown)
        self._scratch.remove()

    async def _load_adapters(self) -> None:
        """Load all adapters into vLLM; new weights make it forget them. Raises ConfigError: vLLM rejects one."""
        for one in self._adapters:
            try:
                await self._llm.add_lora(self._params.lora(one))
            except Exception as error:
                raise ConfigError(
                    f"vllm.lora_modules.{one.adapter.name} is {one.adapter.root}, which vLLM rejects: {error}"
                ) from error

    async def _report(self, order: Any) -> None:
        """Send the scheduler an order; it takes effect on arrival, whatever happens to the request carrying it."""
        name = f"truespec-order-{uuid.uuid4().hex}"
        await self._llm.add_request(name, {"prompt_token_ids": [0]}, order)
        await self._llm.abort(name)

    def _hand_back(self, transfer: dict[str, Any]) -> None:
        """Release a handoff that nobody will read."""
        if self._llm is None or self._llm.errored:
            return
        self._order(self._report(self._params.order(transfer=transfer)))

    async def _take_terms_forever(self) -> None:
        """Fetch what the self-checks found. The last rank always samples; others see the same, or nothing."""
        while self._llm is not None:
            await asyncio.sleep(_TERMS_EVERY_S)
            try:
                reported = await self._llm.collective_rpc("take_checked")
            except Exception as error:
                if self._llm is not None:
                    self._fault = error
                return
            terms, violations, excess = reported[-1]
            stats, num_found = self._counts.stats, self._counts.stats.num_found
            for checks, sums, achievable in terms:
                self._self_check.take(Terms(tuple(checks), np.array(sums), achievable), stats)
            self._counts.add_excess(excess)
            for kind, number in violations.items():
                stats.count_violation(kind, number)
                what = "vLLM's sampler broke an invariant %d times: %s.%s"
                _logger.error(what, number, INVARIANTS[kind], _ADVICE.get(kind, ""))
            if stats.num_found > num_found:  # in which of these, vLLM's sampler does not say
                stats.evidence += tuple(map(Evidence, self._lately))

    async def _forget(self) -> None:
        """Empty the prefix cache, after waiting for handoffs being read."""
        last = time.monotonic() + (_FORGET_WITHIN_S if self._pulls else 0)
        while True:
            try:
                if await self._llm.reset_prefix_cache(reset_running_requests=True):
                    return
                why = "it says no more"
            except Exception as error:
                why = str(error)
            if time.monotonic() >= last:
                raise EngineFault(f"vLLM did not empty its prefix cache: {why}")
            await asyncio.sleep(_FORGET_EVERY_S)

    def _order(self, work: Any) -> None:
        """Queue an engine-wide order: after earlier orders, before any later request."""
        before = self._orders

        async def run() -> None:
            if before is not None:
                await asyncio.wait((before,))
            try:
                await work
            except Exception as error:
                _logger.exception("vLLM failed to carry out an order.")
                self._fault = error

        self._orders = self._spawn(run())

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _engine(self) -> Any:
        if self._llm is None:
            raise EngineFault("The engine is not started.")
        return self._llm

    @property
    def _speculates(self) -> bool:
        return self.settings.engine.drafter.kind != "none"

    @property
    def _pulls(self) -> bool:
        return self.settings.handoff == "nixl"

    @property
    def _watches(self) -> bool:
        return self.settings.self_check_sample_rate > 0

    def _info(self) -> ModelInfo:
        model = self._llm.model_config
        why = "vLLM rounds by the size of the batch"
        if self._speculates:
            why += ", and what a seed gives depends on where its drafts end"
        name = f"vllm {settings.installed_version()} {self.settings.engine.dtype}"
        return ModelInfo(
            model_name=self.model_name,
            max_model_len=self._max_model_len,
            vocab_size=model.get_vocab_size(),
            fingerprint=self._adapters.with_model(self._fingerprint),
            folder=str(self._folder),
            eos_token_ids=self._ends,
            device_bytes=self._device_bytes,
            drafter_folder="" if self._drafter_folder is None else str(self._drafter_folder),
            held_out_acceptance=self._held_out,
            adapters=tuple(one.adapter for one in self._adapters),
            computing=Computing(
                unrepeatable=why, couples_seeds=False, name=name, device=self._device, numerics=self._numerics
            ),
            quantization=model.quantization or ("gguf" if self._came_quantized else None),
        )

    @property
    def _drafter_identity(self) -> str:
        return f"{self.settings.engine.drafter.kind} {self._drafter_fingerprint}".strip()

    @property
    def _held_out(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return held_out_rates(self.settings.engine.drafter.kind, self._drafter_folder)

    @property
    def _numerics(self) -> Numerics:
        form = self._llm.model_config.quantization
        return Numerics("vllm", precision_of(self.settings.engine.dtype, form), form or "plain")

    @property
    def _max_model_len(self) -> int:
        """vLLM samples a token after anything it computes, even a replayed text: there must be room for it."""
        return int(self._llm.model_config.max_model_len) - 1

    def _identify(self) -> None:
        self._fingerprint = checkpoint.folder_fingerprint(self._folder)
        self._came_quantized = checkpoint.came_quantized(self._folder)
        self._drafter_fingerprint = ""
        if self._drafter_folder == self._folder:  # an MTP module in the model's own checkpoint
            self._drafter_fingerprint = self._fingerprint
        elif self._drafter_folder is not None:
            self._drafter_fingerprint = checkpoint.folder_fingerprint(self._drafter_folder)

    def _start_engine(self) -> Any:
        """vLLM is imported only here, so that everything else works without it."""
        from vllm import AsyncEngineArgs
        from vllm.exceptions import VLLMClientError, VLLMServerError
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from serve_app.backends.vllm_parts import params, vllm_stats

        self._params = params
        self._client_error, self._server_error = (VLLMClientError, ValueError), VLLMServerError
        config, cpu = self.settings.engine, current_platform.is_cpu()
        self._faults = settings.faults_of(cpu=cpu)
        hidden = os.environ.get(current_platform.device_control_env_var) == ""
        settings.check_build(self.settings, cpu=cpu, ray=bool(current_platform.ray_device_key), hidden=hidden)
        arguments = settings.engine_arguments(
            self.settings,
            str(self._folder),
            None if self._drafter_folder is None else str(self._drafter_folder),
            most_tokens=checkpoint.most_tokens(self._folder, config.max_model_len),
        )
        arguments |= self._adapters.arguments(self.settings.engine_args)
        arguments |= checkpoint.neutral_overrides(self._folder, self.settings.engine_args)
        settings.check_known(arguments, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
        arguments["additional_config"] = {TERMS: settings.scheduler_terms(config.drafter, self._faults, self._held_out)}
        if self._pulls:
            from vllm.utils.network_utils import get_ip, get_open_port

            # The decode side's vLLM asks this one at a free port what there is to read.
            os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", get_ip())
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(get_open_port())
        self._counts = vllm_stats.Counts()
        logger = vllm_stats.logger_for(self._counts.add_step)
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[logger])
        cache = llm.vllm_config.cache_config
        self._counts.set_sizes(cache.num_gpu_blocks, cache.block_size)
        return llm


def _device(elsewhere: bool) -> tuple[str, int]:
    """Return what vLLM computes on, and the memory of that GPU; 0 = it is none. Nothing is known of it elsewhere."""
    if elsewhere:
        return "", 0
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "CPU", 0
    return current_platform.get_device_name(), current_platform.get_device_total_memory()


def _packed(manifest: VllmManifest, request: Request, parts: Sequence[Path], source: dict[str, Any]) -> Handoff:
    if manifest.way == "nixl" and not source:
        raise EngineFault("vLLM did not report where to read the computed prompt.")
    try:
        return pack(manifest, request.prompt_token_ids, [part.read_bytes() for part in parts], source)
    except OSError as error:
        raise EngineFault(f"vLLM did not export the computed prompt: {error}") from error


def _write(files: Sequence[Path], parts: Sequence[memoryview]) -> None:
    for file, part in zip(files, parts, strict=True):
        file.write_bytes(part)


def _failed(request: Request, why: str) -> TokenDelta:
    return TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error=why)


def _broken(first_violation: str) -> str:
    return (
        f"Logprobs broke their contract ({LOGPROB_RULES[first_violation]}); the request ends here, and none of "
        f"them is returned."
    )
