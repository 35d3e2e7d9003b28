"""OLMo 2: norms behind attention and MLP instead of before, and norms of all heads of queries together, and of keys."""

from typing import Any

from speculative.model.config import Form, ModelConfig, TensorNames
from speculative.model.config_file import ConfigFile

MODEL_TYPE = "olmo2"


def read(file: ConfigFile, **own: Any) -> ModelConfig:
    """Read a config.json; `own` is what OLMo 3 has read by itself."""
    bias = file.flag("attention_bias")
    return ModelConfig.of_family(
        file,
        eps=1e-5,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        form=Form(norms="behind", wide_qk_norm=True),
        names=TensorNames(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
        **own,
    )
