"""Phi-3 and Phi-4-mini: one tensor of query, key and value, and one of gate and up; LongRoPE of a part of a head."""

from speculative.model.config import ModelConfig, TensorNames, windowed
from speculative.model.config_file import SLIDING, ConfigFile
from speculative.model.rotary import rope_of, rope_settings

MODEL_TYPE = "phi3"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    settings = dict(rope_settings(file))
    settings["original_max_position_embeddings"] = file.size("original_max_position_embeddings", 4096)
    settings.setdefault("partial_rotary_factor", file.get("partial_rotary_factor", 1.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    settings["rope_type"] = "longrope" if kind in ("su", "yarn") else kind  # its former names
    rope = rope_of(settings, file, file.head_dim, in_part=True)
    names = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    model = ModelConfig.of_family(file, rope=rope, eps=1e-5, names=names)
    return windowed(model, [SLIDING] * model.num_layers, file.window(None))
