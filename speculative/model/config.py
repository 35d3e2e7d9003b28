"""What a checkpoint's config.json says, in the terms of this engine. What the engine does not know is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from speculative.cache.kv_cache import KVShape
from speculative.end_tokens import Json, end_tokens, read_if_there, read_json, stated_ids
from speculative.errors import ConfigError, UnsupportedModel

_FIX = "serve this model with `engine: vllm`"


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """How Llama 3.1 and later stretch their rotary wavelengths."""

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
        """Of its cache."""
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
    """What transformers hard-codes or assumes for an architecture when config.json is silent."""

    qkv_bias: bool | None = False  # None = config.json's attention_bias decides
    o_bias: bool | None = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None = hidden_size / num_heads
    sliding_window: int | None = None
    asks_use_sliding_window: bool = False  # the window counts only with use_sliding_window


_FAMILIES = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(qkv_bias=None, o_bias=None, reads_mlp_bias=True),
        "MistralForCausalLM": _Family(sliding_window=4096),
        "Qwen2ForCausalLM": _Family(qkv_bias=True, asks_use_sliding_window=True),
        "Qwen3ForCausalLM": _Family(
            qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, asks_use_sliding_window=True
        ),
    }
)

# Fields that change what is computed, and the values that leave it as it is here. A missing field is neutral.
_NEUTRAL_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", "swish")),
    ("compression_config", (None,)),
    ("partial_rotary_factor", (None, 1)),
    ("num_experts", (None, 0)),
    ("num_local_experts", (None, 0)),
    ("n_routed_experts", (None, 0)),
    ("is_encoder_decoder", (None, False)),
    ("add_cross_attention", (None, False)),
    ("attn_logit_softcapping", (None,)),
    ("final_logit_softcapping", (None,)),
    ("query_pre_attn_scalar", (None,)),
    ("attention_multiplier", (None,)),
    ("embedding_multiplier", (None, 1)),
    ("residual_multiplier", (None, 1)),
    ("logits_scaling", (None, 1)),
    ("no_rope_layers", (None, [])),
    ("vision_config", (None,)),
    ("audio_config", (None,)),
    ("text_config", (None,)),
)


def _from_json(config: Json) -> ModelConfig:
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_unknown(config)
    _refuse_sliding_window(config, family)
    rope = _rope_parameters(config)
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    attention_bias = bool(config.get("attention_bias", False))
    model = ModelConfig(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", num_heads if architecture == "LlamaForCausalLM" else None),
        head_dim=_size(config, "head_dim", family.head_dim or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.reads_mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(stated_ids(config, "bos_token_id", "config.json")), None),
        eos_token_ids=stated_ids(config, "eos_token_id", "config.json"),
    )
    _check_shape(model)
    return model


def _architecture(config: Json) -> str:
    architectures = config.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in _FAMILIES:
        found = ", ".join(architectures) or f"none (model_type {config.get('model_type')!r})"
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(f"config.json: `architectures` is {found}; this engine runs {known}. Or {_FIX}.")
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


def holds_fp8(folder: Path) -> bool:
    """Whether a checkpoint that `ModelConfig` takes has FP8 weights."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("quantization_config") is not None


def _is_fp8_dynamic(quantization: Json) -> bool:
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


def _refuse_sliding_window(config: Json, family: _Family) -> None:
    """A window as long as the model's context never hides anything and is let pass."""
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UnsupportedModel(f"config.json: `layer_types` has {_brief(sorted(layer_types))}, unknown here; {_FIX}.")
    window = config.get("sliding_window", family.sliding_window)
    if not config.get("use_sliding_window", not family.asks_use_sliding_window):
        return
    if window is not None and window < _size(config, "max_position_embeddings"):
        raise UnsupportedModel(
            f"config.json: `sliding_window` is {window} and in use, unknown here; {_FIX}, "
            "or set it to null and keep `max_model_len` within the window."
        )


def _rope_parameters(config: Json) -> Json:
    """The rotary settings, from `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4)."""
    rope: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModel(f"config.json: `rope_parameters` differ between layers, unknown here; {_FIX}.")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel(
            f"config.json: `partial_rotary_factor` is {rope['partial_rotary_factor']}, unknown here; {_FIX}."
        )
    return rope


def _rope_scaling(rope: Json) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"config.json: `rope_type` is {kind!r}, this engine knows default and llama3; {_FIX}.")
    try:
        return Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise ConfigError(
            f"config.json: the llama3 rope settings lack {missing}; take the file from its source."
        ) from None


def _check_shape(model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads != 0:
        raise ConfigError(
            f"config.json: `num_attention_heads` ({model.num_heads}) is no multiple of "
            f"`num_key_value_heads` ({model.num_kv_heads}); take the file from its source."
        )
    if model.head_dim % 2 != 0:
        raise UnsupportedModel(f"config.json: `head_dim` is {model.head_dim}, rotary pairs need an even one; {_FIX}.")


def _size(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"config.json: `{name}` must be a positive integer, got {value!r}; take the file from its source."
        )
    return value


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
