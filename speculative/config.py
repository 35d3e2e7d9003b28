"""The engine's settings: frozen, and complete before anything runs."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from speculative.errors import ConfigError
from speculative.lookup.registry import (
    OptionError,
    Options,
    OptionValue,
    SomeOptions,
    options_of,
    read_options,
    registered,
)

VerifierName = Literal["token_wise", "block", "coupled"]
WeightsName = Literal["auto", "bfloat16", "w16a16", "float32", "int8", "int4", "w8a8", "w4a8"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


KINDS_WITH_WEIGHTS = ("draft_model", "eagle3", "mtp")


def drafter_kinds() -> tuple[str, ...]:
    """What `DrafterConfig.kind` may be."""
    return ("none", *registered(), *KINDS_WITH_WEIGHTS)


@dataclass(frozen=True, slots=True, init=False)
class DrafterConfig:
    """Which drafter, and how it drafts.

    `none` drafts nothing. Drafters without weights, such as `ngram`, are those of `speculative.lookup`, where their
    options are declared. `draft_model` is a smaller model of the same vocabulary, `eagle3` a head over the hidden
    states of three of the target's layers, `mtp` a module over its last one.

    model: of a drafter that has weights: a folder, a catalogue name, or a hub id.
    sampled: False = such a drafter always drafts its likeliest token.
    length: dynamic = at most num_draft_tokens, as many as pay.
    options: of every drafter that has some, whichever drafts; each is set by its name.

    Raises:
        ConfigError: a value is wrong, or two contradict each other; the message names the field.
    """

    kind: str
    model: str | None
    sampled: bool
    num_draft_tokens: int
    length: Literal["static", "dynamic"]
    options: tuple[Options, ...]

    def __init__(
        self,
        kind: str = "ngram",
        model: str | None = None,
        *,
        sampled: bool = True,
        num_draft_tokens: int = 4,
        length: Literal["static", "dynamic"] = "static",
        options: tuple[Options, ...] = (),
        **changed: OptionValue,
    ) -> None:
        kinds = drafter_kinds()
        _check(kind in kinds, "drafter.kind", f"must be one of {', '.join(kinds)}, got {kind!r}")
        _check(0 < num_draft_tokens <= 64, "drafter.num_draft_tokens", "must be between 1 and 64")
        _check(
            (model is not None) == (kind in KINDS_WITH_WEIGHTS),
            "drafter.model",
            "belongs to the kinds draft_model, eagle3 and mtp, which need it",
        )
        try:
            own = {name: getattr(some, name) for some in options for name in options_of(type(some))}
            read = read_options(own | changed)
        except OptionError as error:
            raise ConfigError(f"drafter.{error}") from error
        values = (kind, model, sampled, num_draft_tokens, length, read)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    def options_of(self, options: type[SomeOptions]) -> SomeOptions:
        """One drafter's options, by their class."""
        return next(own for own in self.options if type(own) is options)

    @property
    def max_drafts(self) -> int:
        """The most tokens drafted for a sequence in one round."""
        return 0 if self.kind == "none" else self.num_draft_tokens


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and choices of one engine.

    Raises:
        ConfigError: a value is wrong, or two contradict each other; the message names the field.
    """

    max_model_len: int | None = None  # tokens of prompt and output; None = what the model was made for
    max_num_seqs: int = 16  # sequences decoded together
    max_batched_tokens: int = 512  # tokens computed in one step, drafts included
    kv_cache_tokens: int = 16384  # tokens the KV cache holds
    block_size: int = 16  # tokens a block
    prefix_caching: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: WeightsName = (
        "auto"  # how the CPU keeps them; auto = as the checkpoint's source had them, else as `dtype`
    )
    device: str = "auto"  # a CUDA device when there is one, else the CPU
    cuda_graphs: bool | None = None  # replay captured decoding steps; None = on a GPU; True elsewhere pads, for tests
    num_threads: int = 1  # CPU threads: the replica's share of the cores, never the machine's
    logprobs_mode: LogprobsMode = "raw_logprobs"
    verifier: VerifierName = "token_wise"  # requests that ask to be reproducible get the coupled one in any case
    self_check_sample_rate: float = 0.5  # of the steps whose terms the self-checks take; invariants are checked in all
    priority_ageing_s: float = 10.0  # seconds of waiting that make up for one class of priority
    drafter: DrafterConfig = field(default_factory=DrafterConfig)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "kv_cache_tokens", "block_size", "num_threads"):
            _check(getattr(self, name) >= 1, name, "must be at least 1")
        _check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        _check(
            self.kv_cache_tokens % self.block_size == 0,
            "kv_cache_tokens",
            f"must be a multiple of block_size ({self.block_size})",
        )
        _check(0 <= self.self_check_sample_rate <= 1, "self_check_sample_rate", "must be between 0 and 1")
        _check(
            0 < self.priority_ageing_s < math.inf,
            "priority_ageing_s",
            "must be above 0, or requests could wait for ever",
        )
        tokens_per_round = 1 + self.drafter.max_drafts
        _check(
            self.max_batched_tokens >= self.max_num_seqs * tokens_per_round,
            "max_batched_tokens",
            f"must be at least max_num_seqs x (1 + num_draft_tokens) = {self.max_num_seqs * tokens_per_round}, "
            "so that every running sequence fits into a step",
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV cache."""
        return self.kv_cache_tokens // self.block_size


def models_folder(cache_dir: Path | None = None) -> Path:
    """Where fetched models live: `<cache>/models`, the cache being TRUESPEC_CACHE or ~/.cache/truespec."""
    return (cache_dir or _cache_folder()) / "models"


def kernels_folder() -> Path:
    """Where the CPU kernels that were compiled for this machine are kept: `<cache>/kernels`."""
    return _cache_folder() / "kernels"


def c_compiler() -> str:
    """The C compiler that CC names; "" = none."""
    return os.environ.get("CC", "")


def _cache_folder() -> Path:
    return Path(os.environ.get("TRUESPEC_CACHE") or Path.home() / ".cache" / "truespec")


def _check(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {rule}.")
