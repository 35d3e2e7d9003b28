"""Qwen3: norms of query and key heads; biases and windows where config.json says so."""

from speculative.model.config import ModelConfig
from speculative.model.config_file import ConfigFile
from speculative.model.families.qwen2 import with_windows

MODEL_TYPE = "qwen3"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    bias, head_dim = file.flag("attention_bias"), file.stated_size("head_dim", 128)
    model = ModelConfig.of_family(
        file, qk_norm=True, qkv_bias=bias, o_bias=bias, head_dim=head_dim, num_kv_heads=file.kv_heads(32)
    )
    return with_windows(model, file)
