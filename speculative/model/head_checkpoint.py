"""The folder of a draft head: config.json and safetensors, with every tensor accounted for."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.derived import is_derived
from speculative.model.loading import checkpoint_files
from speculative.model.tensor_files import read_tensors as read_file_tensors
from speculative.model.tensor_files import require_finite

HELD_OUT_RATES = "held_out_acceptance"  # in config.json; other programs ignore it


def read_tensors(folder: Path, shape: ModelConfig, slot_of: Callable[[str], str]) -> dict[str, Tensor]:
    """All tensors of a head's folder by the names of its slots, without those that follow from config.json.

    Args:
        folder: the head's.
        shape: of its layer.
        slot_of: the slot of a tensor's name, which has several spellings.

    Raises:
        ConfigError: a file is missing or damaged, a weight is not finite, or two tensors for one slot differ.
        UnsupportedModel: there are only pickled weights.
    """
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for path, name, tensor in read_file_tensors(checkpoint_files(folder)):
        if is_derived(path, name, tensor, shape):
            continue
        require_finite(path, name, tensor)
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
        ConfigError: a tensor is missing, unexpected, or of another shape.
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
        slot.detach().copy_(tensors[name])


def read_held_out_rates(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return how often drafts were accepted after training, by position: at T = 1 and in greedy answers.

    Nothing where config.json does not say so, as where somebody else trained the head.

    Raises:
        ConfigError: they are no numbers between 0 and 1.
    """
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(HELD_OUT_RATES, {})
    try:
        sampled, greedy = (tuple(map(float, found.get(kind, ()))) for kind in ("sampled", "greedy"))
    except (AttributeError, OverflowError, TypeError, ValueError):
        sampled = greedy = (-1.0,)
    if not all(0 <= rate <= 1 for rate in sampled + greedy):
        raise ConfigError(
            f"{folder / 'config.json'}: {HELD_OUT_RATES} is {found!r}, but has to be two lists of numbers from 0 to 1, "
            "`sampled` and `greedy`; correct them, or delete the entry."
        )
    return sampled, greedy


def held_out_rates(kind: str, folder: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read the held-out rates of a drafter of any kind; empty where it is no head."""
    return read_held_out_rates(folder) if kind == "eagle3" and folder is not None else ((), ())
