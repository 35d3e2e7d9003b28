"""The formats of weights, and what is known of each without computing: needs no torch.

A format is an entry of `FORMATS`, and `model/formats/NAME.py`, which computes with it. The setting and its reference,
the chart's schema, the tolerances and the checks before a start follow from the entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Rounding:
    """The limits of what products in a format may move of an engine's results, in nats where nothing else is said.

    edge_nats: largest shift of a logit.
    max_tme: the largest mean of exp|g - t| over the logprobs, between equal engines and between others.
    shift_nats: largest shift of the mean of the logprobs' log odds.
    distribution: the most that is added to the means of the calibration test's terms.
    jump_nats: logprobs of more than one token in a thousand are no further off.
    between_batches: the figures were measured between batches of other sizes.
    """

    edge_nats: float
    max_tme: tuple[float, float]
    shift_nats: float
    distribution: float
    jump_nats: float
    between_batches: bool = False


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of the matrices of a model's layers.

    meaning: in the settings' reference.
    num_bytes: of a weight.
    rounding: that of its products; None = they round as those of the activations' type do.
    devices: that multiply with it.
    plain: the numbers are the checkpoint's own, in one of torch's types.
    packed: a checkpoint is read in `dtype` first, and packed for our CPU kernels then.
    file: of a checkpoint that holds it beside plain weights.
    scheme: the maker's name for it, in a checkpoint that holds nothing else.
    is_stated: recognises it by the `quantization_config` in the config.json of such a checkpoint.
    """

    meaning: str
    num_bytes: float
    rounding: Rounding | None = None
    devices: tuple[Device, ...] = ("cpu", "cuda")
    plain: bool = False
    packed: bool = False
    file: str = ""
    scheme: str = ""
    is_stated: Callable[[Mapping[str, Any]], bool] = lambda _: False


def _is_fp8_dynamic(quantization: Mapping[str, Any]) -> bool:
    """FP8 weights with a scale for each output, activations scaled by row as they come, all but the LM head."""
    groups = list((quantization.get("config_groups") or {}).values())
    if len(groups) != 1:
        return False
    weights, activations = (groups[0].get(part) or {} for part in ("weights", "input_activations"))
    wanted = (
        (quantization, {"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": None}),
        (groups[0], {"targets": ["Linear"], "output_activations": None}),
        (weights, {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
        (activations, {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}),
    )
    fits = all(part.get(name) == value for part, values in wanted for name, value in values.items())
    return fits and set(quantization.get("ignore") or ()) <= {"lm_head", "re:.*lm_head"}


FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat("", 4, Rounding(1e-3, (1.001, 1.001), 1e-4, 0.01, 0.01), plain=True, packed=True),
    "bfloat16": WeightFormat("", 2, Rounding(0.25, (1.05, 1.1), 0.025, 0.01, 1.0), plain=True, packed=True),
    "w4a8": WeightFormat(
        "four bits on a CPU, and activations of eight",
        20 / 32,  # a scale and a least weight among 32
        Rounding(1.0, (1.05, 1.1), 0.05, 0.01, 1.0),
        devices=("cpu",),
        packed=True,
        file="truespec/quantized.safetensors",
    ),
    "fp8": WeightFormat(
        "eight bits on a GPU, and activations of eight",
        1,
        Rounding(2.0, (1.2, 1.3), 0.1, 0.03, 2.0, between_batches=True),
        devices=("cuda",),
        scheme="compressed-tensors' FP8_DYNAMIC",
        is_stated=_is_fp8_dynamic,
    ),
}

ROUNDINGS = dict(
    sorted(
        ((name, one.rounding) for name, one in FORMATS.items() if one.rounding is not None),
        key=lambda named: named[1].edge_nats,
    )
)
"""The rounding of each precision, the finest first."""

PRECISIONS = tuple(ROUNDINGS)
"""Precisions that engines compute in: the type of activations, or of their rounding in products."""


def is_rounded(name: str) -> bool:
    """Return whether weights of this format are rounded from the checkpoint's own."""
    return name in FORMATS and not FORMATS[name].plain


def format_stated(quantization: object) -> str | None:
    """Return the format that a `quantization_config` states; None = none that is known."""
    if not isinstance(quantization, Mapping):
        return None
    return next((name for name, one in FORMATS.items() if one.is_stated(quantization)), None)


def format_wanted(wanted: str, held: str | None, dtype: str, device: Device) -> str:
    """Return the format that the settings ask for, of a checkpoint that holds weights so, as far as a device has it."""
    if wanted != "auto":
        return wanted
    if held is not None and (FORMATS[held].scheme or (dtype != "float32" and device in FORMATS[held].devices)):
        return held
    return dtype


def coarsest_held(device: Device) -> str:
    """Return the coarsest format that a checkpoint may hold for a device."""
    held = [name for name, one in FORMATS.items() if (one.file or one.scheme) and device in one.devices]
    return max(held, key=lambda name: PRECISIONS.index(name) if name in PRECISIONS else -1)
