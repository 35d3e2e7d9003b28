"""Forms of weights: to which those of a checkpoint were rounded, and which the settings ask for. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from speculative.config import WeightsName
from speculative.model.end_tokens import read_json
from speculative.model.file_names import QUANTIZED_FILE

ROUNDED_FORMS = ("w4a8", "fp8")
"""Forms of weights that round the folder's own."""


def quantization_of(folder: Path) -> str | None:
    """The method by which a checkpoint's weights are quantized, as its config.json names it; None = they are not."""
    path = folder / "config.json"
    own = read_json(path).get("quantization_config") if path.is_file() else None
    return str(own.get("quant_method")) if isinstance(own, Mapping) else None


def rounded_form(folder: Path) -> Literal["w4a8", "fp8"] | None:
    """The form to which the weights of a checkpoint of our own engine were rounded; None = they were not."""
    if quantization_of(folder) is not None:
        return "fp8"
    return "w4a8" if (folder / QUANTIZED_FILE).is_file() else None


def form_wanted(
    wanted: WeightsName, rounded: str | None, dtype: str, *, on_gpu: bool
) -> Literal["float32", "bfloat16", "w4a8", "fp8"]:
    """The form that the settings ask for of weights that were rounded so, as far as a machine can have it."""
    if wanted != "auto":
        return wanted
    if rounded == "fp8":
        return "fp8"
    if dtype == "float32":
        return "float32"
    return "w4a8" if rounded and not on_gpu else "bfloat16"
