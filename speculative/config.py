"""The engine's settings: frozen, and complete before anything runs."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from speculative.errors import ConfigError

VerifierName = Literal["token_wise", "block", "coupled", "synthetic"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Which drafter, and how it drafts.

    `ngram` looks for the longest suffix of `ngram_max` down to `ngram_min` tokens that occurred before, and drafts what
    followed it.
    """

    kind: Literal["none", "ngram"] = "ngram"
    num_draft_tokens: int = 4
    ngram_max: int = 4
    ngram_min: int = 2

    def __post_init__(self) -> None:
        _check(0 < self.num_draft_tokens <= 64, "drafter.num_draft_tokens", "must lie between 1 and 64")
        _check(1 <= self.ngram_min <= self.ngram_max, "drafter.ngram_min", "must lie between 1 and ngram_max")

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
    device: str = "auto"  # a CUDA device when there is one, else the CPU
    num_threads: int = 1  # CPU threads: the replica's share of the cores, never the machine's
    logprobs_mode: LogprobsMode = "raw_logprobs"
    verifier: VerifierName = "token_wise"  # requests that ask to be reproducible get the coupled one in any case
    synthetic_acceptance: float | None = None  # only in benchmarks, and only with the synthetic verifier
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
    cache = cache_dir or Path(os.environ.get("TRUESPEC_CACHE") or Path.home() / ".cache" / "truespec")
    return cache / "models"


def _check(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {rule}.")
