"""Rotary position embedding (Su et al., 2021): what config.json says of it, its frequencies, and their rotation.

Frequencies are computed in transformers' order of operations.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.config_file import FIX, FULL, ConfigFile
from speculative.model.end_tokens import Json

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation of heads.

    theta: of the frequencies before they are scaled. frequencies: radians a position, for each pair of a head's first
    dimensions. amplitude: of cosines and sines. most_positions: that it is right for.
    """

    theta: float
    frequencies: tuple[float, ...]
    amplitude: float = 1.0
    most_positions: float = math.inf

    @classmethod
    def plain(cls, theta: float, size: int) -> "Rope":
        """Rotate a head's first `size` dimensions, without scaling."""
        return _rope(theta, 1.0 / _spread(theta, size))


def _rope(theta: float, frequencies: Tensor, amplitude: float = 1.0, most_positions: float = math.inf) -> Rope:
    return Rope(theta, tuple(frequencies.tolist()), amplitude, most_positions)


def _spread(theta: float, size: int) -> Tensor:
    """theta^(2i / size), [size/2] float32."""
    return theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


class Rotary(nn.Module):
    """Rotation in the rotate-half convention: i turns with i + size/2."""

    table: Tensor  # [P, 2, size/2] float32; cosines, sines

    def __init__(self, rope: Rope, num_positions: int, *, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(rope.frequencies))  # [P, size/2]
        table = torch.stack((angles.cos(), angles.sin()), dim=1) * rope.amplitude
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what `rotate` needs at these positions: two of [N, 1, size]."""
        cos, sin = self.table[positions].to(dtype).unsqueeze(1).unbind(2)  # [N, 1, size/2]
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn the first dimensions of heads [N, H, head_dim] to their positions. Rolling swaps the halves; the sign is in
    the sine.
    """
    size = cos.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :size], cos, signed_sin), heads[..., size:]), dim=-1)
    return torch.addcmul(heads * cos, heads.roll(size // 2, dims=-1), signed_sin)


def rope_settings(file: ConfigFile) -> Json:
    """The rotary settings of a whole model, as transformers 5 reads them.

    `rope_scaling`, if it says anything, stands in for the whole of `rope_parameters`. A `rope_theta` beside either
    counts where it has none of its own; an `original_max_position_embeddings` beside it comes before its own.

    Raises:
        ConfigError: they are no object.
        UnsupportedModel: they differ between layers.
    """
    field = "rope_scaling" if file.get("rope_scaling") else "rope_parameters"
    rope = file.section(field)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModel(f"config.json: `rope_parameters` differ between layers, unknown here; {FIX}.")
    theta, original = ({name: file.get(name)} if name in file.content else {} for name in ("rope_theta", _ORIGINAL))
    return {**theta, **rope, **original}


def rope_of(settings: Json, file: ConfigFile, head_dim: int, *, theta: float = 10000.0, in_part: bool = False) -> Rope:
    """Read rotary settings.

    Args:
        settings: an object of config.json.
        file: that config.json.
        head_dim: of the model.
        theta: where the settings have none.
        in_part: whether the model's class can rotate a part of a head.

    Raises:
        ConfigError: they are wrong.
        UnsupportedModel: they are of a form that is not known.
    """
    given = ConfigFile(settings)
    share = given.number("partial_rotary_factor", 1.0) if settings.get("partial_rotary_factor") is not None else 1.0
    if share != 1 and not in_part:
        raise UnsupportedModel(f"config.json: `partial_rotary_factor` is {share:g}, unknown here; {FIX}.")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default" and kind not in _SCALINGS:
        known = ", ".join(("default", *_SCALINGS))
        raise UnsupportedModel(f"config.json: `rope_type` is {kind!r}, this engine knows {known}; {FIX}.")
    theta, size = given.number("rope_theta", theta), int(head_dim * share)
    if not 0 < size <= head_dim or size % 2:
        raise UnsupportedModel(
            f"config.json: `head_dim` is {head_dim}, of which {size} dimensions are rotated: pairs need an even "
            f"number; {FIX}."
        )
    if kind == "default":
        return Rope.plain(theta, size)
    return _SCALINGS[kind](given, theta, _spread(theta, size), file.size("max_position_embeddings"))


def ropes_by_type(file: ConfigFile, thetas: Mapping[str, tuple[str, float]], head_dim: int) -> dict[str, Rope]:
    """Read the rotary settings of each type of layers; `rope_scaling` is of full attention.

    Args:
        file: a config.json.
        thetas: by type, the field that has theta where its settings do not, and the default.
        head_dim: of the model.

    Raises:
        ConfigError, UnsupportedModel: as of `rope_of`.
    """
    given, scaling, ropes = ConfigFile(file.section("rope_parameters")), file.section("rope_scaling"), {}
    for layer_type, (field, default) in thetas.items():
        settings = {**given.section(layer_type), **(scaling if layer_type == FULL else {})}
        theta = ConfigFile({"rope_theta": file.get(field, default)}).number("rope_theta")
        settings.pop("truncate", None)  # transformers looks for it beside, where it is not
        ropes[layer_type] = rope_of(settings, file, head_dim, theta=theta)
    return ropes


def _linear(given: ConfigFile, theta: float, spread: Tensor, positions: int) -> Rope:
    """All positions drawn together by a factor."""
    del positions
    return _rope(theta, 1.0 / spread / given.number("factor"))


def _llama3(given: ConfigFile, theta: float, spread: Tensor, positions: int) -> Rope:
    """The stretching of Llama 3.1: long wavelengths by a factor, short ones not at all, and a blend between."""
    factor, low, high = (given.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low > high:
        raise ConfigError(
            f"config.json: `low_freq_factor` is {low}, above `high_freq_factor`, {high}; take the file from its source."
        )
    context, frequencies = _original(given, positions), 1.0 / spread
    wavelengths = 2 * math.pi / frequencies
    share = (context / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / factor, blended)
    return _rope(theta, torch.where(wavelengths < context / high, frequencies, stretched))


def _yarn(given: ConfigFile, theta: float, spread: Tensor, positions: int) -> Rope:
    """YaRN (Peng et al., 2023): stretched below `beta_slow` turns in the original context, not above `beta_fast`."""
    original, size = _original(given, positions), 2 * len(spread)
    factor = given.number_or_null("factor") or positions / original
    betas = given.number_or_null("beta_fast") or 32.0, given.number_or_null("beta_slow") or 1.0
    low, high = (size * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta)) for beta in betas)
    if given.flag("truncate", True):  # the bounds of the blend are whole dimensions
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, all_dim = given.number_or_null("mscale"), given.number_or_null("mscale_all_dim")
    usual = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    frequencies = 1.0 / (factor * spread) * (1 - kept) + 1.0 / spread * kept
    return _rope(theta, frequencies, given.number_or_null("attention_factor") or usual)


def _longrope(given: ConfigFile, theta: float, spread: Tensor, positions: int) -> Rope:
    """LongRoPE (Ding et al., 2024) within the original context: a factor for each frequency.

    Beyond it transformers rotates the whole sequence by other factors, which keys in a cache cannot follow. vLLM takes
    those for all sequences of an engine that may be longer, which computes another model for those that are not.
    """
    original = _original(given, positions)
    factor = given.number_or_null("factor") or positions / original
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = torch.tensor(given.numbers("short_factor", len(spread)), dtype=torch.float32)
    return _rope(theta, 1.0 / (factors * spread), given.number_or_null("attention_factor") or usual, original)


def _original(given: ConfigFile, positions: int) -> int:
    """The positions before scaling; null is wrong."""
    return ConfigFile({_ORIGINAL: given.get(_ORIGINAL, positions)}).size(_ORIGINAL)


_SCALINGS: Mapping[str, Callable[[ConfigFile, float, Tensor, int], Rope]] = MappingProxyType(
    {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
)
