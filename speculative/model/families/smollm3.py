"""SmolLM3: Llama with layers that are not rotated, every fourth unless config.json says which."""

from dataclasses import replace

from speculative.errors import ConfigError
from speculative.model.config import ModelConfig, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile

MODEL_TYPE = "smollm3"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    bias = file.flag("attention_bias")
    model = ModelConfig.of_family(
        file,
        theta=2000000.0,
        tied=True,
        num_kv_heads=file.kv_heads(4),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=file.flag("mlp_bias"),
    )
    interval, rotated = file.size("no_rope_layer_interval", 4), file.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(model.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < model.num_layers:  # 1 = rotated, whatever its name says
        raise ConfigError("config.json: `no_rope_layers` must name every layer; take the file from its source.")
    rotated = rotated[: model.num_layers]
    slides = file.flag("use_sliding_window") and file.get("sliding_window") is not None
    types = file.layer_types([FULL if one or not slides else SLIDING for one in rotated], SLIDING)
    model = windowed(model, types, file.window(None, types))
    return model.with_kinds(
        replace(kind, rope=kind.rope if one else None) for kind, one in zip(model.layer_kinds, rotated, strict=True)
    )
