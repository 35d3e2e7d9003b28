"""Forms of weights that a checkpoint has. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speculative.model.end_tokens import read_json
from speculative.weight_formats import FORMATS, format_stated


def quantization_of(folder: Path) -> str | None:
    """The method by which a checkpoint's weights are quantized, as its config.json names it; None = they are not."""
    own = _stated(folder)
    return str(own.get("quant_method")) if isinstance(own, Mapping) else None


def format_held(folder: Path) -> str | None:
    """The format to which the weights of a checkpoint of our own engine were rounded; None = they were not."""
    if (own := _stated(folder)) is not None:
        return format_stated(own)
    return next((name for name in FORMATS if own_files(folder, name)), None)


def own_files(folder: Path, *formats: str) -> list[Path]:
    """Files beside plain weights in which a checkpoint holds these formats."""
    paths = (folder / FORMATS[name].file for name in formats if name in FORMATS)
    return [path for path in paths if path.is_file()]  # the folder itself where a format has no such file


def _stated(folder: Path) -> Any:
    path = folder / "config.json"
    return read_json(path).get("quantization_config") if path.is_file() else None
