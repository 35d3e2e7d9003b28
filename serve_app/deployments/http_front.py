"""A deployment that answers HTTP."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_app.backends.base import ModelInfo, TokenSource
from serve_app.deployments.runtime import ReplicaRuntime, Reporter
from serve_app.errors import UnknownReplica
from serve_app.guard.breaker import Mode
from serve_app.http.access.access import Access, read_token
from serve_app.http.access.keys import KeyStore
from serve_app.http.access.request_gate import Gate
from serve_app.http.admin import Admin, RehearsalOrder, SpeculationOrder, Statuses
from serve_app.http.page.feed import StatusFeed
from serve_app.http.page.page_routes import add_page
from serve_app.http.routes import Operations, build_ingress
from serve_app.http.vllm_routes import VllmRoutes
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.judge.answer import Answer
from serve_app.referee.records.own_reader import OwnReader
from serve_app.referee.records.records import Record, Records
from serve_app.referee.records.replay_selection import Checks, chosen
from serve_app.referee.records.signatures import SigningKey
from serve_app.streams.in_flight import InFlight
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.telemetry.tracing import Carried, adopt, carried
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault

_logger = logging.getLogger("truespec.serve")


@dataclass(eq=False)
class HttpFront:
    """Answers HTTP in a replica: the front end over a source of tokens."""

    runtime: ReplicaRuntime
    reporter: Reporter  # sends its counts before they are read
    ended: Callable[[Record], None] = lambda record: None  # called with each request that came to its end

    def __post_init__(self) -> None:
        self._config = self.runtime.config
        self._front_end: FrontEnd | None = None
        self._in_flight = InFlight(self.runtime.metrics)
        if self._config.vllm.has_parsers:  # before an engine is loaded for minutes
            from serve_app.backends.vllm_parts.parsers import check_names

            check_names(self._config.vllm.tool_parser, self._config.vllm.reasoning_parser)
        key_file = self._config.receipts.key_file
        self._signing_key = None if key_file is None else SigningKey(Path(key_file))
        keys, keys_file, token_file = None, self._config.access.keys_file, self._config.admin.token_file
        if keys_file is None:
            _logger.info("no access.keys_file is set: anyone who can reach this service may use it")
        else:
            metrics = self.runtime.metrics

            def reloaded(well: bool) -> None:
                metrics.gauge("truespec_keys_stale", not well)

            keys = KeyStore(Path(keys_file), reloaded)
            reloaded(True)
            self.runtime.spawn(keys.watch())
            _logger.info("%s has %d keys", keys_file, len(keys))
        token = None if token_file is None else read_token(Path(token_file))
        self._access = Access(None if keys is None else keys.find, token)
        self._admin: Admin | None = None
        if self._access.has_admin:
            controller, rehearse = self.runtime.controller, self._rehearse if self._config.guard.rehearsal else None
            self._admin = Admin(controller.statuses, self._order, controller.weights, rehearse, controller.verdicts_of)

    def open(self, tokens: TokenSource, records: Records, info: ModelInfo, *, num_engines: int = 1) -> None:
        """Build the front end over a source, which has so many engines behind it."""
        limits, replay = self._config.limits, self._config.replay
        tokenizer = Tokenizer.from_folder(info.folder, self._config.model.chat_template)
        parsers, vllm = None, self._config.vllm
        if vllm.has_parsers:  # vLLM is imported for them only: a front end needs it for nothing else
            from serve_app.backends.vllm_parts.parsers import VllmParsers

            parsers = VllmParsers(vllm.tool_parser, vllm.reasoning_parser, info.folder)
        comparable = self._config.engine.logprobs_mode == "raw_logprobs"
        self._checks = Checks(
            lambda reply_id: chosen(reply_id, replay.sample_rate),
            self._config.replays_show_distribution(info.folder, info.device_bytes),
            OwnReader(info, tokenizer, parsers).answers,
            self._submit,
            self.runtime.check,
            replay.verify_timeout_s,
            limits.request_timeout_s,
        )

        def request_ended(record: Record, checked: bool) -> None:
            self.ended(record)
            if checked:
                self._checks.ended(record)

        slots = self._config.engine.max_num_seqs * num_engines
        most = limits.max_ongoing_requests * num_engines
        source = ObservedSource(
            tokens,
            self.runtime.metrics,
            records,
            select=self._checks.select,
            ended=request_ended,
            limits=SourceLimits(
                most,
                limits.request_timeout_s,
                max_others=int(limits.max_load * slots),
                max_queued_tokens=limits.max_queued_tokens,
                max_first_token_s=limits.max_time_to_first_token_s,
            ),
            in_flight=self._in_flight,
        )
        _logger.info("%s", tokenizer.ends())
        for remark in tokenizer.remarks():
            _logger.warning("%s", remark)
        self._front_end = FrontEnd(
            source,
            tokenizer,
            info,
            Limits(
                max_body_bytes=limits.max_body_bytes,
                max_choices=limits.max_choices,
                max_sequences=most,
                max_prompt_tokens=limits.max_prompt_tokens,
                resumes=None if self._config.router is None else self._config.recovery.resume,
                pace=self._config.pace(),
                keep_alive_s=limits.stream_keep_alive_s,
                special_tokens_in_text=self._config.model.special_tokens_in_text,
            ),
            checks=self._checks if comparable else None,
            parsers=parsers,
            signing_key=self._signing_key,
        )

    def weights_switched(self, info: ModelInfo) -> None:
        """Other weights are served from now on."""
        if self._front_end is not None:
            self._front_end.weights_switched(info)

    def asgi_app(self, check_health: Callable[[], Awaitable[None]] | None = None) -> Any:
        """The HTTP application of this replica; `check_health` raises where it cannot serve."""
        if self._front_end is None:
            raise EngineFault("The replica is not started.")
        controller, engine = self.runtime.controller, self._config.engine
        model = {
            "model": self._config.model.source,
            "served_model_name": self._config.model.served_name,
            "dtype": f"torch.{engine.dtype}",
            "max_model_len": engine.max_model_len,
            "logprobs_mode": engine.logprobs_mode,
        }
        settings = {"model_config": model, "weight_transfer_config": {"backend": "folder"}}
        app = build_ingress(
            self._front_end,
            operations=Operations(
                self.exposition,
                check_health,
                VllmRoutes(settings, controller.weights),
                self.verdict,
                controller.responses if self._config.responses.max_mib else None,
            ),
            admin=self._admin,
            gate=Gate(
                self._access,
                self.runtime.metrics,
                open_metrics=self._config.access.open_metrics,
                open_health=self._config.access.open_health,
                open_trainer_api=self._config.admin.open_trainer_api,
                cors_origins=self._config.access.cors_origins,
                in_flight=self._in_flight,
            ),
            tracing=self.runtime.tracing,
        )
        add_page(app, StatusFeed(self.status, controller.status_history))
        return app

    async def status(self) -> dict[str, Any]:
        """Return what the status page shows of the whole app; the quantization is that of the model as it is served
        here."""
        reported = await self.runtime.controller.status()
        quantization = None
        if self._front_end is not None:
            quantization = self._front_end.model(self._config.model.served_name)["quantization"]
        return reported | {"about": reported["about"] | {"quantization": quantization}}

    async def exposition(self) -> tuple[bytes, str]:
        """The whole app's metrics, this replica's newest counts included."""
        await self.reporter.report()
        return await self.runtime.controller.exposition()

    async def verdict(self, reply_id: str) -> dict[str, Any] | None:
        """Return what is known of a reply, this replica's newest ones included."""
        await self.reporter.report()
        return await self.runtime.controller.verdict(reply_id)

    async def _order(self, wanted: SpeculationOrder) -> Statuses:
        reported = await self.runtime.controller.order(Mode(wanted.mode), wanted.replica)
        if reported is None:
            raise UnknownReplica(f"There is no replica {wanted.replica!r}; GET /admin/speculation lists them.")
        return reported

    async def _rehearse(self, wanted: RehearsalOrder) -> Statuses:
        reported = await self.runtime.controller.rehearse(wanted.replica)
        if reported is None:
            raise UnknownReplica(
                "No replica of that name can rehearse now. It must decode, its breaker be closed and in mode auto, "
                "and its last rehearsal be over: GET /admin/speculation shows it."
            )
        return reported

    def _submit(self, answer: Answer, reply_bytes: str) -> None:
        self.runtime.metrics.count("truespec_replays_requested_total", bytes=reply_bytes)
        self.runtime.spawn(self._submit_soon(answer, carried()))

    async def _submit_soon(self, answer: Answer, client: Carried) -> None:
        adopt(client)
        try:
            await self.runtime.controller.submit(answer)
        except (RayError, RayServeException) as error:
            self.runtime.metrics.count("truespec_replays_total", result="failed")
            _logger.warning("%s could not be submitted for replay: %s", answer.request.request_id, error)
