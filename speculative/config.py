"""The engine's settings: frozen, and complete before anything runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from speculative.draft_tree import rows_of_levels
from speculative.drafters import read_options, registered
from speculative.options import OptionError, Options, SomeOptions, option
from speculative.weight_formats import FORMATS

CPU_CACHE_TOKENS = 16384  # of the KV cache, where nothing else is set

VerifierName = Literal["token_wise", "coupled"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
if TYPE_CHECKING:
    WeightsName = str
else:
    WeightsName = Literal[("auto", *FORMATS)]

KINDS_WITH_WEIGHTS = ("draft_model", "eagle3", "mtp")
MAX_DRAFTS = 64
"""The most that a round drafts for a sequence, those of all levels of a tree."""
_OF_WEIGHTS = "belongs to the kinds draft_model, eagle3 and mtp"


def drafter_kinds() -> tuple[str, ...]:
    """Return what `DrafterConfig.kind` may be."""
    return ("none", *registered(), *KINDS_WITH_WEIGHTS)


@dataclass(frozen=True)
class DrafterSettings(Options):
    """The settings of a drafter, as a configuration file has them, beside the options of drafters without weights.

    The section of the file derives from it, with what this room cannot say of `model` and `tree`.
    """

    kind: str = option("ngram", "Kind of drafter; `none` turns speculation off, `mtp` needs vLLM.")
    model: str | None = None
    sampled: bool = option(
        True, "Drafters with weights: draw the draft from its distribution; false takes the likeliest token."
    )
    num_draft_tokens: int = option(
        4, "Draft tokens a round; the most when `length` is `dynamic`.", least=1, most=MAX_DRAFTS
    )
    length: Literal["static", "dynamic"] = option("static", "`dynamic` drafts as many tokens as pay, 0 included.")
    suffix_first: int = option(
        0,
        "Drafters with weights and `dynamic` length: where a passage that the sequence repeats promises more, "
        "draft up to so many tokens of it in the model's place; 0 = none.",
        least=0,
        most=MAX_DRAFTS,
    )
    tree: tuple[int, ...] = ()


@dataclass(frozen=True)
class DrafterConfig(DrafterSettings):
    """The drafter of an engine, and how it drafts.

    Drafters without weights, such as `ngram`, are those of `speculative.lookup`, where their options are declared.
    `draft_model` is a smaller model of the same vocabulary, `eagle3` a head over the hidden states of three of the
    target's layers, `mtp` a module in the target's checkpoint, which only vLLM runs.

    options: of every drafter that has some, whichever drafts.

    Raises:
        ConfigError: a value is wrong, or two contradict each other; the message names the field.
    """

    options: tuple[Options, ...] = field(default_factory=read_options)

    @classmethod
    def of(cls, **named: Any) -> "DrafterConfig":
        """Make one of settings and of options by their names, as they stand side by side in a configuration file."""
        settings = {own.name: named.pop(own.name) for own in fields(DrafterSettings) if own.name in named}
        return cls(**settings, options=read_options(**named))

    def __post_init__(self) -> None:
        """Check all fields; an error names one as it stands in a configuration file."""
        try:
            super().__post_init__()
        except OptionError as error:
            raise OptionError(f"drafter.{error.name}", error.rule) from error

    def check(self) -> None:
        """Kind, weights and tree go together."""
        kinds, has_weights = drafter_kinds(), self.kind in KINDS_WITH_WEIGHTS
        if self.kind not in kinds:
            raise OptionError("kind", f"must be one of {', '.join(kinds)}, got {self.kind!r}.")
        if has_weights and not self.model:
            needs = "needs a folder, a catalogue name, or a hub id"
            raise OptionError("model", f"is missing: kind {self.kind} {needs}.")
        if self.model is not None and not has_weights:
            raise OptionError("model", f"{_OF_WEIGHTS}; remove it or change kind.")
        if self.tree and not has_weights:
            raise OptionError("tree", f"{_OF_WEIGHTS}.")
        if any(width < 1 for width in self.tree):
            raise OptionError("tree", "must hold numbers of candidates, at least 1 each.")
        if len(self.tree) > self.num_draft_tokens:
            rule = f"must have at most num_draft_tokens ({self.num_draft_tokens}) levels."
            raise OptionError("tree", rule)
        if (rows := self.rows_of_drafts[-1]) > MAX_DRAFTS:
            rule = f"must have at most {MAX_DRAFTS} drafts a round, those of all levels; it has {rows}."
            raise OptionError("tree", rule)
        if self.suffix_first and not (has_weights and self.length == "dynamic"):
            raise OptionError("suffix_first", f"{_OF_WEIGHTS}, of dynamic length; set it to 0 for others.")

    def options_of(self, options: type[SomeOptions]) -> SomeOptions:
        """One drafter's options, by their class."""
        return next(own for own in self.options if type(own) is options)

    @property
    def max_drafts(self) -> int:
        """The most tokens that one round drafts one behind the other for a sequence."""
        return 0 if self.kind == "none" else max(self.num_draft_tokens, self.suffix_first)

    @property
    def widths(self) -> tuple[int, ...]:
        """Candidates that each node of a tree has behind it, by its depth; all 1 where no trees are drafted."""
        return (*self.tree, *[1] * (self.num_draft_tokens - len(self.tree)))  # a tree from JSON is a list

    @property
    def rows_of_drafts(self) -> Sequence[int]:
        """Rows of a step that 0, 1, ... drafts one behind the other take, with all their siblings."""
        return rows_of_levels(self.widths)

    @property
    def max_rows(self) -> int:
        """The most rows of a step that a sequence's drafts take."""
        return 0 if self.kind == "none" else max(self.rows_of_drafts[-1], self.suffix_first)


@dataclass(frozen=True)
class EngineSettings(Options):
    """Sizes and choices of an engine, as a configuration file has them: its section derives from this class."""

    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16", "Type of the KV cache, and of weights and activations where `quantization` does not say otherwise."
    )
    quantization: WeightsName = option(
        "auto",
        "Form of the weights; `auto`: what the checkpoint holds, else `dtype`"
        + "".join(f"; `{name}`: {one.meaning}" for name, one in FORMATS.items() if one.meaning)
        + ".",
    )
    device: str = option(
        "auto",
        "`auto` takes the GPU that Ray gave the replica (its pool's `num_gpus`), else the CPU.",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
    )
    cuda_graphs: bool | None = option(
        None, "Replay captured decoding steps of up to 256 sequences (docs/gpu.md: its memory). Default: on a GPU."
    )
    max_model_len: int | None = option(
        None, "Most tokens of a request, prompt and answer together; the model's own limit when not set.", least=2
    )
    max_num_seqs: int = option(16, "Most sequences of a step.", least=1)
    max_batched_tokens: int = option(
        512, "Most tokens of a step, drafts included; longer prompts are computed in chunks.", least=1
    )
    kv_cache_tokens: int | None = option(
        None,
        "Tokens that the KV cache holds. Not set: as many as the replica's part of a GPU has room for; 16384 on a CPU.",
        least=1,
    )
    block_size: int = option(16, "Tokens of a KV block.", least=1)
    prefix_caching: bool = option(True, "Keep the KV of prompts for later requests with the same prefix.")
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs", "What `logprobs` returns: before or after the sampling parameters."
    )
    verifier: VerifierName = option(
        "token_wise",
        "How drafts are verified; reproducible requests (docs/concepts.md, Seeds) get `coupled` in any case.",
    )
    self_check_sample_rate: float = option(
        0.25,
        "Share of the steps in which draws are checked against their random numbers, and zero-mean terms are "
        "taken; the other invariants are checked in all of them.",
        least=0,
        most=1,
    )
    priority_ageing_s: float = option(
        10.0, "Seconds of waiting that make up for one step of `priority`, so that no request waits forever.", above=0
    )


@dataclass(frozen=True)
class EngineConfig(EngineSettings):
    """One engine's settings, with its drafter's and with what follows from where it runs.

    Raises:
        ConfigError: a value is wrong, or two contradict each other; the message names the field.
    """

    num_threads: int = option(1, "CPU threads: the replica's share of the cores, never the machine's.", least=1)
    gpu_share: float = option(1.0, "Part of a GPU's memory that the engine may take.", above=0, most=1)
    handoffs_on_device: bool = option(False, "Leave handoffs in a GPU's memory, as far as there is room.")
    drafter: DrafterConfig = field(default_factory=DrafterConfig)

    def check(self) -> None:
        """The weights have a known format; the cache holds whole blocks and the longest sequence, a step all those."""
        if self.quantization not in ("auto", *FORMATS):
            rule = f"must be one of auto, {', '.join(FORMATS)}, got {self.quantization!r}."
            raise OptionError("quantization", rule)
        if (room := self.kv_cache_tokens) is not None and room < (self.max_model_len or 0):
            longest = f"must hold at least one sequence of max_model_len ({self.max_model_len}) tokens, got {room}; "
            raise OptionError("kv_cache_tokens", longest + "raise it or lower max_model_len.")
        if (room or 0) % self.block_size:
            raise OptionError("kv_cache_tokens", f"must be a multiple of block_size ({self.block_size}).")
        longest = "suffix_first" if self.drafter.suffix_first > self.drafter.num_draft_tokens else "num_draft_tokens"
        least = self.max_num_seqs * (1 + self.drafter.max_rows)
        if self.max_batched_tokens < least:
            drafts = f"the {self.drafter.max_rows} drafts of a tree" if self.drafter.tree else longest
            raise OptionError(
                "max_batched_tokens",
                f"must be at least max_num_seqs x (1 + {drafts}) = {least}, so that every running sequence fits into "
                "a step.",
            )
        if self.drafter.tree and self.verifier != "coupled":
            raise OptionError("verifier", "must be coupled where drafter.tree is set: it judges candidates.")

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV cache, whose size must be known."""
        assert self.kv_cache_tokens is not None
        return self.kv_cache_tokens // self.block_size

    @property
    def cpu_cache_tokens(self) -> int:
        """The size of the KV cache on a CPU: as set, or as many whole blocks as fit into `CPU_CACHE_TOKENS`, or one."""
        return self.kv_cache_tokens or max(CPU_CACHE_TOKENS // self.block_size, 1) * self.block_size

    def on_cpu(self) -> "EngineConfig":
        """With the size of a CPU's KV cache where none is set."""
        return replace(self, kv_cache_tokens=self.cpu_cache_tokens)


def models_folder(cache_dir: Path | None = None) -> Path:
    """Return where fetched models live: `<cache>/models`, the cache being TRUESPEC_CACHE or ~/.cache/truespec."""
    return (cache_dir or _cache_folder()) / "models"


def kernels_folder() -> Path:
    """Return where the CPU kernels that were compiled for this machine are kept: `<cache>/kernels`."""
    return _cache_folder() / "kernels"


def _cache_folder() -> Path:
    return Path(os.environ.get("TRUESPEC_CACHE") or Path.home() / ".cache" / "truespec")
