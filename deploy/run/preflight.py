"""Checks of a configuration against its machine before it is served: files, programs, processors, memory.

Anything missing there would otherwise leave a replica waiting forever, or end it with another library's error. Every
fault names its field and the fix.
"""

import importlib.util
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from deploy.run.machine import Machine
from deploy.run.models import find_model, model_here
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.http.access.access import read_token
from serve_app.http.access.keys import read_keys
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.records.signatures import SigningKey
from serve_app.text.tokenizer import Tokenizer
from speculative.config import EngineConfig
from speculative.drafting.draft_model import drafted_ids
from speculative.drafting.weights import longest_sequence
from speculative.errors import ConfigError, TruespecError
from speculative.gpu.triton_here import why_no_triton
from speculative.model.catalogue import Progress
from speculative.model.config import ModelConfig
from speculative.model.eagle3 import Eagle3Config
from speculative.model.end_tokens import read_json
from speculative.model.file_names import LOWER_FILES, TOP_FILES
from speculative.model.formats import format_of
from speculative.model.forms import format_held
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.model.loading import check_weights, checkpoint_files, choose_weights
from speculative.model.tensor_files import check_tensors, read_header
from speculative.weight_formats import FORMATS, Device, format_wanted

_PLACE = "applications[0].args"
_GIB = 2**30
_MOST_SHARED = 4  # times the cores: beyond it a replica hardly progresses; below, it is slow, with a warning


@dataclass(slots=True)
class Preflight:
    """Findings of a machine, or of a cluster, about a configuration; each check adds to them.

    folders: of the model, and of a drafter with weights, by the setting; without those that are not on this machine.
    """

    faults: list[str] = field(default_factory=list)  # what keeps the configuration from being served, a line each
    hints: list[str] = field(default_factory=list)  # for whoever serves it
    folders: dict[str, Path] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None  # the model's, where that is on this machine
    formats: set[str] = field(default_factory=set)  # of the weights, in our own engine

    def fault(self, setting: str, message: str) -> None:
        """Add a fault of a setting below `args`."""
        self.faults.append(f"{_PLACE}.{setting}: {message}")

    @contextmanager
    def reading(self, setting: str) -> Iterator[None]:
        """Make a fault of the setting of any error of ours within the block, whose message may begin with it."""
        try:
            yield
        except TruespecError as error:
            begins = rf"^({re.escape(setting)}|{re.escape(setting.rpartition('.')[2])}):? "
            self.fault(setting, re.sub(begins, "", str(error)))

    def require_servable(self, file: Path | str | None = None) -> None:
        """Fail if there are faults.

        Raises:
            ConfigError: one line per fault; `file` precedes each.
        """
        if self.faults:
            raise ConfigError("\n".join(line if file is None else f"{file}: {line}" for line in self.faults))


def check_machine(config: AppConfig, machine: Machine, fetch: Progress | None = None) -> Preflight:
    """Return what this machine says of a configuration, without starting anything.

    Args:
        config: the configuration.
        machine: this machine.
        fetch: fetch models that are not here, unless something else is wrong, and say so by it; of their weights look
            at the files' lengths only, since who loads a model next checks the rest while it reads it. None = use no
            network, and read every weight.
    """
    found = Preflight()
    _check_machine_has(config, machine, found)
    if fetch is not None:
        found.require_servable()
    for setting, source in config.sources.items():
        with found.reading(setting):
            folder = model_here(source) if fetch is None else find_model(source, fetch)
            if folder is not None:
                for file in (file for pattern in (*TOP_FILES, *LOWER_FILES) for file in folder.glob(pattern)):
                    if not file.exists():  # as in a copy of the hub's cache without its blobs
                        gone = f"{file} is a link to {file.readlink()}, which is not there"
                        raise ConfigError(f"{gone}; fetch the model again.")
                found.folders[setting] = folder
    if "model.source" in found.folders:
        if config.engine.kind == "torch":
            _check_model(config, machine, found)
        else:
            _check_tokenizer(config, found)
    for setting, folder in found.folders.items():
        with found.reading(setting):
            for file in folder.glob("*.safetensors"):
                read_header(file)
    if fetch is None and config.engine.kind == "torch" and not found.faults:
        for setting, folder in found.folders.items():
            with found.reading(setting):
                if setting == "model.source" or config.drafter.kind == "draft_model":
                    check_weights(folder)
                else:  # a head's tensors have names of several spellings
                    check_tensors(checkpoint_files(folder))
    return found


def check_cluster(config: AppConfig) -> Preflight:
    """Return what the Ray cluster that this process is connected to lacks now, at the pools' least numbers of replicas.

    An autoscaling cluster may add it. The model's files are those of its nodes and are not checked.
    """
    import ray  # a second of processor time, which only this needs

    found, there = Preflight(), ray.cluster_resources()
    for kind, setting in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        largest, asked, terms = _asked(config, setting)
        if asked > there.get(kind, 0):
            found.fault(
                f"pools.{largest}.{setting}",
                f"the pools ask for {asked:g} {kind}s together ({terms}), and the cluster has {there.get(kind, 0):g} "
                "now; lower it or the replicas, or add nodes, unless the cluster adds them by itself.",
            )
    _hint_at_gpus(config, there.get("GPU", 0), "the cluster", found)
    return found


def _asked(config: AppConfig, setting: str) -> tuple[PoolName, float, str]:
    """Return the pool that asks for most of a resource, how much all ask for together, and the terms of that sum."""
    each = {name: (config.pool(name).least_replicas, getattr(config.pool(name), setting)) for name in config.pool_names}
    asked = {name: replicas * share for name, (replicas, share) in each.items()}
    terms = ", ".join(f"{name} {replicas} x {share:g}" for name, (replicas, share) in each.items())
    return max(asked, key=lambda name: asked[name]), round(sum(asked.values()), 4), terms


def _gpus_needed(config: AppConfig) -> int:
    """Return how many GPUs all replicas take, where a part is of a single one; Ray counts in ten-thousandths."""
    pools = [config.pool(name) for name in config.pool_names]
    given = [round(10_000 * pool.num_gpus) for pool in pools for _ in range(pool.least_replicas)]
    rooms: list[int] = []  # left of each GPU that is given in parts
    for part in sorted((one for one in given if 0 < one < 10_000), reverse=True):
        gpu = next((gpu for gpu, room in enumerate(rooms) if room >= part), None)
        if gpu is None:
            rooms.append(10_000 - part)
        else:
            rooms[gpu] -= part
    return sum(one // 10_000 for one in given) + len(rooms)


def _fits_on(config: AppConfig, num_gpus: int) -> str:
    """Return what to set so that all replicas find room on so many GPUs. Several of vLLM's, which measures its memory
    while it starts, would count each other's on one."""
    replicas, ranks = sum(config.pool(name).least_replicas for name in config.pool_names), config.ranks.number
    if replicas * ranks <= num_gpus:
        return f"set it to {ranks}"
    fewer = "topology to monolith" if config.topology == "disaggregated" else "replicas to fewer"
    if config.engine.kind == "vllm":
        return f"set {fewer}"
    return f"set num_gpus of each pool to {math.floor(100 * _part_of_gpu(replicas, num_gpus)) / 100:g}, or {fewer}"


def _part_of_gpu(replicas: int, num_gpus: int) -> float:
    """Return the part of a GPU that each replica has if all find room on so many, and all have the same."""
    return 1 / math.ceil(replicas / num_gpus)


def _hint_at_gpus(config: AppConfig, num_gpus: float, place: str, found: Preflight) -> None:
    """GPUs that no replica asks for: what Ray does not give, replicas do not see. `device: cpu` is meant so."""
    if num_gpus and config.engine.device == "auto":
        found.hints.extend(
            f"{_PLACE}.pools.{name}.num_gpus is 0, so its replicas compute on the CPU, and {place} has {num_gpus:g} "
            f"GPUs: {_fits_on(config, math.ceil(num_gpus))}, or engine.device to cpu if that is meant."
            for name in config.pools_on("cpu")
        )


def _check_machine_has(config: AppConfig, machine: Machine, found: Preflight) -> None:
    """Optional packages, files that the replicas read, cores and GPUs. Pools may ask for more cores in total than there
    are: they share them, with a warning."""
    otlp, traced = "opentelemetry.exporter.otlp.proto.http", config.observability.traces_endpoint is not None
    for setting, needed, package, extra in (
        ("engine.kind", config.engine.kind == "vllm", "vllm", "vllm"),
        ("handoff.transport", config.handoff.transport == "nixl", "nixl", "nixl"),
        ("observability.traces_endpoint", traced, otlp, "tracing"),
    ):
        if needed and not _is_installed(package):
            found.fault(
                setting,
                f"needs {package}, which is not installed: pip install -e '.[{extra}]' in the checkout, or change it.",
            )
    for setting, file, read in (
        ("access.keys_file", config.access.keys_file, read_keys),
        ("admin.token_file", config.admin.token_file, read_token),
        ("receipts.key_file", config.receipts.key_file, SigningKey),
        ("replay.tolerance", config.replay.tolerance, partial(Tolerance.read, setting="replay.tolerance:")),
    ):
        with found.reading(setting):
            if file is not None:
                read(Path(file))
    for name in config.pool_names:
        num_cpus = config.pool(name).num_cpus
        if num_cpus > _MOST_SHARED * machine.num_cpus:
            found.fault(
                f"pools.{name}.num_cpus",
                f"one replica asks for {num_cpus:g} CPUs, and this machine has {machine.num_cpus}: its threads would "
                f"wait for each other. Set it to {machine.num_cpus} at most.",
            )
    (largest, asked, terms), num_gpus = _asked(config, "num_gpus"), len(machine.gpu_bytes)
    if (least := _gpus_needed(config)) > num_gpus:
        fix = _fits_on(config, num_gpus) if num_gpus else "set it to 0 to run on the CPU"
        parts = f", and as each part lies on one of them, they need {least}" if asked <= num_gpus else ""
        found.fault(
            f"pools.{largest}.num_gpus",
            f"the pools ask for {asked:g} GPUs together ({terms}){parts}; this machine has {num_gpus} that torch "
            f"{torch.__version__} can use: {fix}, or serve on a cluster with GPUs (--address).",
        )
    elif config.engine.kind == "torch" and asked and (why := why_no_triton()):
        found.fault(
            f"pools.{largest}.num_gpus",
            f"is above 0, and an engine computes on a GPU with Triton's kernels, of which there are none here: {why}, "
            "or set it to 0 to run on the CPU.",
        )
    _hint_at_gpus(config, num_gpus, "this machine", found)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _check_tokenizer(config: AppConfig, found: Preflight) -> None:
    """A tokenizer that cannot be served, or a chat template that is not for it."""
    folder = found.folders["model.source"]
    with found.reading("model.source"):
        found.tokenizer = Tokenizer.from_folder(folder)
        with found.reading("model.chat_template"):
            if config.model.chat_template is not None:
                found.tokenizer = Tokenizer.from_folder(folder, config.model.chat_template)
            found.hints.extend(found.tokenizer.remarks())
            if not any(found.tokenizer.chat_template(with_tools=tools).source for tools in (False, True)):
                found.hints.append(
                    f"{folder} has no chat template: requests to /v1/chat/completions and /v1/responses are refused, "
                    "and those to /v1/completions answered. If the model was trained for conversations, give its "
                    "template as model.chat_template."
                )


def _check_model(config: AppConfig, machine: Machine, found: Preflight) -> None:
    """Tokenizer, lengths, weights, drafter and memory of a model for our own engine."""
    folder, drafter = found.folders["model.source"], found.folders.get("drafter.model")
    engine = config.engine_config(config.pool_names[0])
    with found.reading("model.source"):
        checkpoint_files(folder)
        model = ModelConfig.from_folder(folder)
        _check_tokenizer(config, found)
        with found.reading("engine.max_model_len"):
            longest = longest_sequence(model, engine)
            if drafter is not None:
                with found.reading("drafter.model"):
                    if config.drafter.kind == "draft_model":
                        drafted_ids(drafter, folder, longest)
                    else:
                        Eagle3Config.from_folder(drafter).for_target(model)
                        read_held_out_rates(drafter)
        held = format_held(folder)
        if engine.quantization not in ("auto", engine.dtype) or (held is not None and FORMATS[held].scheme):
            for kind in ("cpu", "cuda"):
                with found.reading("engine.quantization"):
                    if config.pools_on(kind):
                        device = torch.device(kind)
                        form = choose_weights(engine.quantization, folder, dtype=engine.dtype, device=device)
                        format_of(form).check(model)
        _check_memory(config, engine, model, machine, found)


def _check_memory(
    config: AppConfig, engine: EngineConfig, model: ModelConfig, machine: Machine, found: Preflight
) -> None:
    """Weights and KV caches that no memory holds. Activations and libraries, which come on top, are not counted."""
    num_weights = {setting: _num_weights(folder) for setting, folder in found.folders.items()}
    token_bytes = model.kv_shape.num_values * FORMATS[engine.dtype].num_bytes
    on_cpus = sum(config.pool(name).least_replicas for name in config.pools_on("cpu"))
    pools = [config.pool(name) for name in config.pools_on("cuda") if machine.gpu_bytes]
    # The least part of a GPU that a replica has, or would have if all found room.
    shared = _part_of_gpu(sum(pool.least_replicas for pool in pools), len(machine.gpu_bytes)) if pools else 1.0
    part = min(1.0, shared, *(pool.num_gpus for pool in pools))
    of_gpu = "one GPU" if part == 1 else f"{part:.2g} of one GPU"
    for replicas, room_bytes, place, uses_gpu in (
        (bool(pools), int(part * max(machine.gpu_bytes, default=0)), of_gpu, True),
        (on_cpus, machine.memory_bytes, "this machine", False),
    ):
        device: Device = "cuda" if uses_gpu else "cpu"
        form = format_wanted(engine.quantization, format_held(found.folders["model.source"]), engine.dtype, device)
        if replicas:
            found.formats.add(form)
        read = engine.dtype if FORMATS[form].packed else form
        plain = FORMATS[read].num_bytes * sum(num_weights.values())
        fewest = min(one.num_bytes for one in FORMATS.values() if device in one.devices)  # as drafters may be packed
        kept = sum((FORMATS[form].num_bytes if of == "model.source" else fewest) * n for of, n in num_weights.items())
        # A GPU's cache is as large as it can be.
        num_tokens = (engine.kv_cache_tokens or 0) if uses_gpu else engine.cpu_cache_tokens
        cache, here = token_bytes * num_tokens, f"{place} has {room_bytes / _GIB:.1f} GiB"
        if replicas * plain > room_bytes:
            found.fault(
                "model.source",
                f"the weights take {plain / _GIB:.1f} GiB in {read} on each of {replicas:d} replicas, and {here}; take "
                "a smaller model, fewer replicas, or a cluster (--address).",
            )
        elif replicas * (kept + cache) > room_bytes:
            most = int((room_bytes / replicas - kept) / token_bytes) // engine.block_size * engine.block_size
            found.fault(
                "engine.kv_cache_tokens",
                f"{num_tokens} tokens take {cache / _GIB:.1f} GiB beside weights of {kept / _GIB:.1f} GiB on each of "
                f"{replicas:d} replicas, and {here}; set it well below {most}, or take fewer replicas.",
            )


def _num_weights(folder: Path) -> int:
    """Numbers of a model, from its files' headers; of files that cannot be read the loading says more."""
    try:
        headers = [read_header(path) for path in checkpoint_files(folder)]
        tied = read_json(folder / "config.json").get("tie_word_embeddings") is True
    except TruespecError:
        return 0
    sizes = {name: math.prod(tensor["shape"]) for header in headers for name, tensor in header.items()}
    if tied and "model.embed_tokens.weight" in sizes:
        sizes.pop("lm_head.weight", None)  # a copy that some files have
    return sum(sizes.values())
