"""The application's settings: one YAML, which is also a Ray Serve config.

`load_config` reads the file and checks all of it before anything starts. Every error names the file, the field and the
mend. The engine's own settings, `speculative.config.EngineConfig`, are made from it once per pool.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from speculative.config import DrafterConfig, EngineConfig, LogprobsMode
from speculative.errors import ConfigError

PoolName = Literal["prefill", "decode", "monolith"]
AtLeastOne = Annotated[int, Field(ge=1)]

POOLS_OF_TOPOLOGY: dict[str, tuple[PoolName, ...]] = {
    "disaggregated": ("prefill", "decode"),
    "monolith": ("monolith",),
}


class _FieldError(ValueError):
    """A fault found between fields, told at the one where the mend is easiest (dots lead into sections)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class _Section(BaseModel):
    """A part of the file: frozen, no unknown fields, no guessing of types (`yes` is no number, "4" neither)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

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
    name: Annotated[str, Field(min_length=1)] | None = None

    @property
    def served_name(self) -> str:
        """The name that clients use: `name`, or the last part of `source`."""
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1]


class EngineSection(_Section):
    """Sizes and choices of each replica's engine; units as in `speculative.config.EngineConfig`."""

    kind: Literal["torch"] = "torch"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: AtLeastOne = 16
    max_batched_tokens: AtLeastOne = 512
    kv_cache_tokens: AtLeastOne = 16384
    block_size: AtLeastOne = 16
    prefix_caching: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    verifier: Literal["token_wise", "block", "coupled"] = "token_wise"

    @field_validator("kind", mode="before")
    @classmethod
    def _vllm_is_not_there_yet(cls, kind: Any) -> Any:
        if kind == "vllm":
            raise ValueError("the vllm engine is not there yet; use torch.")
        return kind


class DrafterSection(_Section):
    """Which drafter, and how many tokens it drafts a round."""

    kind: Literal["none", "ngram", "suffix", "draft_model", "eagle3"] = "ngram"
    model: Annotated[str, Field(min_length=1)] | None = None
    sampled: bool = True
    num_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    ngram_max: AtLeastOne = 4
    ngram_min: AtLeastOne = 2
    suffix_depth: Annotated[int, Field(ge=1, le=256)] = 32
    suffix_min_match: AtLeastOne = 2
    suffix_min_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    suffix_max_tokens: Annotated[int, Field(ge=0)] = 65536
    length: Literal["static", "dynamic"] = "static"

    @model_validator(mode="after")
    def _ranges_are_not_empty(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise _FieldError("ngram_min", f"must be at most ngram_max ({self.ngram_max}), got {self.ngram_min}.")
        if self.suffix_min_match > self.suffix_depth:
            raise _FieldError(
                "suffix_min_match", f"must be at most suffix_depth ({self.suffix_depth}), got {self.suffix_min_match}."
            )
        has_weights = self.kind in ("draft_model", "eagle3")
        if has_weights and self.model is None:
            raise _FieldError("model", f"is missing: kind {self.kind} needs a folder, a catalogue name, or a hub id.")
        if self.model is not None and not has_weights:
            raise _FieldError("model", "belongs to the kinds draft_model and eagle3; remove it or change kind.")
        return self


class PoolSection(_Section):
    """How many replicas a pool has, and what Ray sets aside for each."""

    replicas: AtLeastOne = 1
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    num_gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def num_threads(self) -> int:
        """CPU threads of one replica's engine: its share of the cores."""
        return max(1, int(self.num_cpus))


class PoolsSection(_Section):
    """The pools that are set; a pool of the topology that is not gets `PoolSection`'s defaults."""

    prefill: PoolSection | None = None
    decode: PoolSection | None = None
    monolith: PoolSection | None = None


class ReplaySection(_Section):
    """The logprob check: which share of the finished requests is replayed, and how many may wait for it."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.1
    max_queue: AtLeastOne = 64


class LimitsSection(_Section):
    """What is refused instead of queued without end. The first two are per replica and per router, as in Ray Serve."""

    max_ongoing_requests: AtLeastOne = 128
    max_queued_requests: AtLeastOne = 256
    max_body_bytes: AtLeastOne = 4 * 1024 * 1024
    max_choices: AtLeastOne = 16
    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0


class AppConfig(_Section):
    """Everything `serve_app.app:build_app` needs: the `args` of the application in the YAML."""

    version: Literal[1] = 1
    model: ModelSection
    engine: EngineSection = EngineSection()
    drafter: DrafterSection = DrafterSection()
    topology: Literal["disaggregated", "monolith"] = "disaggregated"
    pools: PoolsSection = PoolsSection()
    replay: ReplaySection = ReplaySection()
    limits: LimitsSection = LimitsSection()

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for name in self.pools.model_fields_set - set(self.pool_names):
            raise _FieldError(
                f"pools.{name}",
                f"is set, but topology {self.topology} has only {' and '.join(self.pool_names)}; "
                f"remove it or change topology.",
            )
        for pool_name in self.pool_names:
            self._check_device(pool_name)
        max_len, room = self.engine.max_model_len, self.engine.kv_cache_tokens
        if max_len is not None and max_len > room:
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
        try:
            self.engine_config(self.pool_names[0])
        except ConfigError as error:
            name, _, rule = str(error).partition(" ")  # "<field> <rule>"; the drafter's come with its section
            raise _FieldError(name if "." in name else f"engine.{name}", rule) from error

    @property
    def pool_names(self) -> tuple[PoolName, ...]:
        """The pools of this topology."""
        return POOLS_OF_TOPOLOGY[self.topology]

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


class HttpOptions(_Section):
    """Where Ray Serve's proxy listens."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000


class Application(_Section):
    """One Ray Serve application."""

    name: Annotated[str, Field(min_length=1)] = "truespec"
    route_prefix: Annotated[str, Field(pattern=r"^/")] = "/"
    import_path: Literal["serve_app.app:build_app"] = "serve_app.app:build_app"
    args: AppConfig


class ServeFile(_Section):
    """The whole file: the part of Ray Serve's config schema that `truespec serve` honours."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions = HttpOptions()
    applications: Annotated[list[Application], Field(min_length=1, max_length=1)]

    @property
    def application(self) -> Application:
        """The one application of the file."""
        return self.applications[0]


def load_config(path: Path | str) -> ServeFile:
    """Read and check a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a field is wrong; one line `file: field: message` a fault.
    """
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
        return ServeFile.model_validate(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _faults(error))) from error


def parse_args(args: Mapping[str, Any]) -> AppConfig:
    """Check the `args` that Ray Serve hands to the application builder.

    Raises:
        ConfigError: a field is wrong; one line `args.field: message` a fault.
    """
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(error, "args"))) from error


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML would silently keep the last."""

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
