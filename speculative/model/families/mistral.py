"""Mistral: Llama without biases, and with a window in all layers unless config.json says null."""

from speculative.model.config import ModelConfig, windowed
from speculative.model.config_file import SLIDING, ConfigFile

MODEL_TYPE = "mistral"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    model = ModelConfig.of_family(file, num_kv_heads=file.stated_size("num_key_value_heads", 8))
    return windowed(model, [SLIDING] * model.num_layers, file.window(4096))
