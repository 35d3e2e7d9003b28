"""The application's settings: one YAML, which is also a Ray Serve config.

`load_config` reads the file and checks all of it before anything starts. Every error names the file, the field and the
mend. The engine's own settings, `speculative.config.EngineConfig`, are made from it once per pool.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve_app.backends.vllm_parts.settings import SIZES, VllmSettings, check_lora, check_settings
from speculative.config import DrafterConfig, EngineConfig, LogprobsMode
from speculative.errors import ConfigError

PoolName = Literal["prefill", "decode", "monolith"]
AtLeastOne = Annotated[int, Field(ge=1)]
_Model = TypeVar("_Model", bound=BaseModel)

POOLS_OF_TOPOLOGY: dict[str, tuple[PoolName, ...]] = {
    "disaggregated": ("prefill", "decode"),
    "monolith": ("monolith",),
}
POOL_OF_DEPLOYMENT: dict[str, PoolName] = {
    "PrefillServer": "prefill",
    "DecodeServer": "decode",
    "MonolithServer": "monolith",
}


_EDGE_NATS = {"float32": 1e-3, "bfloat16": 0.25}
_RAY_PRECISION = 0.0001  # of numbers of CPUs and GPUs


class _FieldError(ValueError):
    """A fault found between fields, told at the one where the mend is easiest (dots lead into sections)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class _Section(BaseModel):
    """A part of the file: frozen, no unknown fields, no guessing of types (`yes` is no number, "4" neither)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        for name in data if isinstance(data, Mapping) else ():
            if name not in cls.model_fields:
                close = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(cls.model_fields)}."
                raise _FieldError(str(name), f"is not a field; {hint}")
        return data


class ModelSection(_Section):
    """Which model: a folder, a name of the catalogue, or a hub id; `name` is what clients ask for."""

    source: Annotated[str, Field(min_length=1)]
    """A folder, a name of `truespec model list`, or a hub id (`org/name[@revision]`)."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """What clients ask for; the last part of `source` when not set."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """A Jinja file in place of the model's own chat template, at this path on every node that answers HTTP."""

    @model_validator(mode="after")
    def _is_called_something(self) -> Self:
        if not self.served_name:
            raise _FieldError("name", f"is missing: source {self.source!r} ends in no name to ask for, so set one.")
        return self

    @property
    def served_name(self) -> str:
        """The name that clients use: `name`, or the last part of `source`."""
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1]


class EngineSection(_Section):
    """Sizes and choices of each replica's engine; units as in `speculative.config.EngineConfig`."""

    kind: Literal["torch", "vllm"] = "torch"
    """Our own engine; or vLLM where it is installed, for what ours does not do (docs/vllm.md)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the KV cache, and of weights and activations where `weights` does not say otherwise."""
    weights: Literal["auto", "bfloat16", "w16a16", "float32", "int8", "int4", "w8a8", "w4a8"] = "auto"
    """How a CPU keeps them: as their source did, else as `dtype`. int8, int4 round; w8a8, w4a8, w16a16 activations."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto` takes the GPU that Ray gave the replica, else the CPU."""
    cuda_graphs: bool | None = None
    """Replay captured decoding steps of up to 256 sequences; not set: on a GPU. docs/gpu.md tells its memory."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a request, prompt and answer; the model's own limit when not set."""
    max_num_seqs: AtLeastOne = 16
    """Most sequences of a step."""
    max_batched_tokens: AtLeastOne = 512
    """Most tokens of a step; longer prompts are computed in chunks."""
    kv_cache_tokens: AtLeastOne = 16384
    """Tokens that the KV cache holds."""
    block_size: AtLeastOne = 16
    """Tokens of a KV block."""
    prefix_caching: bool = True
    """Keep the KV of prompts for later requests that begin alike."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What `logprobs` returns: before or after the sampling parameters, logits or logprobs."""
    verifier: Literal["token_wise", "block", "coupled"] = "token_wise"
    """How drafts are verified; a request that asks to be reproducible gets `coupled` in any case."""
    self_check_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the steps whose zero-mean terms the self-checks take; invariants hold in all of them."""
    priority_ageing_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Seconds of waiting that make up for one class of `priority`: nobody waits for ever."""


class VllmSection(_Section):
    """What only the vLLM engine has (`engine.kind: vllm`)."""

    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `tensor_parallel_size`; not those that this file sets."""
    lora_modules: dict[str, Annotated[str, Field(min_length=1)]] = {}
    """LoRA adapters: a folder each, by the name that clients give as `model`; sizes are vLLM's, in `engine_args`."""
    replays: Literal["vllm", "torch"] = "vllm"
    """Who computes finished requests again; `torch`: our own engine beside vLLM, but for requests of an adapter."""
    self_check_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps of which self-checks see what vLLM's rejection sampler draws from; 0 = none."""
    tool_parser: Annotated[str, Field(min_length=1)] | None = None
    """vLLM's parser of the tool calls that the model makes, such as `hermes` (`--tool-call-parser`)."""
    reasoning_parser: Annotated[str, Field(min_length=1)] | None = None
    """vLLM's parser that tells the model's reasoning from its answer, such as `deepseek_r1` (`--reasoning-parser`)."""

    @property
    def has_parsers(self) -> bool:
        """Whether the text of answers is parsed."""
        return self.tool_parser is not None or self.reasoning_parser is not None


class DrafterSection(_Section):
    """Which drafter, and how many tokens it drafts a round."""

    kind: Literal["none", "ngram", "suffix", "draft_model", "eagle3", "mtp"] = "ngram"
    """What drafts; `none` turns speculation off."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """Weights of the drafter (`draft_model`, `eagle3`, `mtp`): a folder, a catalogue name, or a hub id."""
    sampled: bool = True
    """Drafters with weights: draw the draft from its law; false takes the likeliest token."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """Draft tokens a round; the most when `length` is `dynamic`."""
    ngram_max: AtLeastOne = 4
    """`ngram`: longest run of tokens to look up."""
    ngram_min: AtLeastOne = 2
    """`ngram`: shortest run of tokens to look up."""
    suffix_depth: Annotated[int, Field(ge=1, le=256)] = 32
    """`suffix`: longest suffix that is kept, in tokens."""
    suffix_min_match: AtLeastOne = 2
    """`suffix`: shortest suffix that drafts, in tokens."""
    suffix_min_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    """`suffix`: least probability of a whole draft."""
    suffix_max_tokens: Annotated[int, Field(ge=0)] = 65536
    """`suffix`: tokens of past outputs that are kept; 0 looks only into the sequence itself."""
    length: Literal["static", "dynamic"] = "static"
    """`dynamic` drafts as many tokens as pay, 0 included; a model's drafts end where it is unsure."""

    @model_validator(mode="after")
    def _ranges_are_not_empty(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise _FieldError("ngram_min", f"must be at most ngram_max ({self.ngram_max}), got {self.ngram_min}.")
        if self.suffix_min_match > self.suffix_depth:
            raise _FieldError(
                "suffix_min_match", f"must be at most suffix_depth ({self.suffix_depth}), got {self.suffix_min_match}."
            )
        has_weights = self.kind in ("draft_model", "eagle3", "mtp")
        if has_weights and self.model is None:
            raise _FieldError("model", f"is missing: kind {self.kind} needs a folder, a catalogue name, or a hub id.")
        if self.model is not None and not has_weights:
            raise _FieldError("model", "belongs to the kinds draft_model, eagle3 and mtp; remove it or change kind.")
        return self


_Target = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_LOAD_POLICY = "serve_app.scaling:LoadPolicy"


class _Scaling(_Section):
    """Bounds and patience of a pool that grows and shrinks."""

    min_replicas: AtLeastOne = 1
    """Replicas that always run."""
    max_replicas: AtLeastOne
    """Most replicas."""
    target_ongoing_requests: _Target = 8.0
    """Policy `requests`: requests in flight per replica that Serve aims at."""
    upscale_delay_s: _Delay = 10.0
    """How long more replicas must be wanted before they come."""
    downscale_delay_s: _Delay = 120.0
    """How long fewer replicas must be wanted before some go; each finishes its streams first."""
    look_back_period_s: _Target = 10.0
    """Over which load is averaged."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise _FieldError("min_replicas", f"must be at most max_replicas ({self.max_replicas}); lower it.")
        return self


class AutoscalingSection(_Scaling):
    """Ray Serve chooses the number of replicas, by a policy."""

    policy: Literal["load", "requests"] = "load"
    """`load`: by the seconds of work that wait for a prefill replica, by KV use and running requests of the others;
    `requests`: by the requests in flight, as Ray Serve does without us."""
    target_backlog_s: _Target = 2.0
    """Policy `load`, prefill: seconds of prompts that a replica should have before it at most."""
    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Policy `load`, decode and monolith: share of the KV blocks that should be in use at most."""
    target_running_share: _Target = 0.8
    """Policy `load`, decode and monolith: requests in the engine, as a share of `engine.max_num_seqs`."""

    @model_validator(mode="after")
    def _targets_of_its_policy(self) -> Self:
        of_load = ("target_backlog_s", "target_kv_usage", "target_running_share")
        for name in of_load if self.policy == "requests" else ("target_ongoing_requests",):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise _FieldError(name, f"means nothing to policy {self.policy}; remove it or change policy.")
        return self

    def targets(self, pool: PoolName) -> dict[str, float]:
        """What a replica of a pool should have at most, by the names under which it records its load."""
        if pool == "prefill":
            return {"backlog_s": self.target_backlog_s}
        return {"kv_usage": self.target_kv_usage, "running_share": self.target_running_share}

    def serve_options(self, pool: PoolName) -> dict[str, Any]:
        """Ray Serve's `autoscaling_config`."""
        options = self.model_dump(include=set(_Scaling.model_fields)) | {"metrics_interval_s": 1.0}
        if self.policy == "load":
            targets = {"targets": self.targets(pool)}
            options["policy"] = {"policy_function": _LOAD_POLICY, "policy_kwargs": targets}
        return options


class ServePolicySection(_Section):
    """A policy in Ray Serve's words."""

    policy_function: Literal["serve_app.scaling:LoadPolicy"]
    """Scales by load."""
    policy_kwargs: dict[str, dict[str, Annotated[float, Field(strict=False)]]]
    """`targets`: what a replica should have at most of `backlog_s` (prefill), `kv_usage` and `running_share`."""

    @model_validator(mode="after")
    def _has_known_targets(self) -> Self:
        known = {"backlog_s", "kv_usage", "running_share"}
        targets = self.policy_kwargs.get("targets", {})
        above_0 = all(0 < value < math.inf for value in targets.values())
        if set(self.policy_kwargs) != {"targets"} or not targets or set(targets) - known or not above_0:
            raise _FieldError("policy_kwargs", f"must be targets: above 0, of {', '.join(sorted(known))}.")
        return self


class ServeAutoscalingSection(_Scaling):
    """Autoscaling in Ray Serve's words; without a `policy` it goes by the requests in flight."""

    metrics_interval_s: _Target = 1.0
    """How often replicas are asked."""
    policy: ServePolicySection | None = None
    """Scales by load."""

    def as_ours(self) -> dict[str, Any]:
        """The same in the words of a pool's `autoscaling`."""
        kept = self.model_dump(include=self.model_fields_set & set(_Scaling.model_fields))
        if self.policy is None:
            return kept | {"policy": "requests"}
        kept.pop("target_ongoing_requests", None)
        return kept | {f"target_{name}": value for name, value in self.policy.policy_kwargs["targets"].items()}


def _ray_share(number: float) -> float:
    if 0 < number < _RAY_PRECISION:
        raise ValueError(f"must be 0 or at least {_RAY_PRECISION}, the least that Ray sets aside; got {number!r}.")
    return number


class PoolSection(_Section):
    """How many replicas a pool has, and what Ray sets aside for each."""

    replicas: AtLeastOne = 1
    """Replicas of the pool, without autoscaling."""
    autoscaling: AutoscalingSection | None = None
    """Let Serve choose the number of replicas, by load or by the requests in flight."""
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """CPUs that Ray sets aside for a replica, and threads of its engine."""
    num_gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """GPUs that Ray sets aside for a replica."""
    label_selector: dict[str, str] = {}
    """Ray node labels that a replica's node must carry."""

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise _FieldError("replicas", "is set beside autoscaling; remove one of them.")
        return self

    @field_validator("num_cpus", "num_gpus")
    @classmethod
    def _is_a_share_that_ray_knows(cls, number: float) -> float:
        return _ray_share(number)

    @property
    def most_replicas(self) -> int:
        """The number of replicas, or with autoscaling the largest."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def num_threads(self) -> int:
        """CPU threads of one replica's engine: its share of the cores."""
        return max(1, int(self.num_cpus))


class RouterSection(_Section):
    """The stream router: it answers HTTP before the replicas that decode, and keeps their streams when they die."""

    replicas: AtLeastOne = 1
    """Replicas of the router."""
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """CPUs that Ray sets aside for each; 0 finds room on any node. It holds no model."""
    label_selector: dict[str, str] = {}
    """Ray node labels that its node must carry."""

    @field_validator("num_cpus")
    @classmethod
    def _is_a_share_that_ray_knows(cls, number: float) -> float:
        return _ray_share(number)


class PoolsSection(_Section):
    """The pools that are set; a pool of the topology that is not gets `PoolSection`'s defaults."""

    prefill: PoolSection | None = None
    """Computes prompts and replays (topology `disaggregated`)."""
    decode: PoolSection | None = None
    """Answers HTTP and decodes (topology `disaggregated`)."""
    monolith: PoolSection | None = None
    """Does all of it (topology `monolith`)."""
    router: RouterSection | None = None
    """Answers HTTP in front of the decoding pool, so that requests with `resume` outlive a replica (any topology)."""


class RecoverySection(_Section):
    """What is done when a replica dies, or does not answer."""

    prefill_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Longest wait for one prefill and its handoff; then it is asked for again."""
    prefill_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts at a prefill that failed; after them the decode replica computes the prompt itself."""
    resume: bool = False
    """Resume requests that do not say, when their decode replica dies; true puts a stream router in front."""
    decode_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """With a stream router: a decode replica that gives no sign of life for so long counts as lost."""
    max_resumes: Annotated[int, Field(ge=0, le=100)] = 5
    """How often a request may be resumed; then it fails."""


class ReplaySection(_Section):
    """The check of finished requests: how many are computed again, and what is put up with."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the finished requests that are computed again without speculation and compared."""
    max_queue: AtLeastOne = 64
    """Requests that may wait for their replay; more are counted as skipped."""
    max_running: AtLeastOne = 2
    """Replays at once; on a replica they come after everything else."""
    max_tme: Annotated[float, Field(gt=1, le=10)] = 1.05
    """TME above which something is wrong, on top of the noise floor that plain requests show."""
    law_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.01
    """By how much rounding may move the means of the law test."""
    edge_nats: Annotated[float, Field(gt=0, le=10)] | None = None
    """Nats by which rounding may move a filter's edge, or the likeliest token; by dtype when not set."""
    verify_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """How long an answer with `verify` waits for its replay; then it says `unverified`."""
    keep_verdicts: AtLeastOne = 10000
    """Replies whose verdicts `GET /v1/verdicts/{id}` remembers."""

    def edge_of(self, dtype: str) -> float:
        """`edge_nats`, or what rounding does in this type."""
        return self.edge_nats if self.edge_nats is not None else _EDGE_NATS[dtype]


class BreakerSection(_Section):
    """When a replica stops speculating, when it tries again, and when it is replaced."""

    mode: Literal["auto", "on", "off"] = "auto"
    """Who decides: `auto` the breaker; `on` and `off` are fixed, alarms only count."""
    cooldown_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """From a trip to the first canary; doubled with each that fails, at most sixteenfold."""
    window_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """A second trip within it takes the replica out of service, so that Serve replaces it."""
    suspect_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """What ended so long before a trip is suspect."""
    canary_requests: Annotated[int, Field(ge=1, le=64)] = 4
    """Requests of a replica's own on which speculation is tried out."""


class DumpsSection(_Section):
    """Files for a post-mortem: token ids (prompts included), seeds and logprobs of requests that were found wrong."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Where they are written, on the referee's node; nothing is when not set."""
    max_files: AtLeastOne = 50
    """Files kept; the oldest go first."""
    max_mib: AtLeastOne = 64
    """Size of all files together, in MiB."""


class AdminSection(_Section):
    """The endpoints that change how the service runs."""

    token_file: Annotated[str, Field(min_length=1)] | None = None
    """A file that holds the bearer token of `/admin`; there is no `/admin` when not set."""


class AccessSection(_Section):
    """Who may use what. Limits of a key stand with it in the file, and hold on each replica by itself."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """A file made by `truespec keys`; it is read again when it changes. Without it everybody may use `/v1`."""
    open_metrics: bool = True
    """Let who has no key read `/metrics`; it holds neither prompts nor keys."""
    open_health: bool = True
    """Let who has no key ask `/healthz`."""

    @model_validator(mode="after")
    def _what_is_closed_has_a_key(self) -> Self:
        for name in ("open_metrics", "open_health"):
            if self.keys_file is None and not getattr(self, name):
                raise _FieldError(name, "is false, but there are no keys to open it; set keys_file, or leave it true.")
        return self


class ObservabilitySection(_Section):
    """What is told of single requests: log lines and traces."""

    log_format: Literal["text", "json"] = "text"
    """Of every replica's log lines, Ray Serve's own included: for a reader, or one JSON object a line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the lines that are written."""
    traces_endpoint: str | None = None
    """OTLP/HTTP URL of an OpenTelemetry collector, as `http://collector:4318/v1/traces`; no spans when not set."""
    traces_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the traces that are recorded, of those that begin here; a client's own trace keeps its flag."""

    @field_validator("traces_endpoint")
    @classmethod
    def _is_a_url_with_its_path(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.match(r"https?://[^/\s]+/\S", endpoint):
            raise ValueError("must be a URL with its path, such as http://collector:4318/v1/traces.")
        return endpoint


class HandoffSection(_Section):
    """How computed prompts get from the prefill pool to the decode pool (topology `disaggregated`)."""

    transport: Literal["plasma", "inline", "nixl"] = "plasma"
    """`plasma`: Ray's object store; `inline`: up to 3 MiB in the message itself; `nixl`: RDMA, if it is installed; with
    `engine.kind: vllm` by vLLM's own `NixlConnector`, from cache to cache."""


class RoutingSection(_Section):
    """Which replica of a pool a request goes to."""

    prefill: Literal["prefix", "serve"] = "prefix"
    """`prefix`: where most of the prompt is cached and least is waiting; `serve`: as Ray Serve does without us."""
    decode: Literal["load", "serve"] = "load"
    """`load`: the replica of the header `x-session-id`, else the one with most room; HAProxy has rules of its own."""
    period_s: _Target = 1.0
    """How often replicas tell what they have cached, and how full they are."""


class LimitsSection(_Section):
    """What is refused instead of queued without end. The first two are per replica and per router, as in Ray Serve."""

    max_ongoing_requests: AtLeastOne = 128
    """Requests that a replica takes on; more are answered 429."""
    max_load: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Requests let in per request computed at once (`max_num_seqs` of each decoding replica); then 429."""
    max_queued_requests: AtLeastOne = 256
    """Requests that a router queues before it refuses."""
    max_queued_tokens: AtLeastOne | None = None
    """Prompt tokens that may wait for their first token on a replica; more are answered 429."""
    max_time_to_first_token_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Answer 429 at once where those ahead would keep a request from its first token for longer (estimated)."""
    max_body_bytes: AtLeastOne = 4 * 1024 * 1024
    """Longest body of a request."""
    max_prompt_tokens: AtLeastOne | None = None
    """Most tokens of a prompt; the model's own limit when not set."""
    max_choices: AtLeastOne = 64
    """Most `n` of a request."""
    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Longest time a request may take, and time that a stopping replica gets to finish; a request may ask for less."""
    stream_interval_s: Annotated[float, Field(ge=0, le=1)] = 0.05
    """A stream's next message goes out so long after the last, with all events of the meantime; 0: one each."""


class AppConfig(_Section):
    """Everything `serve_app.app:build_app` needs: the `args` of the application in the YAML."""

    version: Literal[1] = 1
    """Of this format."""
    model: ModelSection
    """The model."""
    engine: EngineSection = EngineSection()
    """Each replica's engine."""
    vllm: VllmSection = VllmSection()
    """What only the vLLM engine has."""
    drafter: DrafterSection = DrafterSection()
    """The drafter."""
    topology: Literal["disaggregated", "monolith"] = "disaggregated"
    """`disaggregated`: prompts are computed by a pool of their own; `monolith`: one pool does all."""
    pools: PoolsSection = PoolsSection()
    """Size of each pool."""
    replay: ReplaySection = ReplaySection()
    """The check of finished requests."""
    breaker: BreakerSection = BreakerSection()
    """When a replica stops speculating."""
    dumps: DumpsSection = DumpsSection()
    """Files for a post-mortem."""
    access: AccessSection = AccessSection()
    """Who may use what."""
    admin: AdminSection = AdminSection()
    """The admin endpoints."""
    observability: ObservabilitySection = ObservabilitySection()
    """Log lines and traces."""
    recovery: RecoverySection = RecoverySection()
    """What is done when a replica dies."""
    handoff: HandoffSection = HandoffSection()
    """How computed prompts get from pool to pool."""
    routing: RoutingSection = RoutingSection()
    """How replicas are chosen."""
    limits: LimitsSection = LimitsSection()
    """What is refused instead of queued."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for name in self.pools.model_fields_set - {*self.pool_names, "router"}:
            raise _FieldError(
                f"pools.{name}",
                f"is set, but topology {self.topology} has only {' and '.join(self.pool_names)}; "
                f"remove it or change topology.",
            )
        for pool_name in self.pool_names:
            self._check_device(pool_name)
        max_len, room = self.engine.max_model_len, self.engine.kv_cache_tokens
        vllm_chooses = self.engine.kind == "vllm" and "kv_cache_tokens" not in self.engine.model_fields_set
        if max_len is not None and max_len > room and not vllm_chooses:
            raise _FieldError(
                "engine.kv_cache_tokens",
                f"must hold at least one sequence of engine.max_model_len ({max_len}) tokens, got {room}; "
                "raise it or lower max_model_len.",
            )
        self._check_engine()
        if self.replay.share > 0 and self.engine.logprobs_mode != "raw_logprobs":
            raise _FieldError(
                "replay.share",
                f"is above 0, but replays compare raw_logprobs and engine.logprobs_mode is "
                f"{self.engine.logprobs_mode}; set replay.share to 0 or the mode to raw_logprobs.",
            )
        return self

    def _check_device(self, pool_name: PoolName) -> None:
        device, field = self.engine.device, f"pools.{pool_name}.num_gpus"
        if device == "cpu" and self.pool(pool_name).num_gpus > 0:
            raise _FieldError(field, "is above 0, but engine.device is cpu; set it to 0 or device to auto.")
        if device.startswith("cuda") and self.pool(pool_name).num_gpus == 0:
            raise _FieldError(field, f"is 0, but engine.device is {device}; Ray would hide the GPU, so set it to 1.")

    def _check_engine(self) -> None:
        if self.engine.kind != "vllm" and self.vllm.lora_modules:
            raise _FieldError(
                "vllm.lora_modules",
                f"names adapters, which engine.kind {self.engine.kind} has not: set it to vllm, or merge one into the "
                "model.",
            )
        if self.engine.kind != "vllm" and "vllm" in self.model_fields_set:
            raise _FieldError("vllm", f"is set, but engine.kind is {self.engine.kind}; remove it or set kind to vllm.")
        try:
            config = self.engine_config(self.pool_names[0])
            if self.engine.kind == "vllm":
                check_settings(config, self.vllm.engine_args)
                check_lora(self.vllm_settings(self.pool_names[0]), self.model.served_name)
        except ConfigError as error:
            name, _, rule = str(error).partition(" ")  # "<field> <rule>"; the drafter's come with its section
            raise _FieldError(name if "." in name else f"engine.{name}", rule) from error

    @property
    def pool_names(self) -> tuple[PoolName, ...]:
        """The pools of this topology."""
        return POOLS_OF_TOPOLOGY[self.topology]

    @property
    def decoding_pool(self) -> PoolName:
        """The pool whose replicas decode."""
        return self.pool_names[-1]

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
        """The engine's settings on a replica of `pool`; its threads are the replica's share of the cores."""
        sizes = self.engine.model_dump(exclude={"kind"})
        drafter = DrafterConfig(**self.drafter.model_dump())
        return EngineConfig(**sizes, drafter=drafter, num_threads=self.pool(pool).num_threads)

    def replay_config(self, pool: PoolName) -> EngineConfig:
        """The torch engine's settings where it replays beside vLLM: the same weights, not those that are packed."""
        drafter = DrafterConfig(kind="none")
        return replace(self.engine_config(pool), weights=self.engine.dtype, drafter=drafter)

    @property
    def parcels(self) -> Literal["plasma", "inline", "nixl"]:
        """How what replicas tell each other of handoffs travels; vLLM's engines copy by NIXL without our doing."""
        by_vllm = self.engine.kind == "vllm" and self.handoff.transport == "nixl"
        return "inline" if by_vllm else self.handoff.transport

    def vllm_settings(self, pool: PoolName) -> VllmSettings:
        """How vLLM is set up on a replica of `pool`."""
        given = SIZES & self.engine.model_fields_set
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
            self_check_share=self.vllm.self_check_share,
            lora_modules=self.vllm.lora_modules,
        )


class HttpOptions(_Section):
    """Where Ray Serve's proxy listens."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen on."""


class DeploymentOverride(_Section):
    """The number of replicas of one deployment, where Ray Serve changes it without a restart."""

    name: Literal["PrefillServer", "DecodeServer", "MonolithServer"]
    """The deployment: `PrefillServer`, `DecodeServer` or `MonolithServer`."""
    num_replicas: AtLeastOne | None = None
    """Replicas, in place of the pool's `replicas`."""
    autoscaling_config: ServeAutoscalingSection | None = None
    """In place of the pool's `autoscaling`."""

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if (self.num_replicas is None) == (self.autoscaling_config is None):
            raise _FieldError("num_replicas", "or autoscaling_config must be set, and not both.")
        return self

    @property
    def pool_name(self) -> PoolName:
        """The pool whose replicas the deployment's are."""
        return POOL_OF_DEPLOYMENT[self.name]

    def place_of(self, field: str) -> str:
        """Where this override sets what a pool's `autoscaling` has under `field`."""
        target = field.removeprefix("target_")
        policy = self.autoscaling_config and self.autoscaling_config.policy
        if policy and target in policy.policy_kwargs["targets"]:
            return f"autoscaling_config.policy.policy_kwargs.targets.{target}"
        return f"autoscaling_config.{field}"


class Application(_Section):
    """One Ray Serve application."""

    name: Annotated[str, Field(min_length=1)] = "truespec"
    """Of the application in Ray Serve."""
    route_prefix: Annotated[str, Field(pattern=r"^/")] = "/"
    """Path under which it is served."""
    import_path: Literal["serve_app.app:build_app"] = "serve_app.app:build_app"
    """The application's builder."""
    args: AppConfig
    """The application's own settings."""
    deployments: list[DeploymentOverride] = []
    """Numbers of replicas; unlike a change of `args`, a change here restarts no replica."""

    @field_validator("route_prefix")
    @classmethod
    def _is_a_prefix_to_ray(cls, prefix: str) -> str:
        if prefix != "/" and prefix.endswith("/"):
            raise ValueError(f"must not end with /; got {prefix!r}, so remove it.")
        if "{" in prefix or "}" in prefix:
            raise ValueError(f"must be a path as it is, without {{ and }}; got {prefix!r}.")
        return prefix

    @model_validator(mode="after")
    def _overrides_have_their_pools(self) -> Self:
        names = [override.name for override in self.deployments]
        for number, override in enumerate(self.deployments):
            if override.pool_name not in self.args.pool_names:
                raise _FieldError(
                    f"deployments[{number}].name",
                    f"is {override.name}, but topology {self.args.topology} has no such pool; remove it.",
                )
            if names.count(override.name) > 1:
                raise _FieldError(f"deployments[{number}].name", f"is {override.name} twice; merge them.")
            try:
                self._overridden(override)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                field = f"deployments[{number}].{override.place_of(str(fault['loc'][-1]))}"
                raise _FieldError(field, f"{fault['msg']}, got {fault['input']!r}.") from error
        return self

    @property
    def effective_args(self) -> AppConfig:
        """`args`, with the numbers of replicas that `deployments` overrides."""
        pools: dict[str, PoolSection] = {
            override.pool_name: self._overridden(override) for override in self.deployments
        }
        return self.args.model_copy(update={"pools": self.args.pools.model_copy(update=pools)})

    def _overridden(self, override: DeploymentOverride) -> PoolSection:
        pool = self.args.pool(override.pool_name)
        kept = {name: getattr(pool, name) for name in pool.model_fields_set - {"replicas", "autoscaling"}}
        scale = (
            {"autoscaling": override.autoscaling_config.as_ours()}
            if override.autoscaling_config is not None
            else {"replicas": override.num_replicas}
        )
        return PoolSection.model_validate(kept | scale)


class ServeFile(_Section):
    """The whole file: the part of Ray Serve's config schema that `truespec serve` honours."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "HeadOnly"
    """Nodes with an HTTP proxy."""
    http_options: HttpOptions = HttpOptions()
    """Where the proxies listen."""
    applications: Annotated[list[Application], Field(min_length=1, max_length=1)]
    """The application; one."""

    @property
    def application(self) -> Application:
        """The one application of the file."""
        return self.applications[0]


def load_config(path: Path | str) -> ServeFile:
    """Read and check the application's YAML file.

    Raises:
        ConfigError: as of `read_file`.
    """
    return read_file(path, ServeFile)


def read_file(path: Path | str, kind: type[_Model]) -> _Model:
    """Read and check a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a field is wrong; one line `file: field: message` a fault.
    """
    data = _read_yaml(path)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _faults(error))) from error


def _read_yaml(path: Path | str) -> Any:
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except _NOT_YAML as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error


def parse_args(args: Mapping[str, Any]) -> AppConfig:
    """Check the `args` that Ray Serve hands to the application builder.

    Raises:
        ConfigError: a field is wrong; one line `args.field: message` a fault.
    """
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(error, "args"))) from error


# PyYAML lets through what its constructors run into, and what a deep file does to it.
_NOT_YAML = (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML would silently keep the last, and says which value is wrong."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
            if isinstance(made, int):
                str(made)  # Python writes no number of thousands of digits, so nothing could tell or show it
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kind, value = node.tag.rpartition(":")[2], str(node.value)[:40]
            raise yaml.constructor.ConstructorError(None, None, f"{value!r} is no {kind}", node.start_mark) from error
        return made

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _faults(error: ValidationError, root: str = "") -> list[str]:
    lines = []
    for fault in error.errors(include_url=False):
        cause = fault.get("ctx", {}).get("error")
        path, message = fault["loc"], fault["msg"].removeprefix("Value error, ")
        if isinstance(cause, _FieldError):
            path += (cause.field,)
        elif cause is None:
            message = f"{message}, got {fault['input']!r}." if fault["type"] != "missing" else "is missing."
        lines.append(f"{_dotted(root, path)}: {message}")
    return lines


def _dotted(root: str, path: tuple[int | str, ...]) -> str:
    text = root
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"
