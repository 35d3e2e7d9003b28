"""LoRA adapters of the vLLM engine: which there are, whether they fit the model, and what each of them is.

vLLM skips what it finds no place for: layers that the model lacks, whole embedding tables. Matrices of a smaller model
it copies into the corner of larger ones. It then silently serves something other than what was trained. So an adapter's
file is compared with the model before vLLM starts.

This module imports no vLLM: settings are also checked where it is not installed.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from serve_app.backends.base import Adapter
from serve_app.backends.vllm_parts.checkpoint import hash_of, weight_files
from serve_app.backends.vllm_parts.settings import RANKS
from speculative.errors import ConfigError, InvalidRequest

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every tensor in a file of PEFT's
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OF_TABLES = (".lora_embedding_A", ".lora_embedding_B")
_NEVER = {  # modules that vLLM adapts, and the consequence
    "lm_head": "vLLM does that where it samples, and errs where it returns logprobs of given tokens, as replays need",
    "embed_tokens": "vLLM's drafters share the embeddings, and look up tokens of all requests at once",
}
_EXPERTS = "experts"

Layers = Mapping[str, Collection[tuple[int, ...]]]
"""The modules of a checkpoint and the shapes of their weights; none if it stores these in another form."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was checked."""

    adapter: Adapter
    number: int  # from 1; vLLM's id of it, the same on every replica
    fingerprint: str  # of its files
    rank: int  # the largest of its modules
    modules: frozenset[str]  # last name parts of those that it changes


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters that are served, by name."""

    loaded: Mapping[str, LoadedAdapter]  # as `read_adapters` gives them

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(self.loaded.values())

    def __len__(self) -> int:
        return len(self.loaded)

    def find(self, name: str) -> LoadedAdapter | None:
        """The adapter of a request; None = the model itself. Raises InvalidRequest: there is none of this name."""
        if not name:
            return None
        if name not in self.loaded:
            raise InvalidRequest("model", f"There is no adapter {name[:100]!r} on this replica.")
        return self.loaded[name]

    def identity(self, name: str) -> str:
        """The adapter's identity in a handoff: name and fingerprint; "" = the model itself."""
        found = self.find(name)
        return "" if found is None else f"{name} {found.fingerprint}"

    def with_model(self, fingerprint: str) -> str:
        """The fingerprint of a model with these adapters; of the model alone if there are none."""
        if not self.loaded:
            return fingerprint
        reported = json.dumps([fingerprint, *sorted(self.identity(name) for name in self.loaded)])
        return blake2b(reported.encode(), digest_size=16).hexdigest()

    def check_unchanged(self) -> None:
        """Check that the files are unchanged since they were first read, before vLLM reads them again. Raises
        ConfigError: one has changed."""
        for one in self:
            if _fingerprint(Path(one.adapter.root)) != one.fingerprint:
                raise ConfigError(
                    f"{_field(one.adapter.name)} has changed in {one.adapter.root} since this replica started. Restart "
                    "the service to serve the new one."
                )

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of vLLM's `AsyncEngineArgs`, with those that were given; none where there are no adapters.

        All of them stay in memory, so that none is read again while it is served. Only what they change is wrapped: by
        default vLLM wraps the head as well, and then fails or errs when it returns logprobs of given tokens. Raises
        ConfigError: an adapter's rank is larger than the largest."""
        if not self.loaded:
            return {}
        most = given.get("max_lora_rank", RANKS[-1])
        for one in self:
            if one.rank > most:
                fix = "raise vllm.engine_args.max_lora_rank" if most < RANKS[-1] else "vLLM takes none of more"
                raise ConfigError(f"{_field(one.adapter.name)} has rank {one.rank}; the maximum is {most}: {fix}.")
        largest = max(one.rank for one in self)
        num_slots = given.get("max_loras", len(self))
        return {
            "enable_lora": True,
            "max_loras": num_slots,
            "max_cpu_loras": max(num_slots, len(self)),
            "max_lora_rank": given.get("max_lora_rank", next(rank for rank in RANKS if rank >= largest)),
            "lora_target_modules": sorted({module for one in self for module in one.modules}),
        }


def read_adapters(folders: Mapping[str, str], model: Path) -> Adapters:
    """Read and check the adapters of a model.

    Args:
        folders: where each lies, by name, as PEFT saves it: `adapter_config.json`, `adapter_model.safetensors`.
        model: the model's folder.

    Raises:
        ConfigError: one cannot be read, or belongs to another model; the message names the field and the fix.
    """
    if not folders:
        return Adapters({})
    layers = _layers(model)
    read = {
        name: _read(name, Path(folders[name]), number, layers) for number, name in enumerate(sorted(folders), start=1)
    }
    return Adapters({name: read[name] for name in folders})


def _read(name: str, folder: Path, number: int, layers: Layers) -> LoadedAdapter:
    field = _field(name)
    for needed in (_CONFIG, _WEIGHTS):
        if not (folder / needed).is_file():
            raise ConfigError(
                f"{field} is {folder}, which has no {needed}: give the folder that PEFT saved the adapter in, on "
                "every node."
            )
    try:
        config = dict(json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
        rank = max(int(one) for one in (config.get("r", 1), *dict(config.get("rank_pattern") or {}).values()))
        shapes = dict(_shapes(folder / _WEIGHTS))
    except (ConfigError, OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{field}: {folder} cannot be read: {str(error).rstrip('.')}. Save the adapter again."
        ) from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{field} is a PEFT adapter of the type {config.get('peft_type')}; only LORA is served.")
    if not shapes:
        raise ConfigError(f"{field}: {folder / _WEIGHTS} is empty. Save the adapter again.")
    for tensor, shape in shapes.items():
        _check_tensor(field, tensor, shape, layers)
    modules = frozenset(
        _EXPERTS if f".{_EXPERTS}" in tensor else _module(tensor).rpartition(".")[2] for tensor in shapes
    )
    return LoadedAdapter(Adapter(name, str(folder)), number, _fingerprint(folder), rank, modules)


def _check_tensor(field: str, tensor: str, shape: tuple[int, ...], layers: Layers) -> None:
    """Check that vLLM finds a place for a tensor, and that it fills that place. Raises ConfigError: it does not."""
    if f".{_EXPERTS}" in tensor:  # they come in several layouts; vLLM itself refuses what fits none of them
        return
    module = _module(tensor)
    last = module.rpartition(".")[2]
    if last in _NEVER:
        raise ConfigError(f"{field} changes {last}: {_NEVER[last]}. Train it without, or merge it into the model.")
    if not tensor.endswith((_A, _B)):
        raise ConfigError(
            f"{field} holds {tensor}, which is not a LoRA matrix, and which vLLM would ignore. Train it without "
            "modules_to_save and new tokens, or merge it into the model."
        )
    if _place(module) not in layers:
        raise ConfigError(f"{field} changes {module}, which this model does not have; leave it out.")
    which, what = (-1, "inputs") if tensor.endswith(_A) else (0, "outputs")
    fitting = {whole[which] for whole in layers[_place(module)]}
    if fitting and shape[which] not in fitting:
        raise ConfigError(
            f"{field} changes {module} with {shape[which]} {what}, and the model's has "
            f"{' or '.join(map(str, sorted(fitting)))}: it belongs to another model; leave it out."
        )


def _layers(model: Path) -> Layers:
    found: dict[str, set[tuple[int, ...]]] = {}
    for path in weight_files(model):
        for tensor, shape in _shapes(path):
            module, _, kind = tensor.rpartition(".")
            shapes = found.setdefault(_place(module), set())
            if kind == "weight" and len(shape) == 2:
                shapes.add(shape)
    return found


def _place(module: str) -> str:
    """A module's name from its layer on: the prefix differs between versions of one model."""
    return module.rpartition(".layers.")[2]


def _module(tensor: str) -> str:
    module = tensor.removeprefix(_PREFIX)
    for side in (_A, _B, *_OF_TABLES):
        module = module.removesuffix(side)
    return module


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a safetensors file, from its header."""
    from speculative.model.tensor_files import read_header  # imports torch, which reading a configuration need not

    for name, entry in read_header(path).items():
        yield name, tuple(entry["shape"])


def _fingerprint(folder: Path) -> str:
    return hash_of(folder / name for name in (_CONFIG, _WEIGHTS))


def _field(name: str) -> str:
    return f"vllm.lora_modules.{name}"
