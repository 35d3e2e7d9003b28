"""Qwen2 and Qwen2.5: biases on query, key and value; windows in layers where `use_sliding_window` says so."""

from speculative.model.config import ModelConfig, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile

MODEL_TYPE = "qwen2"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    return with_windows(ModelConfig.of_family(file, qkv_bias=True, num_kv_heads=file.kv_heads(32)), file)


def with_windows(model: ModelConfig, file: ConfigFile) -> ModelConfig:
    """The model with the windows of its config.json."""
    slides, behind = file.flag("use_sliding_window"), file.size("max_window_layers", 28, least=0)
    if not slides:
        file = ConfigFile({**file.content, "sliding_window": None}, file.known)
    usual = SLIDING if file.get("sliding_window", 4096) is not None else FULL
    types = file.layer_types([usual if layer >= behind else FULL for layer in range(model.num_layers)], SLIDING)
    return windowed(model, types, file.window(4096, types))
