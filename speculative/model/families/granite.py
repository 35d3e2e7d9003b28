"""Granite 3: Llama with multipliers of embeddings, residuals, scores and logits."""

from typing import Any

from speculative.model.config import Form, ModelConfig, ScoreRule
from speculative.model.config_file import ConfigFile

MODEL_TYPE = "granite"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    return of_granite(file, mlp_bias=file.flag("mlp_bias"))


def of_granite(file: ConfigFile, **own: Any) -> ModelConfig:
    """Read what Granite 3 and 4 have in common."""
    bias = file.flag("attention_bias")
    form = Form(
        embedding_multiplier=file.number("embedding_multiplier", 1.0),
        residual_multiplier=file.number("residual_multiplier", 1.0),
        logit_multiplier=1 / file.number("logits_scaling", 1.0),
    )
    scores = ScoreRule(scale=file.number("attention_multiplier", 1.0))
    return ModelConfig.of_family(file, qkv_bias=bias, o_bias=bias, form=form, scores=scores, **own)
