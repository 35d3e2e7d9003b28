"""The folder of a draft head: config.json and safetensors, with every tensor accounted for."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.derived import is_derived
from speculative.model.layers import PackedLinear
from speculative.model.loading import checkpoint_files
from speculative.model.loading import read_tensors as read_file_tensors

_RATES = "held_out_acceptance"  # in config.json; other programs ignore it


def read_tensors(folder: Path, shape: ModelConfig, slot_of: Callable[[str], str] = str) -> dict[str, Tensor]:
    """All tensors of a head's folder by the names of its slots, without those that follow from config.json.

    Args:
        folder: the head's.
        shape: of its layer.
        slot_of: the slot of a tensor's name, where a head goes by several spellings.

    Raises:
        ConfigError: a file is missing or damaged, or two tensors for one slot differ.
        UnsupportedModel: there are only pickled weights.
    """
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for path, name, tensor in read_file_tensors(checkpoint_files(folder)):
        if is_derived(path, name, tensor, shape):
            continue
        slot, source = slot_of(name), f"{name} of {path.name}"
        if slot in tensors and not torch.equal(tensors[slot], tensor):
            raise ConfigError(
                f"{folder}: {source} and {sources[slot]} differ, and the head has one of them; download the checkpoint "
                "again, or remove the wrong one."
            )
        tensors[slot], sources[slot] = tensor, source
    return tensors


def fill_slots(folder: Path, slots: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy a folder's tensors into the parameters of a head.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape, or holds NaN.
    """
    missing, unexpected = sorted(slots.keys() - tensors.keys()), sorted(tensors.keys() - slots.keys())
    if missing or unexpected:
        raise ConfigError(
            f"{folder}: missing tensors {missing[:5]}, unexpected tensors {unexpected[:5]}; config.json and the "
            "weights do not belong together."
        )
    for name, slot in slots.items():
        if tensors[name].shape != slot.shape:
            raise ConfigError(
                f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, config.json asks for "
                f"{list(slot.shape)}; they do not belong together."
            )
        if tensors[name].isnan().any():
            raise ConfigError(f"{folder}: tensor {name} holds NaN; download the checkpoint again.")
        slot.detach().copy_(tensors[name])


class Head(Protocol):
    """A module whose parameters have names in a checkpoint."""

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Return where the tensors of a checkpoint go: name, and the view of a parameter to copy it into."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Implement `nn.Module.modules`."""
        ...


def rounded(head: Head) -> dict[str, Tensor]:
    """The parameters of a head as its file keeps them: bfloat16, whatever they were trained in.

    Raises:
        ValueError: the head was packed for serving on a CPU; save the one it was loaded from.
    """
    if any(isinstance(module, PackedLinear) for module in head.modules()):
        raise ValueError("A packed head cannot be saved; load it in float32 first.")
    return {name: slot.detach().bfloat16().cpu().contiguous() for name, slot in head.checkpoint_slots().items()}


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    whole = {**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def write_held_out_rates(folder: Path, sampled: Sequence[float], greedy: Sequence[float]) -> None:
    """Add to config.json how often drafts were accepted after training, by position: at T = 1 and in greedy answers."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config[_RATES] = {"sampled": [round(rate, 3) for rate in sampled], "greedy": [round(rate, 3) for rate in greedy]}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_held_out_rates(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what `write_held_out_rates` added; nothing where somebody else trained the head.

    Raises:
        ConfigError: they are no numbers between 0 and 1.
    """
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(_RATES, {})
    try:
        sampled, greedy = (tuple(map(float, found.get(kind, ()))) for kind in ("sampled", "greedy"))
    except (AttributeError, OverflowError, TypeError, ValueError):
        sampled = greedy = (-1.0,)
    if not all(0 <= rate <= 1 for rate in sampled + greedy):
        raise ConfigError(
            f"{folder / 'config.json'}: {_RATES} is {found!r}, but has to be two lists of numbers between 0 and 1, "
            "`sampled` and `greedy`; correct them, or delete the entry."
        )
    return sampled, greedy


def held_out_rates(kind: str, folder: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read the held-out rates of a drafter of any kind; empty where it is no head."""
    return read_held_out_rates(folder) if kind == "eagle3" and folder is not None else ((), ())


def layer_json(shape: ModelConfig) -> dict[str, Any]:
    """Return what config.json says of a Llama layer; the inverse of `ModelConfig.from_json`, as far as a head needs
    it."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = {"rope_type": "llama3", **dataclasses.asdict(shape.rope_scaling)}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        "rope_scaling": rope if shape.rope_scaling is not None else None,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "vocab_size": shape.vocab_size,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids) or None,
    }
