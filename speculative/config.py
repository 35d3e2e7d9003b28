"""The engine's settings: frozen, and complete before anything runs."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from speculative.errors import ConfigError

VerifierName = Literal["token_wise", "block", "coupled", "synthetic"]
WeightsName = Literal["auto", "bfloat16", "w16a16", "float32", "int8", "int4", "w8a8", "w4a8"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Which drafter, and how it drafts.

    `ngram` looks for the longest suffix of `ngram_max` down to `ngram_min` tokens that occurred before, and drafts what
    followed it. `suffix` drafts what most often followed the longest suffix of up to `suffix_depth` tokens, in the
    sequence or in past outputs. `draft_model` is a smaller model of the same vocabulary, `eagle3` a head over the
    hidden states of three of the target's layers, `mtp` a module over its last one.
    """

    kind: Literal["none", "ngram", "suffix", "draft_model", "eagle3", "mtp"] = "ngram"
    model: str | None = None  # of a drafter that has weights: a folder, a catalogue name, or a hub id
    sampled: bool = True  # False = such a drafter always drafts its likeliest token
    num_draft_tokens: int = 4
    ngram_max: int = 4
    ngram_min: int = 2
    suffix_depth: int = 32  # the longest suffix that is looked for
    suffix_min_match: int = 2  # and the shortest
    suffix_min_probability: float = 0.1  # a draft ends before it is less likely than this
    suffix_max_tokens: int = 65536  # tokens of past outputs to remember, at about 300 bytes each; 0 = none
    length: Literal["static", "dynamic"] = "static"  # dynamic = at most num_draft_tokens, as many as pay

    def __post_init__(self) -> None:
        _check(0 < self.num_draft_tokens <= 64, "drafter.num_draft_tokens", "must lie between 1 and 64")
        _check(1 <= self.ngram_min <= self.ngram_max, "drafter.ngram_min", "must lie between 1 and ngram_max")
        self._check_suffix()
        _check(
            (self.model is not None) == (self.kind in ("draft_model", "eagle3", "mtp")),
            "drafter.model",
            "belongs to the kinds draft_model, eagle3 and mtp, which need it",
        )

    def _check_suffix(self) -> None:
        _check(1 <= self.suffix_depth <= 256, "drafter.suffix_depth", "must lie between 1 and 256")
        shortest_fits = 1 <= self.suffix_min_match <= self.suffix_depth
        _check(shortest_fits, "drafter.suffix_min_match", "must lie between 1 and suffix_depth")
        is_share = 0 <= self.suffix_min_probability <= 1
        _check(is_share, "drafter.suffix_min_probability", "must lie between 0 and 1")
        _check(self.suffix_max_tokens >= 0, "drafter.suffix_max_tokens", "must be at least 0")

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
    weights: WeightsName = "auto"  # how the CPU keeps them; auto = as the checkpoint's source had them, else as `dtype`
    device: str = "auto"  # a CUDA device when there is one, else the CPU
    cuda_graphs: bool | None = None  # replay captured decoding steps; None = on a GPU; True elsewhere pads, for tests
    num_threads: int = 1  # CPU threads: the replica's share of the cores, never the machine's
    logprobs_mode: LogprobsMode = "raw_logprobs"
    verifier: VerifierName = "token_wise"  # requests that ask to be reproducible get the coupled one in any case
    synthetic_acceptance: float | None = None  # only in benchmarks, and only with the synthetic verifier
    self_check_share: float = 0.5  # of the steps whose terms the self-checks take; invariants are checked in all
    priority_ageing_s: float = 10.0  # seconds of waiting that make up for one class of priority
    benchmark: bool = False  # this engine serves nobody; what is wrong on purpose may be switched on
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
        self._check_verifier()
        _check(0 <= self.self_check_share <= 1, "self_check_share", "must lie between 0 and 1")
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

    def _check_verifier(self) -> None:
        rate = self.synthetic_acceptance
        _check(
            self.verifier != "synthetic" or self.benchmark,
            "verifier",
            "may be synthetic in benchmarks only: what it emits is wrong on purpose",
        )
        _check(
            (self.verifier == "synthetic") == (rate is not None),
            "synthetic_acceptance",
            "belongs to the synthetic verifier, which needs it",
        )
        _check(rate is None or 0 <= rate <= 1, "synthetic_acceptance", "must lie between 0 and 1")

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


def _cache_folder() -> Path:
    return Path(os.environ.get("TRUESPEC_CACHE") or Path.home() / ".cache" / "truespec")


def _check(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {rule}.")
