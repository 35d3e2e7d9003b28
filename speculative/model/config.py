"""A checkpoint's config.json in the terms of this engine, which refuses settings that it does not know."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from speculative.cache.kv_cache import KVShape
from speculative.end_tokens import Json, end_tokens, read_if_there, read_json, stated_ids
from speculative.errors import ConfigError, UnsupportedModel

_FIX = "serve this model with `engine.kind: vllm`"


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """The stretching of rotary wavelengths by Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder of the Llama family.

    Biases: `qkv_bias` stands on the query, key and value projections, `o_bias` on the attention's output, `mlp_bias` on
    all three of the MLP. `qk_norm` is Qwen3's RMSNorm of every query and key head.
    """

    architecture: str  # the class name in transformers
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_shape(self) -> KVShape:
        """Shape of its cache."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim)

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json, and the end tokens that it and the other files name (`end_tokens`).

        Raises:
            ConfigError: config.json is missing, damaged or contradicts itself.
            UnsupportedModel: the model needs something this engine does not do.
        """
        config = read_json(folder / "config.json")
        model, generation = _from_json(config), read_if_there(folder / "generation_config.json")
        begins = stated_ids(generation, "bos_token_id", str(folder / "generation_config.json"))
        begin = next(iter(begins), model.bos_token_id)
        return replace(model, bos_token_id=begin, eos_token_ids=tuple(end_tokens(folder)))

    @classmethod
    def from_json(cls, config: Json) -> "ModelConfig":
        """Read the content of a config.json; raises what `from_folder` raises."""
        return _from_json(config)


@dataclass(frozen=True, slots=True)
class _Family:
    """Values that transformers hard-codes or assumes for an architecture when config.json is silent."""

    model_type: str
    num_kv_heads: int | None = None  # None = as many as heads
    null_kv_heads: bool = True  # whether null is as many as heads, too
    qkv_bias: bool | None = False  # None = config.json's attention_bias decides
    o_bias: bool | None = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None = hidden_size / num_heads
    sliding_window: int | None = None  # None = the class knows no window, whatever config.json says
    chooses_layers: bool = False  # it counts with use_sliding_window, in layer_types or behind max_window_layers


_FAMILIES = MappingProxyType(
    {
        "LlamaForCausalLM": _Family("llama", qkv_bias=None, o_bias=None, reads_mlp_bias=True),
        "MistralForCausalLM": _Family("mistral", num_kv_heads=8, null_kv_heads=False, sliding_window=4096),
        "Qwen2ForCausalLM": _Family("qwen2", num_kv_heads=32, qkv_bias=True, sliding_window=4096, chooses_layers=True),
        "Qwen3ForCausalLM": _Family(
            "qwen3",
            num_kv_heads=32,
            qkv_bias=None,
            o_bias=None,
            qk_norm=True,
            head_dim=128,
            sliding_window=4096,
            chooses_layers=True,
        ),
    }
)

_ORIGINAL = "original_max_position_embeddings"
_FULL_ATTENTION = ("full_attention", "attention")  # the second as of old

# Fields that change what is computed, and the values that leave it as it is here. A missing field is neutral.
_NEUTRAL_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", "swish")),
    ("compression_config", (None,)),
    ("partial_rotary_factor", (None, 1)),
    ("num_experts", (None, 0)),
    ("num_local_experts", (None, 0)),
    ("n_routed_experts", (None, 0)),
    ("is_encoder_decoder", (None, False)),
    ("is_causal", (True,)),
    ("add_cross_attention", (None, False)),
    ("attn_logit_softcapping", (None,)),
    ("final_logit_softcapping", (None,)),
    ("query_pre_attn_scalar", (None,)),
    ("attention_multiplier", (None,)),
    ("embedding_multiplier", (None, 1)),
    ("residual_multiplier", (None, 1)),
    ("logits_scaling", (None, 1)),
    ("no_rope_layers", (None, [])),
    ("per_layer_config", (None, {})),
    ("vision_config", (None,)),
    ("audio_config", (None,)),
    ("text_config", (None,)),
)


def _from_json(config: Json) -> ModelConfig:
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_unknown(config)
    _refuse_sliding_window(config, family)
    positions, rope = _size(config, "max_position_embeddings"), _rope_parameters(config)
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    attention_bias = flag(config, "attention_bias")
    model = ModelConfig(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, family, num_heads),
        head_dim=_head_dim(config, family, hidden_size // num_heads),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", 10000.0),
        max_position_embeddings=positions,
        rope_scaling=_rope_scaling(rope, positions),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.reads_mlp_bias and flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(stated_ids(config, "bos_token_id", "config.json")), None),
        eos_token_ids=stated_ids(config, "eos_token_id", "config.json"),
    )
    _check_shape(model)
    return model


def _architecture(config: Json) -> str:
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _FAMILIES:
        found = _brief(architectures) if architectures else f"none (model_type {model_type!r})"
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(f"config.json: `architectures` is {found}; this engine runs {known}. Or {_FIX}.")
    own = _FAMILIES[architectures[0]].model_type
    if model_type not in (None, own):
        raise UnsupportedModel(
            f"config.json: `architectures` is {architectures[0]}, whose `model_type` is {own!r}, and `model_type` is "
            f"{model_type!r}; correct the one that is wrong, or {_FIX}."
        )
    return str(architectures[0])


def _refuse_unknown(config: Json) -> None:
    for name, neutral in _NEUTRAL_VALUES:
        if name in config and config[name] not in neutral:
            raise UnsupportedModel(f"config.json: `{name}` is {_brief(config[name])}, unknown here; {_FIX}.")
    quantization = config.get("quantization_config")
    if quantization is not None and not _is_fp8_dynamic(quantization):
        raise UnsupportedModel(
            f"config.json: `quantization_config` is {_brief(quantization)}, and only compressed-tensors' FP8_DYNAMIC "
            f"is known here; take the checkpoint that it was made of, or {_FIX}."
        )


def _is_fp8_dynamic(quantization: object) -> bool:
    """FP8 weights with a scale for each output, activations scaled by row as they come, all but the LM head."""
    if not isinstance(quantization, Mapping):
        return False
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


def _refuse_sliding_window(config: Json, family: _Family) -> None:
    """A window as long as the model's context never hides anything and is let pass."""
    layer_types, num_layers = config.get("layer_types"), _size(config, "num_hidden_layers")
    if not isinstance(layer_types or [], list) or any(kind not in _FULL_ATTENTION for kind in layer_types or ()):
        raise UnsupportedModel(f"config.json: `layer_types` has {_brief(layer_types)}, unknown here; {_FIX}.")
    if family.sliding_window is None:
        return
    if family.chooses_layers:
        if layer_types is not None and len(layer_types) != num_layers:
            raise ConfigError(
                f"config.json: `layer_types` names {len(layer_types)} layers, and `num_hidden_layers` is {num_layers}; "
                "take the file from its source."
            )
        behind = _size(config, "max_window_layers", 28, least=0)
        if not flag(config, "use_sliding_window") or layer_types is not None or behind >= num_layers:
            return
    if config.get("sliding_window", family.sliding_window) is None:
        return
    window = _size(config, "sliding_window", family.sliding_window)
    if window < _size(config, "max_position_embeddings"):
        raise UnsupportedModel(
            f"config.json: `sliding_window` is {window} and in use, unknown here; {_FIX}, "
            "or set it to null and keep `max_model_len` within the window."
        )


def _rope_parameters(config: Json) -> Json:
    """The rotary settings, read as transformers 5 reads them.

    `rope_scaling`, if it says anything, stands in for the whole of `rope_parameters`. A `rope_theta` beside either
    counts where it has none of its own; an `original_max_position_embeddings` beside it comes before its own.
    """
    rope: object = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        raise ConfigError(f"config.json: `{field}` is {_brief(rope)}, no object; take the file from its source.")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModel(f"config.json: `rope_parameters` differ between layers, unknown here; {_FIX}.")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(
            f"config.json: `partial_rotary_factor` is {rope['partial_rotary_factor']}, unknown here; {_FIX}."
        )
    theta, original = ({name: config[name]} if name in config else {} for name in ("rope_theta", _ORIGINAL))
    return {**theta, **rope, **original}


def _rope_scaling(rope: Json, positions: int) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"config.json: `rope_type` is {kind!r}, this engine knows default and llama3; {_FIX}.")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low > high:
        raise ConfigError(
            f"config.json: `low_freq_factor` is {low}, above `high_freq_factor`, {high}; take the file from its source."
        )
    return Llama3RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_size({_ORIGINAL: positions, **rope}, _ORIGINAL),
    )


def _check_shape(model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads != 0:
        raise ConfigError(
            f"config.json: `num_attention_heads` ({model.num_heads}) is no multiple of "
            f"`num_key_value_heads` ({model.num_kv_heads}); take the file from its source."
        )
    if model.head_dim % 2 != 0:
        raise UnsupportedModel(f"config.json: `head_dim` is {model.head_dim}, rotary pairs need an even one; {_FIX}.")


def _num_kv_heads(config: Json, family: _Family, num_heads: int) -> int:
    is_null = config.get("num_key_value_heads", 0) is None
    as_heads = family.null_kv_heads if is_null else family.num_kv_heads is None
    return _size(config, "num_key_value_heads", num_heads if as_heads else None if is_null else family.num_kv_heads)


def _head_dim(config: Json, family: _Family, otherwise: int) -> int:
    is_null = config.get("head_dim", 0) is None  # where a family has a size of its own, null could mean either
    return _size(config, "head_dim", None if is_null and family.head_dim else family.head_dim or otherwise)


def flag(config: Json, name: str, default: bool = False) -> bool:
    """A field of a config.json that is true or false.

    Raises:
        ConfigError: it is neither.
    """
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(
            f"config.json: `{name}` must be true or false, got {value!r}; correct it, or take the file from its source."
        )
    return value


def _number(config: Json, name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(
            f"config.json: `{name}` must be a number above 0, got {value!r}; correct it, or take the file from its "
            "source."
        )
    return float(value)


def _size(config: Json, name: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"config.json: `{name}` must be an integer of at least {least}, got {value!r}; correct it, or take the "
            "file from its source."
        )
    return value


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
