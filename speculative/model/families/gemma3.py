"""Gemma 3 (text): Gemma 2 with norms of query and key heads instead of capped scores, and two rotations."""

from speculative.model.config import ModelConfig, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile
from speculative.model.families.gemma2 import head_dim, of_gemma
from speculative.model.rotary import ropes_by_type

MODEL_TYPE = "gemma3_text"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    thetas = {FULL: ("rope_theta", 1000000.0), SLIDING: ("rope_local_base_freq", 10000.0)}
    ropes = ropes_by_type(file, thetas, head_dim(file))
    logit_cap = file.number_or_null("final_logit_softcapping")
    model = of_gemma(file, cap=None, logit_cap=logit_cap, rope=ropes[FULL], qk_norm=True)
    period = file.size("sliding_window_pattern", 6)
    types = file.layer_types([SLIDING if (layer + 1) % period else FULL for layer in range(model.num_layers)], SLIDING)
    return windowed(model, types, file.window(4096, types), ropes)
