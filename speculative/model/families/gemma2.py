"""Gemma 2: norms before and behind, of weights 1 + w; capped scores and logits; a window in every other layer."""

from speculative.model.config import Form, ModelConfig, ScoreRule, TensorNames, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile

MODEL_TYPE = "gemma2"
NAMES = TensorNames(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    cap, scale = file.number_or_null("attn_logit_softcapping", 50.0), file.number("query_pre_attn_scalar", 256) ** -0.5
    bias = file.flag("attention_bias")
    model = ModelConfig.of_family(
        file,
        tied=True,
        head_dim=file.stated_size("head_dim", 256),
        num_kv_heads=file.stated_size("num_key_value_heads", 4),
        qkv_bias=bias,
        o_bias=bias,
        form=form(file, file.number_or_null("final_logit_softcapping", 30.0)),
        names=NAMES,
        scores=ScoreRule(cap=cap, scale=scale),
    )
    types = file.layer_types([FULL if layer % 2 else SLIDING for layer in range(model.num_layers)], SLIDING)
    return windowed(model, types, file.window(4096, types))


def form(file: ConfigFile, logit_cap: float | None) -> Form:
    """What Gemma 2 and 3 do otherwise than Llama."""
    file.get("hidden_act")  # which its class knows nothing of
    file.choice("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    return Form(
        norms="both",
        norm_adds_one=True,
        gate="gelu_tanh",
        embedding_multiplier=file.size("hidden_size") ** 0.5,
        logit_cap=logit_cap,
    )
