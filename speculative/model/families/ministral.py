"""Ministral: Mistral whose windows are of some layers."""

from speculative.model.config import ModelConfig, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile

MODEL_TYPE = "ministral"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    model = ModelConfig.of_family(file, num_kv_heads=file.stated_size("num_key_value_heads", 8))
    usual = FULL if file.get("sliding_window", 4096) is None else SLIDING
    types = file.layer_types([usual] * model.num_layers, SLIDING)
    return windowed(model, types, file.window(4096, types))
