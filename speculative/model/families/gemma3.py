"""Gemma 3 (text): Gemma 2 with norms of query and key heads instead of capped scores, and two rotations."""

from speculative.model.config import ModelConfig, ScoreRule, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile
from speculative.model.families import gemma2
from speculative.model.rotary import ropes_by_type

MODEL_TYPE = "gemma3_text"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    bias, head_dim = file.flag("attention_bias"), file.stated_size("head_dim", 256)
    ropes = ropes_by_type(file, {FULL: ("rope_theta", 1000000.0), SLIDING: ("rope_local_base_freq", 10000.0)}, head_dim)
    model = ModelConfig.of_family(
        file,
        rope=ropes[FULL],
        tied=True,
        head_dim=head_dim,
        num_kv_heads=file.stated_size("num_key_value_heads", 4),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        form=gemma2.form(file, file.number_or_null("final_logit_softcapping")),
        names=gemma2.NAMES,
        scores=ScoreRule(scale=file.number("query_pre_attn_scalar", 256) ** -0.5),
    )
    period = file.size("sliding_window_pattern", 6)
    types = file.layer_types([SLIDING if (layer + 1) % period else FULL for layer in range(model.num_layers)], SLIDING)
    return windowed(model, types, file.window(4096, types), ropes)
