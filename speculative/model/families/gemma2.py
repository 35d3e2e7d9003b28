"""Gemma 2: norms before and behind, of weights 1 + w; capped scores and logits; a window in every other layer."""

from typing import Any

from speculative.model.config import Form, ModelConfig, ScoreRule, TensorNames, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile

MODEL_TYPE = "gemma2"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    cap = file.number_or_null("attn_logit_softcapping", 50.0)
    model = of_gemma(file, cap=cap, logit_cap=file.number_or_null("final_logit_softcapping", 30.0))
    types = file.layer_types([FULL if layer % 2 else SLIDING for layer in range(model.num_layers)], SLIDING)
    return windowed(model, types, file.window(4096, types))


def of_gemma(file: ConfigFile, *, cap: float | None, logit_cap: float | None, **own: Any) -> ModelConfig:
    """Read what Gemma 2 and 3 have in common; `cap`: of scores."""
    file.get("hidden_act")  # which its class knows nothing of
    file.choice("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    bias = file.flag("attention_bias")
    return ModelConfig.of_family(
        file,
        tied=True,
        head_dim=head_dim(file),
        num_kv_heads=file.stated_size("num_key_value_heads", 4),
        qkv_bias=bias,
        o_bias=bias,
        form=Form(
            norms="both",
            norm_adds_one=True,
            gate="gelu_tanh",
            embedding_multiplier=file.size("hidden_size") ** 0.5,
            logit_cap=logit_cap,
        ),
        names=TensorNames(
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        ),
        scores=ScoreRule(cap=cap, scale=file.number("query_pre_attn_scalar", 256) ** -0.5),
        **own,
    )


def head_dim(file: ConfigFile) -> int:
    """Numbers of a head."""
    return file.stated_size("head_dim", 256)
