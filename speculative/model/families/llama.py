"""Llama, SmolLM and many others: the shape that all families are compared with."""

from speculative.model.config import ModelConfig
from speculative.model.config_file import ConfigFile

MODEL_TYPE = "llama"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    bias = file.flag("attention_bias")
    return ModelConfig.of_family(file, qkv_bias=bias, o_bias=bias, mlp_bias=file.flag("mlp_bias"))
