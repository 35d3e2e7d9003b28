"""The stream router, and the decode replicas behind it."""

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.context import _get_serve_request_context
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import ModelInfo
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.deployments.engine_host import EngineHost
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.pools import EngineServer
from serve_app.deployments.prefill_pool import token_source
from serve_app.deployments.remote_errors import own_error
from serve_app.deployments.runtime import ReplicaRuntime, Reporter
from serve_app.referee.records.records import Records
from serve_app.streams.in_flight import InFlight
from serve_app.streams.pooled import PooledTokenSource
from serve_app.streams.resuming import ReplicaLost, ResumingSource, Streamed, with_signs_of_life
from serve_app.telemetry.tracing import Carried, adopt, carried
from speculative.errors import EngineOverloaded
from speculative.model.file_names import read_all_but_weights
from speculative.request import FinishReason, Request

_SIGNS_OF_LIFE = 4  # in the time after which a decode replica counts as lost


class DecodeWorker(EngineServer):
    """Decodes for the stream router, in the place of a replica that answers HTTP itself."""

    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, pool: PoolName, prefill: "DeploymentHandle[Any] | None"
    ) -> None:
        self._prefilled_by: dict[str, str] = {}
        runtime = ReplicaRuntime(config, pool)
        self._in_flight = InFlight(runtime.metrics)  # requests of the router's, in contrast to canaries
        self.host = EngineHost(runtime, pool, self.make_backend(config, pool), self._weights_switched)
        self._info = await self.host.start(lambda host: self.token_source(host, prefill))

    def token_source(self, host: EngineHost, prefill: "DeploymentHandle[Any] | None") -> PooledTokenSource:
        """Return where this replica's tokens come from."""
        return token_source(host, prefill, self._handed_off)

    def _weights_switched(self, info: ModelInfo) -> None:
        self._info = info

    def _handed_off(self, request_id: str, prefilled_by: str) -> None:
        """The handoff of a request was taken in: the next delta reports it to the router; the records, of a canary."""
        if request_id in self._in_flight:
            self._prefilled_by[request_id] = prefilled_by
        else:
            self.host.records.handed_off(request_id, prefilled_by)

    async def model(self) -> tuple[ModelInfo, dict[str, bytes]]:
        """Return what is served, and the files that the tokenizer is made of."""
        return self._info, await asyncio.to_thread(read_all_but_weights, Path(self._info.folder))

    async def stream(
        self,
        requests: Sequence[Request],
        emitted: dict[str, tuple[int, ...]],
        reported: Carried,
        avoid: Sequence[str] = (),
    ) -> AsyncGenerator[Streamed, None]:
        """Generate for requests that share one prompt; with `emitted` (by id), go on after those tokens. What to
        `avoid` is for the router that chose this replica."""
        del avoid
        adopt(reported)
        began_at = time.time()
        host = self.host
        tokens = host.source.go_on(requests, emitted) if emitted else host.source.stream(requests)
        every_s = host.runtime.config.recovery.decode_timeout_s / _SIGNS_OF_LIFE
        crashed = False
        ends: dict[str, FinishReason | None] = {}  # of those the engine has ended; the router may have more elsewhere
        prefilled: dict[str, str] = {}  # which replica had a part in it, by request
        num_tokens = {request.request_id: len(emitted.get(request.request_id, ())) for request in requests}
        try:
            with self._in_flight.holding(num_tokens):
                async with contextlib.aclosing(with_signs_of_life(tokens, every_s)) as deltas:
                    async for delta in deltas:
                        prefilled_by = None
                        if delta is None:
                            host.backend.check_health()
                        else:
                            name = delta.request_id
                            prefilled_by = self._prefilled_by.pop(name, None)
                            num_tokens[name] += len(delta.token_ids)
                            ends[name] = delta.finish_reason
                            if delta.token_ids or delta.finished:
                                self._in_flight.reach(name, "reply" if delta.finished else "decode")
                            if maker := prefilled_by or delta.prefilled_by:
                                prefilled[name] = maker
                        yield Streamed(delta, host.runtime.name, prefilled_by, self._info.fingerprint)
        except Exception:
            crashed = True
            raise
        finally:
            for request in requests:
                name = request.request_id
                self._prefilled_by.pop(name, None)
                if request.score_from is None:
                    whole = ends.get(name) in (FinishReason.STOP, FinishReason.LENGTH)
                    known = prefilled.get(name, ""), num_tokens[name] if whole else 0
                    host.remember(request, began_at, *known, failed=crashed or ends.get(name) is FinishReason.ERROR)

    async def abort(self, request_id: str) -> None:
        """End one of several choices, if it is here; the others go on."""
        await self.host.source.abort(request_id)


@serve.ingress()
class StreamRouter:
    """HTTP before replicas that may die: it knows every token it has passed on, and has another go on after them."""

    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, workers: "DeploymentHandle[Any]", controller: object
    ) -> None:
        del controller
        runtime = ReplicaRuntime(config, "router")
        reporter = Reporter(runtime)
        self._front = HttpFront(runtime, reporter)
        self._workers = workers
        info, files = await workers.model.remote()
        self._folder = tempfile.TemporaryDirectory(prefix="truespec-tokenizer-")
        for name, content in files.items():
            path = Path(self._folder.name) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        info = self._info = dataclasses.replace(info, folder=self._folder.name)
        most_drafts = config.engine_config(config.decoding_pool).drafter.max_drafts
        records = Records(runtime.name, info.max_model_len, most_drafts, info.eos_token_ids, info.computing.numerics)
        recovery = config.recovery
        source = ResumingSource(
            self, runtime.metrics, records, most_resumes=recovery.max_resumes, silence_s=recovery.decode_timeout_s
        )
        pool = config.pool(config.decoding_pool)
        self._front.open(source, records, info, num_engines=pool.most_replicas)
        runtime.spawn(reporter.report_forever())

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the constructor has finished; nothing here breaks that would not end the process."""
        return self._front.asgi_app()

    async def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        """Ask one of the workers, whichever the pool's routing chooses.

        Raises:
            ReplicaLost: it died.
            EngineOverloaded: the pool takes nothing more.
        """
        session = _get_serve_request_context().session_id  # the client's `x-session-id`, "" without one
        workers = self._workers.options(stream=True, session_id=session)
        response = workers.stream.remote(requests, dict(emitted), carried(), avoid=avoid)
        try:
            async for streamed in response:
                if streamed.fingerprint != self._info.fingerprint:  # the worker switched weights: replies name them
                    self._info = dataclasses.replace(self._info, fingerprint=streamed.fingerprint)
                    self._front.weights_switched(self._info)
                yield streamed
        except BackPressureError as error:
            raise EngineOverloaded("All replicas are busy. Retry later.", retry_after_s=1.0) from error
        except RayTaskError as error:
            raise own_error(error, ReplicaLost) from error
        except (RayError, RayServeException) as error:
            raise ReplicaLost(f"a decode replica was lost: {error}") from error
        finally:
            response.cancel()

    async def abort(self, request_id: str) -> None:
        """End one of several choices, wherever it runs."""
        await self._workers.broadcast("abort", request_id).results_async(return_exceptions=True)
