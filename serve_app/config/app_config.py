"""The application's settings: one YAML, which is also a Ray Serve config.

`load_config` reads the whole file and checks it before anything starts. Every error names the file, the field and the
fix. The engine's own settings, `speculative.config.EngineConfig`, are made from it once per pool.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from serve_app.backends.base import FEW_BESIDE_A_GPU, FEW_STREAMS, Pace
from serve_app.backends.vllm_parts.checkpoint import why_not_ours
from serve_app.backends.vllm_parts.replay_room import needs_of, vllms_share
from serve_app.backends.vllm_parts.settings import (
    SHARE,
    SIZES,
    Ranks,
    VllmSettings,
    check_lora,
    check_settings,
    ranks_of,
)
from serve_app.config.base import (
    POOLS_OF_TOPOLOGY,
    AtLeastOne,
    FieldError,
    FieldErrors,
    PoolName,
    Section,
    Target,
)
from serve_app.config.scaling import AutoscalingSection
from speculative.config import (
    MAX_DRAFTS,
    DrafterConfig,
    DrafterSettings,
    EngineConfig,
    EngineSettings,
    drafter_kinds,
)
from speculative.drafters import registered
from speculative.errors import ConfigError
from speculative.options import Option, OptionError, option, options_of
from speculative.request import Request


def _no_url(source: str) -> str:
    if "://" in source:
        raise ValueError(
            f"is a URL, got {source!r}, and replicas load from a folder or the hub; fetch it into a folder first "
            "(docs/deployment.md: an init container), and name that"
        )
    return source


Source = Annotated[str, Field(min_length=1), AfterValidator(_no_url)]
"""The place that weights come from."""


def _ray_share(number: float) -> float:
    if 0 < number < _RAY_PRECISION:
        raise ValueError(f"must be 0 or at least {_RAY_PRECISION}, the least that Ray reserves; got {number!r}.")
    return number


_RAY_PRECISION = 0.0001  # of numbers of CPUs and GPUs
RayShare = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_ray_share)]
"""CPUs or GPUs, as Ray can reserve them."""


class ModelSection(Section):
    """The model: a folder, a name of the catalogue, or a hub id; clients ask for it by `name`."""

    source: Source
    """A folder, a name of `truespec model list`, or a hub id (`org/name[@revision]`)."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name that clients ask for; the last part of `source` when not set."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """In place of the model's own chat template: a Jinja file, at this path on every node that answers HTTP; or
    `chatml-tools` or `smollm2-tools`, which come with the package."""
    special_tokens_in_text: Literal["allow", "escape", "refuse"] = "allow"
    """Special tokens that texts of a conversation spell, such as `<|im_end|>` in a message. `allow`: they are
    tokens, as in vLLM; `escape`: they become plain text; `refuse`: the request is refused."""

    @model_validator(mode="after")
    def _is_called_something(self) -> Self:
        if not self.served_name:
            raise FieldError("name", f"is missing: source {self.source!r} does not end in a name; set one.")
        return self

    @property
    def served_name(self) -> str:
        """The name that clients use: `name`, or the last part of `source`, of a hub's model without its revision."""
        source = re.sub(r"^([^./~][^/]*/[^/@]+)@.*", r"\1", self.source)
        return self.name or source.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class _WhichEngine:
    kind: Literal["torch", "vllm"] = option(
        "torch",
        "`torch`: truespec's own engine; `vllm`: vLLM, if it is installed, for what that does not support "
        "(docs/vllm.md).",
    )


class EngineSection(Section, EngineSettings, _WhichEngine):  # type: ignore[misc]  # a section is frozen as well
    """Sizes and choices of each replica's engine."""


class VllmSection(Section):
    """Settings of the vLLM engine only (`engine.kind: vllm`)."""

    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `tensor_parallel_size`; not those that this file sets."""
    lora_modules: dict[str, Source] = {}
    """LoRA adapters: a folder each, by the name that clients give as `model`; sizes are vLLM's, in `engine_args`."""
    replays: Literal["vllm", "torch"] | None = None
    """Engine that replays finished requests; `torch`: truespec's own beside vLLM, except for requests of an
    adapter. Default: `torch` for a model that it knows, on a GPU if both fit on a whole one, of which vLLM then
    takes less."""
    self_check_sample_rate: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the steps in which self-checks see vLLM's distributions and the tokens it samples from them; 0 =
    none."""
    allow_untested: bool = False
    """Also serve with a version of vLLM whose faults have not been looked for; all of its steps are then checked."""
    tool_parser: Annotated[str, Field(min_length=1)] | None = None
    """vLLM's parser of tool calls, such as `hermes`, in place of truespec's (`--tool-call-parser`)."""
    reasoning_parser: Annotated[str, Field(min_length=1)] | None = None
    """vLLM's parser that separates reasoning from the answer, such as `deepseek_r1` (`--reasoning-parser`)."""

    @property
    def has_parsers(self) -> bool:
        """Return whether the text of answers is parsed."""
        return self.tool_parser is not None or self.reasoning_parser is not None


def _of_registered() -> dict[str, Option]:
    """The kinds and the options of drafters without weights, which come in by one file each: no class can name them."""
    options = {name: own for each in registered().values() for name, own in options_of(each.options).items()}
    return {"kind": replace(options_of(DrafterSettings)["kind"], type=Literal[drafter_kinds()])} | options


class DrafterSection(Section, DrafterSettings, options=_of_registered()):  # type: ignore[misc]  # see above
    """The drafter, and how many tokens it drafts a round."""

    model: Source | None = None
    """Weights of the drafter (`draft_model`, `eagle3`, `mtp`): a folder, a catalogue name, or a hub id."""
    tree: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_DRAFTS)], ...], Field(strict=False)] = ()
    """Candidates drafted for each position of a round, such as [3, 2]; one for the positions behind. Drafters with
    weights, verifier coupled, on a CPU."""

    @model_validator(mode="after")
    def _is_one_to_the_engine(self) -> Self:
        try:
            self.config()
        except OptionError as error:
            raise FieldError(error.name.removeprefix("drafter."), error.rule) from error
        return self

    def config(self) -> DrafterConfig:
        """The same for the engine."""
        return DrafterConfig.of(**self.model_dump())


class PoolSection(Section):
    """Number of replicas of a pool, and resources that Ray reserves for each."""

    replicas: AtLeastOne = 1
    """Replicas of the pool, without autoscaling."""
    autoscaling: AutoscalingSection | None = None
    """Let Serve choose the number of replicas, by load or by the requests in flight."""
    num_cpus: RayShare = 1.0
    """CPUs that Ray reserves for a replica, and threads of its engine."""
    num_gpus: RayShare = 0.0
    """GPUs that Ray reserves for a replica, all of one node unless vLLM's ranks are placed by Ray. Below 1: a part of
    one, and of its memory."""
    label_selector: dict[str, str] = {}
    """Ray node labels that a replica's node must carry."""

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise FieldError("replicas", "is set beside autoscaling; remove one of them.")
        return self

    @property
    def most_replicas(self) -> int:
        """The number of replicas, or with autoscaling the largest."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def least_replicas(self) -> int:
        """The number of replicas, or with autoscaling the smallest."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def num_threads(self) -> int:
        """CPU threads of one replica's engine: its share of the cores."""
        return max(1, int(self.num_cpus))


class RouterSection(Section):
    """The stream router: it answers HTTP before the replicas that decode, and keeps their streams when they die."""

    replicas: AtLeastOne = 1
    """Replicas of the router."""
    num_cpus: RayShare = 0.0
    """CPUs that Ray reserves for each; 0 fits on any node. It holds no model."""
    label_selector: dict[str, str] = {}
    """Ray node labels that its node must carry."""


class PoolsSection(Section):
    """The pools that are set; a pool of the topology that is not gets `PoolSection`'s defaults."""

    prefill: PoolSection | None = None
    """Computes prompts and replays (topology `disaggregated`)."""
    decode: PoolSection | None = None
    """Answers HTTP and decodes (topology `disaggregated`)."""
    monolith: PoolSection | None = None
    """Does all of it (topology `monolith`)."""
    router: RouterSection | None = None
    """Answers HTTP in front of the decoding pool, so that requests with `resume` outlive a replica (any topology)."""


class RecoverySection(Section):
    """Recovery from a replica that dies, or does not answer."""

    prefill_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Longest wait for one prefill and its handoff, on top of twice its estimated time; then it is retried."""
    prefill_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts at a prefill that failed; after them the decode replica computes the prompt itself."""
    resume: bool = False
    """Resume requests whose decode replica dies, unless they say otherwise; true puts a stream router in front."""
    decode_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """With a stream router: a decode replica without a sign of life for this long counts as lost."""
    max_resumes: Annotated[int, Field(ge=0, le=100)] = 5
    """Most times that a request is resumed; then it fails."""


class ReplaySection(Section):
    """The check of finished requests: how many are replayed, and with what tolerance."""

    sample_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the finished requests that are replayed without speculation and compared."""
    independent_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the replayed requests that `transformers` also checks, beside one of each shape (docs/detection.md);
    0 = none. Default: 0.02 with truespec's engine, 0 with vLLM."""
    max_queue: AtLeastOne = 64
    """Requests that may wait for their replay; more are counted as skipped."""
    max_running: AtLeastOne = 2
    """Replays at once; on a replica they come after everything else, with 256 tokens at most in a step that decodes."""
    max_tme: Annotated[float, Field(gt=1, le=10)] | None = None
    """TME above which something is wrong, on top of the noise floor of plain requests. Default: by precision
    (docs/watch.md)."""
    distribution_tolerance: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest shift by rounding of the means of the calibration test; by precision when not set."""
    edge_nats: Annotated[float, Field(gt=0, le=10)] | None = None
    """Nats by which rounding may move a filter's edge, or the likeliest token; by precision when not set."""
    tolerance: str | None = None
    """File of `truespec watch calibrate`, on the controller's node: what rounding does to this service. Without it, or
    max_tme or edge_nats, no replay on a GPU trips a breaker, except in float32."""
    verify_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Longest wait of an answer with `verify` for its replay; then it says `unverified`."""
    keep_verdicts: AtLeastOne = 10000
    """Replies whose verdicts `GET /v1/verdicts/{id}` remembers."""

    def independent_rate_of(self, engine: EngineSection) -> float:
        """`independent_rate`, or the default for this kind of engine."""
        if self.independent_rate is not None:
            return self.independent_rate
        return 0.02 if engine.kind == "torch" else 0.0


class BreakerSection(Section):
    """Rules by which a replica stops speculating, tries again, and is replaced."""

    mode: Literal["auto", "on", "off"] = "auto"
    """`auto` = the breaker decides; `on` and `off` are fixed, alarms are only counted."""
    cooldown_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Time from a trip to the first canary; doubled with each that fails, at most sixteenfold."""
    window_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """A second trip within it takes the replica out of service, so that Serve replaces it."""
    suspect_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Answers that ended at most this long before a trip are suspect, and all since its evidence began."""
    canary_requests: Annotated[int, Field(ge=1, le=64)] = 4
    """Requests of the replica's own that try speculation out."""


class GuardSection(Section):
    """Rehearsals of what finds faults (docs/operations.md)."""

    rehearsal: bool = False
    """Allow `POST /admin/rehearsal`: a replica answers requests of its own with a known fault."""


class DumpsSection(Section):
    """Files for a post-mortem: token ids (prompts included), seeds and logprobs of requests that were found wrong."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder on the referee's node that they are written to; none are written when not set."""
    max_files: AtLeastOne = 50
    """Files kept; the oldest go first."""
    max_mib: AtLeastOne = 64
    """Size of all files together, in MiB."""


class AdminSection(Section):
    """The endpoints that change how the service runs."""

    token_file: Annotated[str, Field(min_length=1)] | None = None
    """A file that holds the bearer token of `/admin`; there is no `/admin` when not set."""
    open_trainer_api: bool = False
    """Let anyone update weights, pause, and empty prefix caches by vLLM's routes: trainers such as TRL send no key."""


class AccessSection(Section):
    """API keys and limits. A key's limits are in the key file, and apply to each replica separately."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """A file made by `truespec keys`; it is read again when it changes. Without it anyone may use `/v1`."""
    open_metrics: bool = True
    """Allow reading `/metrics` without a key; it holds neither prompts nor keys."""
    open_health: bool = True
    """Allow `/healthz` without a key."""
    cors_origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]] = []
    """Web pages of these origins (`https://chat.example`, or `*`) may call the API from a browser."""

    @model_validator(mode="after")
    def _what_is_closed_has_a_key(self) -> Self:
        for name in ("open_metrics", "open_health"):
            if self.keys_file is None and not getattr(self, name):
                raise FieldError(name, "is false, but there are no keys to open it; set keys_file, or leave it true.")
        return self


class ResponsesSection(Section):
    """Responses that are kept for `previous_response_id` (docs/api.md), with the texts of their conversations. The
    controller holds them in its memory: they are gone when it restarts."""

    max_mib: Annotated[int, Field(ge=0)] = 0
    """Size of all of them together, in MiB; the oldest go first. 0: none is kept."""
    max_age_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    """Longest time that each is kept."""


class ReceiptsSection(Section):
    """The receipts of answers (docs/proof.md)."""

    key_file: Annotated[str, Field(min_length=1)] | None = None
    """A PEM file with the Ed25519 key that signs them (`openssl genpkey -algorithm ed25519`); unsigned when not set."""


class ObservabilitySection(Section):
    """Reports of single requests: log lines and traces."""

    log_format: Literal["text", "json"] = "text"
    """Format of every replica's log lines, including Ray Serve's own: plain text, or one JSON object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the lines that are written."""
    traces_endpoint: str | None = None
    """OTLP/HTTP URL of an OpenTelemetry collector, as `http://collector:4318/v1/traces`; no spans when not set."""
    traces_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the traces starting here that are recorded; a client's own trace keeps its flag."""

    @field_validator("traces_endpoint")
    @classmethod
    def _is_a_url_with_its_path(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.match(r"https?://[^/\s]+/\S", endpoint):
            raise ValueError("must be a URL with its path, such as http://collector:4318/v1/traces.")
        return endpoint


class HandoffSection(Section):
    """Transfer of computed prompts from the prefill pool to the decode pool (topology `disaggregated`)."""

    transport: Literal["plasma", "inline", "nixl"] = "plasma"
    """`plasma`: Ray's object store; `inline`: up to 3 MiB in the message itself; `nixl`: RDMA, if NIXL is
    installed; with `engine.kind: vllm` from cache to cache, by vLLM's `NixlConnector`."""


class RoutingSection(Section):
    """Choice of the replica of a pool that a request goes to."""

    prefill: Literal["prefix", "serve"] = "prefix"
    """`prefix`: the replica that has most of the prompt cached and least waiting; `serve`: Ray Serve's own routing."""
    decode: Literal["load", "serve"] = "load"
    """`load`: the replica of the header `x-session-id`, else the one with most room; HAProxy has its own rules."""
    period_s: Target = 1.0
    """Period in which replicas report what they have cached, and how full they are."""


class LimitsSection(Section):
    """Limits, beyond which requests are refused rather than queued without end. The first two are per replica and
    router, as in Ray Serve."""

    max_ongoing_requests: AtLeastOne = 128
    """Requests that a replica accepts; more are answered 429."""
    max_load: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Requests admitted per request computed at once (`max_num_seqs` of each decoding replica); then 429."""
    max_queued_requests: AtLeastOne = 256
    """Requests that a router queues before it refuses."""
    max_queued_tokens: AtLeastOne | None = None
    """Prompt tokens that may wait for their first token on a replica; more are answered 429."""
    max_time_to_first_token_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Answer 429 at once if a request would wait longer than this for its first token (estimated)."""
    max_body_bytes: AtLeastOne = 4 * 1024 * 1024
    """Longest body of a request."""
    max_prompt_tokens: AtLeastOne | None = None
    """Most tokens of a prompt; the model's own limit when not set."""
    max_choices: AtLeastOne = 64
    """Most `n` of a request."""
    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Longest time a request may take, and a stopping replica has to finish; a request may ask for less."""
    stream_interval_s: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Interval between a stream's messages, each with all tokens since the last, for up to 4 streams of a replica, or
    16 on a GPU; with more it grows, up to 0.2 s. Stop strings are looked for after every step. 0: one per step."""
    stream_keep_alive_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Silence after which a stream is sent a comment, which clients skip, so that no proxy ends it. 0: never."""


class AppConfig(Section):
    """Everything `serve_app.app:build_app` needs: the `args` of the application in the YAML."""

    version: Literal[1] = 1
    """Version of this format."""
    model: ModelSection
    """The model."""
    engine: EngineSection = EngineSection()
    """Each replica's engine."""
    vllm: VllmSection = VllmSection()
    """Settings of the vLLM engine only."""
    drafter: DrafterSection = DrafterSection()
    """The drafter."""
    topology: Literal["disaggregated", "monolith"] = "disaggregated"
    """`disaggregated`: prompts are computed by a pool of their own; `monolith`: one pool does everything."""
    pools: PoolsSection = PoolsSection()
    """The size of each pool."""
    replay: ReplaySection = ReplaySection()
    """The check of finished requests."""
    breaker: BreakerSection = BreakerSection()
    """Rules by which a replica stops speculating."""
    guard: GuardSection = GuardSection()
    """Rehearsals of what finds faults."""
    dumps: DumpsSection = DumpsSection()
    """Files for a post-mortem."""
    access: AccessSection = AccessSection()
    """API keys and limits."""
    admin: AdminSection = AdminSection()
    """The admin endpoints."""
    responses: ResponsesSection = ResponsesSection()
    """Responses that are kept."""
    receipts: ReceiptsSection = ReceiptsSection()
    """The receipts of answers."""
    observability: ObservabilitySection = ObservabilitySection()
    """Log lines and traces."""
    recovery: RecoverySection = RecoverySection()
    """Recovery from a replica that dies."""
    handoff: HandoffSection = HandoffSection()
    """Transfer of computed prompts from pool to pool."""
    routing: RoutingSection = RoutingSection()
    """Choice of replicas."""
    limits: LimitsSection = LimitsSection()
    """Limits of requests: beyond them, requests are refused rather than queued without end."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if errors := [*self._pool_errors(), *self._replay_errors(), *self._engine_errors()]:
            raise FieldErrors(errors)
        return self

    def _pool_errors(self) -> Iterator[FieldError]:
        for name in self.pools.model_fields_set - {*self.pool_names, "router"}:
            yield FieldError(
                f"pools.{name}",
                f"is set, but topology {self.topology} has only {' and '.join(self.pool_names)}; "
                f"remove it or change topology.",
            )
        device = self.engine.device
        for pool_name in self.pool_names:
            field, num_gpus = f"pools.{pool_name}.num_gpus", self.pool(pool_name).num_gpus
            if num_gpus > 1 and num_gpus % 1:
                yield FieldError(
                    field, f"is {num_gpus:g}, and above 1 Ray gives whole GPUs: set it to {round(num_gpus)}."
                )
                continue
            if device == "cpu" and num_gpus > 0:
                yield FieldError(field, "is above 0, but engine.device is cpu; set it to 0 or device to auto.")
            if device.startswith("cuda") and num_gpus == 0:
                yield FieldError(field, f"is 0, but engine.device is {device}; Ray would hide the GPU, so set it to 1.")
            elif device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= num_gpus:
                yield FieldError(
                    "engine.device",
                    f"is {device}, and a replica sees the {num_gpus:g} GPUs that Ray gave it, counted from 0 "
                    f"({field}): set it to auto.",
                )
            elif self.engine.kind == "vllm" and num_gpus > 0:
                with suppress(ConfigError):  # of arguments, which is reported with the engine's settings
                    ranks = self.ranks
                    # Each rank takes a GPU of its own; a single one may share it.
                    if num_gpus != ranks.number and not (ranks.number == 1 and num_gpus < 1 and not ranks.by_ray):
                        stages = f" times pipeline_parallel_size {ranks.pipeline}" if ranks.pipeline > 1 else ""
                        a_rank = f", which take a GPU each: set it to {ranks.number}"
                        yield FieldError(
                            field,
                            f"is {num_gpus:g}, but vllm.engine_args.tensor_parallel_size is {ranks.tensor}{stages}"
                            f"{a_rank if num_gpus < 1 else ': set one to the other'}.",
                        )
            elif self.drafter.tree and num_gpus > 0:
                yield FieldError(
                    "drafter.tree",
                    f"is set, but {field} is {num_gpus:g}: trees are drafted on a CPU only. Remove it, or set {field} "
                    "to 0.",
                )
            elif self.engine.kind == "torch" and self.engine.cuda_graphs and num_gpus == 0:
                yield FieldError(
                    "engine.cuda_graphs",
                    f"is true, and {field} is 0: a CPU has no graphs. Remove it; on a GPU, steps are captured without "
                    "it.",
                )

    def _engine_errors(self) -> Iterator[FieldError]:
        if self.engine.kind != "vllm" and self.vllm.lora_modules:
            yield FieldError(
                "vllm.lora_modules",
                f"names adapters, which engine.kind {self.engine.kind} does not serve: set it to vllm, or merge one "
                "into the model.",
            )
        elif self.engine.kind != "vllm" and "vllm" in self.model_fields_set:
            yield FieldError("vllm", f"is set, but engine.kind is {self.engine.kind}; remove it or set kind to vllm.")
        if self.engine.kind == "torch" and self.drafter.kind == "mtp":
            yield FieldError("drafter.kind", "mtp needs engine.kind: vllm; set that, or use eagle3.")
        if self.engine.kind == "vllm" and self.drafter.tree:  # before a rule that would ask for another verifier
            yield FieldError(
                "drafter.tree", "cannot be set for engine.kind vllm, which drafts no trees here. Remove it."
            )
            return
        try:
            config = self.engine_config(self.pool_names[0])
            if self.engine.kind == "vllm":
                check_settings(config, self.vllm.engine_args)
                check_lora(self.vllm_settings(self.pool_names[0]), self.model.served_name)
                ranks = self.ranks
                if ranks.by_ray and not all(self.pool(name).num_gpus > 0 for name in self.pool_names):
                    yield FieldError(
                        "vllm.engine_args.distributed_executor_backend",
                        f"is ray, which places ranks by their GPUs: set num_gpus of each pool to {ranks.number}, or "
                        "remove it.",
                    )
                if ranks.by_ray and self.topology == "disaggregated" and self.handoff.transport != "nixl":
                    yield FieldError(
                        "handoff.transport",
                        f"is {self.handoff.transport}, which copies through files of one node, but "
                        "vllm.engine_args.distributed_executor_backend is ray, whose ranks may be on several: set it "
                        "to nixl, or topology to monolith.",
                    )
                if ranks.by_ray and self.vllm.replays == "torch":
                    yield FieldError(
                        "vllm.replays",
                        "is torch, but the replica has no GPU beside those of vLLM's ranks, which Ray places "
                        "(vllm.engine_args.distributed_executor_backend): set it to vllm.",
                    )
                if ranks.pipeline > 1 and self.topology == "disaggregated":
                    yield FieldError(
                        "topology",
                        "is disaggregated, but handoffs between stages of layers are not supported "
                        "(vllm.engine_args.pipeline_parallel_size): set it to monolith.",
                    )
            elif self.pools_on("cpu"):
                config.on_cpu()  # whose cache has a size by then
        except ConfigError as error:
            name, _, rule = str(error).partition(" ")  # "<field> <rule>"; the drafter's come with its section
            yield FieldError(name if "." in name else f"engine.{name}", rule)

    def _replay_errors(self) -> Iterator[FieldError]:
        if self.replay.sample_rate > 0 and self.engine.logprobs_mode != "raw_logprobs":
            yield FieldError(
                "replay.sample_rate",
                f"is above 0, but replays compare raw_logprobs and engine.logprobs_mode is "
                f"{self.engine.logprobs_mode}; set replay.sample_rate to 0 or the mode to raw_logprobs.",
            )
        if self.guard.rehearsal and (self.engine.kind, self.engine.logprobs_mode) != ("torch", "raw_logprobs"):
            yield FieldError(
                "guard.rehearsal", "is true, which needs engine.kind torch and engine.logprobs_mode raw_logprobs."
            )
        if self.engine.kind == "vllm" and self.replay.independent_rate:
            yield FieldError(
                "replay.independent_rate",
                "is above 0, but engine.kind is vllm; remove it, and set vllm.replays to torch: our engine is "
                "independent of vLLM.",
            )

    @property
    def sources(self) -> dict[str, str]:
        """The places that weights come from, each by the setting that names it."""
        named = {"model.source": self.model.source, "drafter.model": self.drafter.model}
        return {setting: source for setting, source in named.items() if source is not None}

    @property
    def pool_names(self) -> tuple[PoolName, ...]:
        """The pools of this topology."""
        return POOLS_OF_TOPOLOGY[self.topology]

    def pools_on(self, kind: Literal["cpu", "cuda"]) -> tuple[PoolName, ...]:
        """The pools whose replicas compute on the CPU, or on GPUs: those that Ray gives some."""
        return tuple(name for name in self.pool_names if (self.pool(name).num_gpus > 0) == (kind == "cuda"))

    @property
    def ranks(self) -> Ranks:
        """Return how the model of a replica is split among devices.

        Raises:
            ConfigError: an argument of vLLM's that decides it has a wrong value.
        """
        return ranks_of(self.vllm.engine_args if self.engine.kind == "vllm" else {})

    @property
    def decoding_pool(self) -> PoolName:
        """The pool whose replicas decode."""
        return self.pool_names[-1]

    def pace(self) -> Pace:
        """A pace for the streams of one replica, with none yet."""
        few_streams = FEW_BESIDE_A_GPU if self.pool(self.decoding_pool).num_gpus else FEW_STREAMS
        return Pace(self.limits.stream_interval_s, few_streams)

    @property
    def router(self) -> RouterSection | None:
        """The stream router's settings; None where there is none."""
        return self.pools.router or (RouterSection() if self.recovery.resume else None)

    def pool(self, name: PoolName) -> PoolSection:
        """A pool's settings, with defaults when the file does not set it.

        Raises:
            ConfigError: the topology has no such pool.
        """
        if name not in self.pool_names:
            raise ConfigError(f"topology {self.topology} has no pool {name}, only {' and '.join(self.pool_names)}.")
        return getattr(self.pools, name) or PoolSection()

    def engine_config(self, pool: PoolName) -> EngineConfig:
        """The engine's settings on a replica of `pool`; its threads are the replica's share of the cores, and its
        memory that of a GPU."""
        sizes, own = self.engine.model_dump(exclude={"kind"}), self.pool(pool)
        share = min(1.0, own.num_gpus or 1.0)
        sizes |= {"num_threads": own.num_threads, "handoffs_on_device": self.payload_transport == "nixl"}
        return EngineConfig(**sizes, drafter=self.drafter.config(), gpu_share=share)

    def replay_config(self, pool: PoolName) -> EngineConfig:
        """The torch engine's settings where it replays beside vLLM: the same weights, unpacked. On a GPU of its own the
        size that is set is that of vLLM's cache, and this engine's takes what is left."""
        config = replace(self.engine_config(pool), quantization=self.engine.dtype, drafter=DrafterConfig(kind="none"))
        return replace(config, kv_cache_tokens=None) if self.pool(pool).num_gpus >= 1 else config

    def may_replay_vllm(self, pool: PoolName) -> bool:
        """Return whether replicas of `pool` load our own engine beside vLLM, if it knows the model and fits, or must.
        What others take of a GPU that they share is not known, so there they do it only if they must."""
        shared = 0 < self.pool(pool).num_gpus < 1 and self.vllm.replays is None
        return pool != "decode" and self.vllm.replays != "vllm" and not self.ranks.by_ray and not shared

    def replays_show_distribution(self, folder: str, device_bytes: int = 0) -> Callable[[Request], bool]:
        """Return whether a replay of a request gives the distribution of its tokens, and not their logprobs alone.

        Args:
            folder: holds the model.
            device_bytes: memory of a replica's GPU, which those that replay have, too; 0 = they have none.
        """
        if self.engine.kind == "torch":
            return lambda request: True
        pool = self.pool_names[0]
        ours = self.may_replay_vllm(pool)
        if ours and self.vllm.replays is None:
            place, arguments = Path(folder), self.vllm.engine_args
            ours = not why_not_ours(place, arguments)
            if ours and device_bytes and (needs := needs_of(place, self.engine_config(pool), arguments)) is not None:
                ours = vllms_share(needs, device_bytes, arguments.get(SHARE)) is not None
        return lambda request: ours and not (request.adapter or request.params.structure)

    @property
    def payload_transport(self) -> Literal["plasma", "inline", "nixl"]:
        """Return how handoff messages travel between replicas; vLLM's engines do their NIXL copies themselves."""
        by_vllm = self.engine.kind == "vllm" and self.handoff.transport == "nixl"
        return "inline" if by_vllm else self.handoff.transport

    def vllm_settings(self, pool: PoolName) -> VllmSettings:
        """Return how vLLM is set up on a replica of `pool`."""
        given = frozenset(
            name for name in SIZES & self.engine.model_fields_set if getattr(self.engine, name) is not None
        )
        if "kv_cache_tokens" in given:  # they are so many blocks
            given |= {"block_size"}
        apart: Literal["kv_producer", "kv_consumer"] | None = None
        if self.topology == "disaggregated":
            apart = "kv_producer" if pool == "prefill" else "kv_consumer"
        return VllmSettings(
            self.engine_config(pool),
            given,
            self.vllm.engine_args,
            handoff="none" if apart is None else "nixl" if self.handoff.transport == "nixl" else "copy",
            role=apart or "kv_both",
            self_check_sample_rate=self.vllm.self_check_sample_rate,
            lora_modules=self.vllm.lora_modules,
            allow_untested=self.vllm.allow_untested,
        )
