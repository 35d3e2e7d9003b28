"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotation is not scaled."""

from speculative.model.config import ModelConfig, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile
from speculative.model.families import olmo2
from speculative.model.rotary import ropes_by_type

MODEL_TYPE = "olmo3"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    ropes = ropes_by_type(file, {FULL: ("rope_theta", 500000.0), SLIDING: ("", 500000.0)}, file.head_dim)
    model = olmo2.read(file, rope=ropes[FULL])
    usual = [SLIDING if (layer + 1) % 4 else FULL for layer in range(model.num_layers)]
    types = file.layer_types(usual, SLIDING)
    return windowed(model, types, file.window(4096, types), ropes)
