"""Checks of a configuration against its machine before it is served: files, programs, processors, memory.

Anything missing there would otherwise leave a replica waiting forever, or end it with another library's error. Every
fault names its field and the fix.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from deploy.run.machine import Machine
from deploy.run.models import model_here
from serve_app.access.access import read_token
from serve_app.access.keys import read_keys
from serve_app.config.app_config import AppConfig, PoolSection
from serve_app.config.base import PoolName
from serve_app.referee.signatures import SigningKey
from serve_app.text.tokenizer import Tokenizer
from speculative.config import EngineConfig, why_no_triton
from speculative.end_tokens import read_json
from speculative.errors import ConfigError, TruespecError
from speculative.model.catalogue import CATALOGUE
from speculative.model.config import ModelConfig, holds_fp8
from speculative.model.eagle3 import Eagle3Config
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.model.loading import checkpoint_files, choose_weights
from speculative.model.mtp import MtpConfig
from speculative.weights import longest_sequence

_Found = TypeVar("_Found")

_PLACE = "applications[0].args"
_GIB = 2**30
# Bytes of a weight in each form; the CPU's four-bit ones share a scale and a least weight among 32.
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "w4a8": 20 / 32}
_KINDS: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MOST_SHARED = 4  # times the cores: beyond it a replica hardly progresses; below, it is slow, with a warning
_OWN_LABELS = "ray.io/"  # Ray sets these on nodes itself
_DRAFTERS: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "draft_model": ("a whole model", ModelConfig.from_folder),
    "eagle3": ("an EAGLE-3 head", Eagle3Config.from_folder),
    "mtp": ("an MTP module", MtpConfig.from_folder),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Reason that a configuration cannot be served here: the field below `args`, and the problem with its fix."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{_PLACE}.{self.field}: {self.message}"


def require_servable(faults: Iterator[Fault], file: Path | str | None = None) -> None:
    """Fail if there are faults.

    Raises:
        ConfigError: one line per fault; `file` precedes each.
    """
    lines = [str(fault) if file is None else f"{file}: {fault}" for fault in faults]
    if lines:
        raise ConfigError("\n".join(lines))


def faults_here(config: AppConfig, machine: Machine) -> Iterator[Fault]:
    """Return what keeps this machine from serving a configuration, without starting anything or using the network."""
    yield from _program_faults(config)
    yield from _file_faults(config)
    yield from _processor_faults(config, machine)
    sources: dict[str, Path] = {}
    for field, name in (("model.source", config.model.source), ("drafter.model", config.drafter.model)):
        faults, folder = ([], None) if name is None else _look(field, partial(model_here, name))
        yield from faults
        if folder is not None:
            sources[field] = folder
    if "model.source" not in sources:
        return
    if config.engine.kind != "torch":
        yield from _tokenizer_faults(config, sources["model.source"])
        return
    faults, model = _model(sources["model.source"])
    yield from faults
    if model is not None:
        yield from _model_faults(config, model, sources)
        yield from _memory_faults(config, model, machine, sources)


def hints_here(config: AppConfig, machine: Machine) -> Iterator[str]:
    """Return what whoever serves a configuration without faults on this machine should know."""
    yield from _idle_gpus(config, len(machine.gpu_bytes), "this machine")
    yield from _model_hints(config)


def hints_on_cluster(config: AppConfig) -> Iterator[str]:
    """The same for the Ray cluster that this process is connected to. The model may be on its nodes only."""
    yield from _idle_gpus(config, _resources_there("GPU"), "the cluster")


def chats(config: AppConfig) -> bool:
    """Return whether a model takes conversations: it has a chat template, or is on other machines only."""
    try:
        folder = model_here(config.model.source)
        return folder is None or bool(Tokenizer.from_folder(folder, config.model.chat_template).chat_template().source)
    except ConfigError:
        return True


def _idle_gpus(config: AppConfig, num_gpus: float, place: str) -> Iterator[str]:
    """GPUs that no replica asks for: what Ray does not give, replicas do not see. `device: cpu` is meant so."""
    if num_gpus and config.engine.device == "auto":
        for name in config.pools_on("cpu"):
            yield (
                f"{_PLACE}.pools.{name}.num_gpus is 0, so its replicas compute on the CPU, and {place} has "
                f"{num_gpus:g} GPUs: set it to 1, or engine.device to cpu if that is meant."
            )


def _model_hints(config: AppConfig) -> Iterator[str]:
    """A name that is another model's; and what is odd about tokenizer and chat template of a model that is here."""
    source, name = config.model.source, config.model.served_name
    for known, model in CATALOGUE.items():
        if name == model.served_name and source != known and name != Path(source).name:
            yield (
                f"{_PLACE}.model.name is {name}, a model of the catalogue, and model.source is {source}: clients take "
                "the answers for that model's. Remove it, or give the model a name of its own."
            )
    folder = model_here(source)
    if folder is not None:
        yield from Tokenizer.from_folder(folder, config.model.chat_template).remarks()


def faults_on_cluster(config: AppConfig) -> Iterator[Fault]:
    """Return what the Ray cluster that this process is connected to lacks at present, at the pools' least numbers of
    replicas.

    An autoscaling cluster may add it. Paths are those of its nodes and are not checked.
    """
    import ray  # a second of processor time, which only this needs

    nodes = [node for node in ray.nodes() if node["Alive"]]
    there = {name: _resources_there(name) for name in ("CPU", "GPU")}
    for kind, field in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        asked = {
            name: getattr(config.pool(name), field) * config.pool(name).least_replicas for name in config.pool_names
        }
        if sum(asked.values()) > there[kind]:
            largest = max(asked, key=lambda name: asked[name])
            yield Fault(
                f"pools.{largest}.{field}",
                f"the pools ask for {sum(asked.values()):g} {kind}s together, and the cluster has {there[kind]:g} "
                "now; lower it or the replicas, or add nodes, unless the cluster adds them by itself.",
            )
    for name in config.pool_names:
        pool = config.pool(name)
        if config.ranks.by_ray:  # on as many nodes as it takes
            pool = pool.model_copy(update={"num_gpus": 1})
        if not any(_holds(node, pool) for node in nodes):
            yield Fault(
                f"pools.{name}",
                f"no node of the cluster has {pool.num_cpus:g} CPUs, {pool.num_gpus:g} GPUs and the labels "
                f"{pool.label_selector}, which one replica asks for; lower these, or add such a node, unless the "
                "cluster adds one by itself.",
            )


def _resources_there(name: str) -> float:
    """Return how much of a resource, such as GPU, the cluster has that this process is connected to."""
    import ray

    return float(ray.cluster_resources().get(name, 0))


def _holds(node: Mapping[str, Any], pool: PoolSection) -> bool:
    resources, labels = node["Resources"], node.get("Labels") or {}
    fits = resources.get("CPU", 0) >= pool.num_cpus and resources.get("GPU", 0) >= pool.num_gpus
    return fits and all(_carries(labels, key, wanted) for key, wanted in pool.label_selector.items())


def _carries(labels: Mapping[str, str], key: str, wanted: str) -> bool:
    """Return whether a node matches one line of a label selector: `a`, `!a`, `in(a,b)` or `!in(a,b)`."""
    negative, text = wanted.startswith("!"), wanted.removeprefix("!")
    values = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (labels.get(key) in [value.strip() for value in values]) != negative


def _look(field: str, find: Callable[[], _Found]) -> tuple[list[Fault], _Found | None]:
    """Return what was found; or the fault, whose message may begin with its field, and None."""
    try:
        return [], find()
    except TruespecError as error:
        begins = rf"({re.escape(field)}|{re.escape(field.rpartition('.')[2])}):? "
        return [Fault(field, re.sub(f"^{begins}", "", str(error)))], None


def _program_faults(config: AppConfig) -> Iterator[Fault]:
    """Missing optional packages that the configuration needs."""
    wanted = (
        ("engine.kind", config.engine.kind == "vllm", "vllm", "vllm needs vLLM: pip install 'truespec[vllm]'"),
        (
            "handoff.transport",
            config.handoff.transport == "nixl",
            "nixl",
            "nixl needs NIXL: pip install --no-deps nixl nixl-cu12",
        ),
        (
            "observability.traces_endpoint",
            config.observability.traces_endpoint is not None,
            "opentelemetry.exporter.otlp.proto.http",
            "needs the OTLP exporter: pip install 'truespec[tracing]'",
        ),
    )
    for field, asked, package, message in wanted:
        if asked and not _is_installed(package):
            yield Fault(field, f"{message}, which is not installed here; install it, or change the field.")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _file_faults(config: AppConfig) -> Iterator[Fault]:
    """Files that the replicas read."""
    keys, token, signing_key = config.access.keys_file, config.admin.token_file, config.receipts.key_file
    if keys is not None:
        yield from _look("access.keys_file", partial(read_keys, Path(keys)))[0]
    if token is not None:
        yield from _look("admin.token_file", partial(read_token, Path(token)))[0]
    if signing_key is not None:
        yield from _look("receipts.key_file", partial(SigningKey, Path(signing_key)))[0]
    for name, folder in config.vllm.lora_modules.items():
        if not Path(folder).expanduser().is_dir():
            yield Fault(f"vllm.lora_modules.{name}", f"{folder} is not a folder; give the folder of the adapter.")


def _processor_faults(config: AppConfig, machine: Machine) -> Iterator[Fault]:
    """Cores and GPUs. Pools may request more cores in total than exist: they share them, with a warning."""
    for name in config.pool_names:
        pool = config.pool(name)
        if pool.num_cpus > _MOST_SHARED * machine.num_cpus:
            yield Fault(
                f"pools.{name}.num_cpus",
                f"one replica asks for {pool.num_cpus:g} CPUs, and this machine has {machine.num_cpus}: its threads "
                f"would wait for each other. Set it to {machine.num_cpus} at most.",
            )
        yield from _label_faults(name, pool)
    asked = {name: config.pool(name).num_gpus * config.pool(name).least_replicas for name in config.pool_names}
    if sum(asked.values()) > len(machine.gpu_bytes):
        seen = f"{len(machine.gpu_bytes)} that torch {torch.__version__} can use"
        yield Fault(
            f"pools.{max(asked, key=lambda name: asked[name])}.num_gpus",
            f"the pools ask for {sum(asked.values()):g} GPUs together, and this machine has {seen}; set it to 0 to run "
            "on the CPU, or serve on a cluster with GPUs (--address).",
        )
    elif config.engine.kind == "torch" and any(asked.values()) and (why := why_no_triton()):
        yield Fault(
            f"pools.{max(asked, key=lambda name: asked[name])}.num_gpus",
            f"is above 0, and an engine computes on a GPU with Triton's kernels, of which there are none here: {why}, "
            "or set it to 0 to run on the CPU.",
        )


def _label_faults(name: PoolName, pool: PoolSection) -> Iterator[Fault]:
    for key, wanted in pool.label_selector.items():
        if not key.startswith(_OWN_LABELS) and not _carries({}, key, wanted):
            yield Fault(
                f"pools.{name}.label_selector",
                f"asks for a node with {key}: {wanted}, and a Ray that is started here has no such label; remove it, "
                "or serve on the cluster that has it (--address).",
            )


def _model(folder: Path) -> tuple[list[Fault], ModelConfig | None]:
    """The model of a folder whose files are all there."""
    for kind in ("eagle3", "mtp"):
        if _is_a(kind, folder):
            called = _DRAFTERS[kind][0]
            message = (
                f"{folder} holds {called}, which drafts for a model; give the model here, and this as drafter.model."
            )
            return [Fault("model.source", message)], None
    return _look("model.source", partial(_read_model, folder))


def _read_model(folder: Path) -> ModelConfig:
    checkpoint_files(folder)
    return ModelConfig.from_folder(folder)


def _is_a(kind: str, folder: Path) -> bool:
    """Return whether a folder holds such a drafter."""
    return not _look("", partial(_DRAFTERS[kind][1], folder))[0]


def _tokenizer_faults(config: AppConfig, folder: Path) -> Iterator[Fault]:
    """A tokenizer that cannot be served, or a chat template that is not for it."""
    template = config.model.chat_template
    faults = _look("model.chat_template", partial(Tokenizer.from_folder, folder, template))[0]
    if faults:  # of the folder itself, or else of the template
        yield from _look("model.source", partial(Tokenizer.from_folder, folder))[0] or faults


def _model_faults(config: AppConfig, model: ModelConfig, sources: Mapping[str, Path]) -> Iterator[Fault]:
    """Return what does not fit the model: its tokenizer, lengths, weights, drafter."""
    folder, engine = sources["model.source"], config.engine_config(config.pool_names[0])
    yield from _tokenizer_faults(config, folder)
    faults, longest = _look("engine.max_model_len", partial(longest_sequence, model, engine))
    yield from faults
    if engine.quantization not in ("auto", engine.dtype) or holds_fp8(folder):
        for kind in _KINDS:
            if config.pools_on(kind):
                choose = partial(
                    choose_weights, engine.quantization, folder, dtype=engine.dtype, device=torch.device(kind)
                )
                yield from _look("engine.quantization", choose)[0]
    if longest is not None and "drafter.model" in sources:
        yield from _drafter_faults(config.drafter.kind, sources["drafter.model"], model, longest)


def _drafter_faults(kind: str, folder: Path, model: ModelConfig, longest: int) -> Iterator[Fault]:
    """A drafter of another kind than configured, or of another model."""
    faults, drafter = _look("drafter.model", partial(_DRAFTERS[kind][1], folder))
    if drafter is None:
        found = next((other for other in _DRAFTERS if other != kind and _is_a(other, folder)), None)
        if found is not None:
            called = _DRAFTERS[found][0]
            faults = [
                Fault("drafter.kind", f"is {kind}, but drafter.model {folder} holds {called}; set it to {found}.")
            ]
        yield from faults
    elif kind != "draft_model":
        yield from _look("drafter.model", partial(drafter.for_target, model))[0]
        yield from _look("drafter.model", partial(read_held_out_rates, folder))[0]
    elif drafter.vocab_size != model.vocab_size:
        yield Fault(
            "drafter.model",
            f"{folder} has a vocabulary of {drafter.vocab_size} tokens, and the model one of {model.vocab_size}; take "
            "a model of the same family, or another drafter.kind.",
        )
    elif drafter.max_position_embeddings < longest:
        yield Fault(
            "drafter.model",
            f"{folder} has {drafter.max_position_embeddings} positions, and requests may have {longest}; set "
            f"engine.max_model_len to {drafter.max_position_embeddings}, or take another draft model.",
        )


def _memory_faults(
    config: AppConfig, model: ModelConfig, machine: Machine, sources: Mapping[str, Path]
) -> Iterator[Fault]:
    """Weights and KV caches that no memory holds. Activations and libraries, which come on top, are not counted."""
    if config.pools_on("cuda") and machine.gpu_bytes:
        # A fraction of a GPU only matters to Ray's scheduling, and does not limit memory.
        room = _Room("cuda", max(machine.gpu_bytes), "one GPU", 1)
        yield from _room_faults(config, model, sources, room)
    if replicas := sum(config.pool(name).least_replicas for name in config.pools_on("cpu")):
        room = _Room("cpu", machine.memory_bytes, "this machine", replicas)
        yield from _room_faults(config, model, sources, room)


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory that replicas share: of which kind of device, how much, called what, and how many share it."""

    kind: Literal["cpu", "cuda"]
    num_bytes: int
    place: str
    replicas: int


def _room_faults(config: AppConfig, model: ModelConfig, sources: Mapping[str, Path], room: _Room) -> Iterator[Fault]:
    engine = config.engine_config(config.pool_names[0])
    room_bytes, place, replicas, on_gpu = room.num_bytes, room.place, room.replicas, room.kind == "cuda"
    num_weights = sum(_num_weights(folder) for folder in sources.values())
    form = _smallest_form(engine, sources["model.source"], uses_gpu=on_gpu)
    read = form if form == "fp8" else engine.dtype  # a checkpoint is read before a CPU packs it
    plain, kept = _WEIGHT_BYTES[read] * num_weights, _WEIGHT_BYTES[form] * num_weights
    token_bytes = model.kv_shape.num_values * _DTYPE_BYTES[engine.dtype]
    num_tokens = (engine if on_gpu else engine.on_cpu()).kv_cache_tokens or 0  # a GPU's is as large as it can be
    cache = token_bytes * num_tokens
    here = f"{place} has {room_bytes / _GIB:.1f} GiB"
    if replicas * plain > room_bytes:
        yield Fault(
            "model.source",
            f"the weights take {plain / _GIB:.1f} GiB in {read} on each of {replicas} replicas, and {here}; "
            "take a smaller model, fewer replicas, or a cluster (--address).",
        )
    elif replicas * (kept + cache) > room_bytes:
        most = int((room_bytes / replicas - kept) / token_bytes) // engine.block_size * engine.block_size
        yield Fault(
            "engine.kv_cache_tokens",
            f"{num_tokens} tokens take {cache / _GIB:.1f} GiB beside weights of {kept / _GIB:.1f} GiB on "
            f"each of {replicas} replicas, and {here}; set it well below {most}, or take fewer replicas.",
        )


def _smallest_form(engine: EngineConfig, folder: Path, *, uses_gpu: bool) -> str:
    """Return what takes the fewest bytes among the forms that weights may have once loaded: four bits on a CPU unless
    configured otherwise."""
    if engine.quantization == "fp8" or holds_fp8(folder):
        return "fp8"
    if uses_gpu or engine.quantization == engine.dtype or engine.dtype == "float32":
        return engine.dtype
    return "w4a8" if engine.quantization == "auto" else engine.quantization


def _num_weights(folder: Path) -> int:
    """Numbers of a model, from its files' headers; of files that cannot be read the loading says more."""
    sizes: dict[str, int] = {}
    try:
        for path in checkpoint_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                    sizes[name] = torch.Size(file.get_slice(name).get_shape()).numel()
        tied = read_json(folder / "config.json").get("tie_word_embeddings") is True
    except (TruespecError, SafetensorError, OSError):
        return 0
    if tied and "model.embed_tokens.weight" in sizes:
        sizes.pop("lm_head.weight", None)  # a copy that some files have
    return sum(sizes.values())
