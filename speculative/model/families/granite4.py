"""Granite 4 without experts and Mamba layers: Granite 3 whose rotation config.json may leave out."""

from speculative.model.config import LayerKind, ModelConfig, TensorNames
from speculative.model.config_file import ConfigFile
from speculative.model.families.granite import of_granite

MODEL_TYPE = "granitemoehybrid"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    file.choice("num_local_experts", 8, 0)
    file.layer_types(["linear_attention"] * file.size("num_hidden_layers"))
    names = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    size = file.size("shared_intermediate_size", 1024)
    model = of_granite(file, intermediate_size=size, names=names)
    if file.choice("position_embedding_type", None, "rope", "nope", None) == "rope":
        return model
    return model.with_kinds(LayerKind(None, kind.scores) for kind in model.layer_kinds)
