"""A config.json, which remembers what was read of it: what else would change the numbers is refused by name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.end_tokens import Json
from speculative.weight_formats import FORMATS, format_stated

FIX = "serve this model with `engine.kind: vllm`"
FULL, SLIDING = "full_attention", "sliding_attention"
_OLD_NAMES = {"attention": FULL}

# Fields that change what is computed, and the values that leave it as it is. A missing field is neutral.
_NEUTRAL_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", "swish")),
    ("compression_config", (None,)),
    ("partial_rotary_factor", (None, 1)),
    ("num_experts", (None, 0)),
    ("num_local_experts", (None, 0)),
    ("n_routed_experts", (None, 0)),
    ("is_encoder_decoder", (None, False)),
    ("is_causal", (True,)),
    ("use_bidirectional_attention", (None, False)),
    ("add_cross_attention", (None, False)),
    ("attn_logit_softcapping", (None,)),
    ("final_logit_softcapping", (None,)),
    ("query_pre_attn_scalar", (None,)),
    ("attention_multiplier", (None,)),
    ("embedding_multiplier", (None, 1)),
    ("residual_multiplier", (None, 1)),
    ("logits_scaling", (None, 1)),
    ("lm_head_bias", (None, False)),
    ("no_rope_layers", (None, [])),
    ("per_layer_config", (None, {})),
    ("vision_config", (None,)),
    ("audio_config", (None,)),
    ("text_config", (None,)),
)


class ConfigFile:
    """The content of a config.json, or of an object in it. A family reads the fields that its class in transformers
    knows, with that class's defaults.

    Every method raises ConfigError where a field is wrong.
    """

    def __init__(self, content: Json, known: set[str] | None = None) -> None:
        self.content = content
        self.known: set[str] = set() if known is None else known  # fields that the model's class knows

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.size("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Numbers of a head: the heads' share of the hidden size where the file is silent."""
        return self.size("head_dim", self.size("hidden_size") // self.heads)

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it stands there."""
        self.known.add(name)
        return self.content.get(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """A field that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that is a number above 0."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise _wrong(name, "a number above 0", value)
        return float(value)

    def number_or_null(self, name: str, default: float | None = None) -> float | None:
        """The same, or null."""
        return None if self.get(name, default) is None else self.number(name, default)

    def choice(self, name: str, default: Any, *known: Any) -> Any:
        """A field of these values.

        Raises:
            UnsupportedModel: it is another one.
        """
        value = self.get(name, default)
        if value not in known:
            raise UnsupportedModel(f"config.json: `{name}` is {brief(value)}, unknown here; {FIX}.")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A field that is a list of so many numbers above 0."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise _wrong(name, f"a list of {count} numbers", values)
        return tuple(ConfigFile({name: value}).number(name) for value in values)

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A field that is an integer; null stands for the default."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(name, f"an integer of at least {least}", value)
        return value

    def stated_size(self, name: str, default: int) -> int:
        """The same, but null is wrong: it could be as many as something else, too."""
        return self.size(name, default if self.get(name, default) is not None else None)

    def kv_heads(self, default: int) -> int:
        """Heads of keys: as many as of queries where the file says null, and the default where it is silent."""
        return self.size("num_key_value_heads", self.heads if "num_key_value_heads" in self.content else default)

    def section(self, name: str) -> Json:
        """A field that is an object; empty where it says nothing."""
        section = self.get(name) or {}
        if not isinstance(section, Mapping):
            raise ConfigError(f"config.json: `{name}` is {brief(section)}, no object; take the file from its source.")
        return section

    def layer_types(self, default: Sequence[str], *known: str) -> list[str]:
        """The kind of each layer.

        Args:
            default: those of a file that is silent.
            known: kinds beside full attention.

        Raises:
            UnsupportedModel: there is a kind that is not known.
        """
        kinds = self.get("layer_types")
        kinds = list(default) if kinds is None else kinds
        names = [_OLD_NAMES.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else None
        if names is None or any(name not in (FULL, *known) for name in names):
            raise UnsupportedModel(f"config.json: `layer_types` has {brief(kinds)}, unknown here; {FIX}.")
        num_layers = self.size("num_hidden_layers")
        if len(names) != num_layers:
            raise ConfigError(
                f"config.json: `layer_types` names {len(names)} layers, and `num_hidden_layers` is {num_layers}; "
                "take the file from its source."
            )
        return names

    def window(self, default: int | None, types: Sequence[str] = ()) -> int | None:
        """Positions that a row of a sliding layer sees, itself among them; None = all that the model has."""
        if self.get("sliding_window", default) is None:
            if SLIDING in types:
                raise ConfigError(
                    "config.json: `layer_types` has layers with a window, and `sliding_window` is null or not in use; "
                    "take the file from its source."
                )
            return None
        window = self.size("sliding_window", default)
        return window if window < self.size("max_position_embeddings") else None

    def refuse_unknown(self) -> None:
        """Refuse what was not read and would change the numbers.

        Raises:
            UnsupportedModel: there is such a field.
        """
        for name, neutral in _NEUTRAL_VALUES:
            if name not in self.known and name in self.content and self.content[name] not in neutral:
                raise UnsupportedModel(f"config.json: `{name}` is {brief(self.content[name])}, unknown here; {FIX}.")
        if "layer_types" not in self.known:
            self.layer_types([FULL] * self.size("num_hidden_layers"))
        quantization = self.content.get("quantization_config")
        if quantization is not None and format_stated(quantization) is None:
            known = ", ".join(one.scheme for one in FORMATS.values() if one.scheme)
            by = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise UnsupportedModel(
                f"config.json: the weights are quantized by {by or 'an unknown method'} (`quantization_config`: "
                f"{brief(quantization)}), and our engine reads {known} alone; take the checkpoint that this one was "
                f"made of, or {FIX}."
            )


def brief(value: object) -> str:
    """Return a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wrong(name: str, wanted: str, value: object) -> ConfigError:
    return ConfigError(
        f"config.json: `{name}` must be {wanted}, got {brief(value)}; correct it, or take the file from its source."
    )
