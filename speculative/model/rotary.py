"""Rotary position embedding (Su et al., 2021): what config.json says of it, its frequencies, and their rotation.

Frequencies are computed in transformers' order of operations. A scaling gets `spread`, theta^(2i / size), and gives
radians a position.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.config_file import FIX, FULL, ConfigFile, brief
from speculative.model.end_tokens import Json

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions drawn together by a factor."""

    factor: float
    kind: ClassVar[str] = "linear"
    attention_factor: ClassVar[float] = 1.0

    def frequencies(self, spread: Tensor, theta: float) -> Tensor:
        """Divide all frequencies."""
        del theta
        return 1.0 / spread / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The stretching of Llama 3.1: long wavelengths by `factor`, short ones not at all, and a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    kind: ClassVar[str] = "llama3"
    attention_factor: ClassVar[float] = 1.0

    def frequencies(self, spread: Tensor, theta: float) -> Tensor:
        """Divide those of long wavelengths."""
        del theta
        frequencies = 1.0 / spread
        wavelengths = 2 * math.pi / frequencies
        context, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        share = (context / wavelengths - low) / (high - low)
        blended = (1 - share) * frequencies / self.factor + share * frequencies
        stretched = torch.where(wavelengths > context / low, frequencies / self.factor, blended)
        return torch.where(wavelengths < context / high, frequencies, stretched)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): stretched from `beta_slow` turns in the original context down, not above `beta_fast`.

    `attention_factor` multiplies cosines and sines. `truncate`: the bounds of the blend are whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    kind: ClassVar[str] = "yarn"

    def frequencies(self, spread: Tensor, theta: float) -> Tensor:
        """Blend stretched and plain frequencies along the dimensions."""
        size = 2 * len(spread)
        turns = (
            self.original_max_position_embeddings / (2 * math.pi * beta) for beta in (self.beta_fast, self.beta_slow)
        )
        low, high = (size * math.log(count) / (2 * math.log(theta)) for count in turns)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001
        kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * spread) * (1 - kept) + 1.0 / spread * kept


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024) within the original context: a factor for each frequency.

    Beyond it transformers rotates the whole sequence by other factors, which keys in a cache cannot follow.
    """

    short_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    kind: ClassVar[str] = "longrope"

    def frequencies(self, spread: Tensor, theta: float) -> Tensor:
        """Divide each by its own factor."""
        del theta
        return 1.0 / (torch.tensor(self.short_factor, dtype=torch.float32) * spread)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary settings. `share`: of a head's dimensions, the first of which are rotated."""

    theta: float
    scaling: RopeScaling | None = None
    share: float = 1.0

    def size(self, head_dim: int) -> int:
        """Dimensions that are rotated."""
        return int(head_dim * self.share)

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position, [size/2] float32."""
        size = self.size(head_dim)
        spread = self.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        return 1.0 / spread if self.scaling is None else self.scaling.frequencies(spread, self.theta)

    @property
    def amplitude(self) -> float:
        """Multiplier of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    @property
    def most_positions(self) -> float:
        """Positions that it is right for."""
        is_long = isinstance(self.scaling, LongRopeScaling)
        return self.scaling.original_max_position_embeddings if is_long else math.inf  # type: ignore[union-attr]

    def as_json(self) -> dict[str, Any]:
        """Return it as `rope_parameters` say it."""
        scaling = {"rope_type": "default"}
        if self.scaling is not None:
            scaling = {"rope_type": self.scaling.kind, **asdict(self.scaling)}
        return {**scaling, "rope_theta": self.theta}


class Rotary(nn.Module):
    """Rotation in the rotate-half convention: i turns with i + size/2."""

    table: Tensor  # [P, 2, size/2] float32; cosines, sines

    def __init__(self, rope: Rope, head_dim: int, num_positions: int, *, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, rope.frequencies(head_dim))  # [P, size/2]
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
    rope: object = file.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: `{field}` is {brief(rope)}, no object; take the file from its source.")
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
    rope = Rope(given.number("rope_theta", theta), share=share)
    if not 0 < rope.size(head_dim) <= head_dim or rope.size(head_dim) % 2:
        raise UnsupportedModel(
            f"config.json: `head_dim` is {head_dim}, of which {rope.size(head_dim)} dimensions are rotated: pairs "
            f"need an even number; {FIX}."
        )
    if kind == "default":
        return rope
    positions = file.size("max_position_embeddings")
    return Rope(rope.theta, _SCALINGS[kind](given, positions, rope.size(head_dim) // 2), share)


def ropes_by_type(
    file: ConfigFile, thetas: Mapping[str, tuple[str, float]], head_dim: int | None = None
) -> dict[str, Rope]:
    """Read the rotary settings of each type of layers; `rope_scaling` is of full attention.

    Args:
        file: a config.json.
        thetas: by type, the field that has theta where its settings do not, and the default.
        head_dim: of the model; None = as its family has it.

    Raises:
        ConfigError, UnsupportedModel: as of `rope_of`.
    """
    head_dim = head_dim or file.size("head_dim", file.size("hidden_size") // file.heads)
    given, scaling = file.get("rope_parameters") or {}, file.get("rope_scaling") or {}
    for field, settings in (("rope_parameters", given), ("rope_scaling", scaling)):
        if not isinstance(settings, Mapping):
            raise ConfigError(f"config.json: `{field}` is {brief(settings)}, no object; take the file from its source.")
    ropes = {}
    for layer_type, (field, default) in thetas.items():
        settings = {**(given.get(layer_type) or {}), **(scaling if layer_type == FULL else {})}
        theta = ConfigFile({"rope_theta": file.get(field, default)}).number("rope_theta")
        settings.pop("truncate", None)  # transformers looks for it beside, where it is not
        ropes[layer_type] = rope_of(settings, file, head_dim, theta=theta)
    return ropes


def _read_llama3(given: ConfigFile, positions: int, num_frequencies: int) -> Llama3Scaling:
    del num_frequencies
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if low > high:
        raise ConfigError(
            f"config.json: `low_freq_factor` is {low}, above `high_freq_factor`, {high}; take the file from its source."
        )
    return Llama3Scaling(given.number("factor"), low, high, _original(given, positions))


def _read_yarn(given: ConfigFile, positions: int, num_frequencies: int) -> YarnScaling:
    del num_frequencies
    original = _original(given, positions)
    factor = given.number_or_null("factor") or positions / original
    mscale, all_dim = given.number_or_null("mscale"), given.number_or_null("mscale_all_dim")
    usual = _yarn_magnitude(factor, 1.0)
    if mscale and all_dim:
        usual = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=given.number_or_null("attention_factor") or usual,
        beta_fast=given.number_or_null("beta_fast") or 32.0,
        beta_slow=given.number_or_null("beta_slow") or 1.0,
        truncate=given.flag("truncate", True),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _read_longrope(given: ConfigFile, positions: int, num_frequencies: int) -> LongRopeScaling:
    original = _original(given, positions)
    factor = given.number_or_null("factor") or positions / original
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = given.number_or_null("attention_factor") or usual
    return LongRopeScaling(given.numbers("short_factor", num_frequencies), original, attention_factor)


def _original(given: ConfigFile, positions: int) -> int:
    """The positions before scaling; null is wrong."""
    return ConfigFile({_ORIGINAL: given.get(_ORIGINAL, positions)}).size(_ORIGINAL)


_SCALINGS: Mapping[str, Callable[[ConfigFile, int, int], RopeScaling]] = MappingProxyType(
    {
        "linear": lambda given, *_: LinearScaling(given.number("factor")),
        "llama3": _read_llama3,
        "yarn": _read_yarn,
        "longrope": _read_longrope,
    }
)
