"""A decoder's layers in one call of our CPU kernels, with nothing of torch between them."""

from typing import cast

from torch import Tensor, nn

from speculative.kernels.bindings import LayerStruct, ShapeStruct
from speculative.model.attention import NativeStep
from speculative.model.config import ModelConfig
from speculative.model.cpu.native import NativeLinear, NativeNorm
from speculative.model.layers import DecoderLayer
from speculative.model.rotary import Rotary


class FusedLayers:
    """All layers of a decoder whose weights are packed for our kernels. The modules own the memory it points at."""

    def __init__(self, layers: nn.ModuleList, rotary: Rotary, config: ModelConfig) -> None:
        self._structs = (LayerStruct * len(layers))(*(_struct(layer) for layer in layers))
        self._rotary = rotary.table.float().contiguous()
        self._config = config
        self._keep = layers

    @classmethod
    def of(cls, layers: nn.ModuleList, rotary: Rotary, config: ModelConfig) -> "FusedLayers | None":
        """None where the layers are not packed for our kernels, or not of Llama's shape."""
        packed = all(isinstance(linear, NativeLinear) for layer in layers for linear in _linears(layer))
        fits = config.has_llama_shape and config.head_dim % 16 == 0
        return cls(layers, rotary, config) if packed and fits else None

    @property
    def addresses(self) -> bytes:
        """Return where the weights lie that it computes with."""
        return bytes(self._structs)

    def reads(self, layers: nn.ModuleList) -> bool:
        """Return whether it computes with the weights of these layers."""
        return self.addresses == b"".join(bytes(_struct(layer)) for layer in layers)

    def run(
        self, hidden: Tensor, positions: Tensor, step: NativeStep, capture: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """hidden [N, hidden_size] float32 (written to), positions [N] -> hidden after the last layer, and what enters
        the layers of `capture`.
        """
        struct, shape = step.struct, step.shape
        struct.positions = positions.data_ptr()
        fill_shape(shape, self._config, self._rotary)
        captures = sorted({layer for layer in capture if layer < len(self._structs)})
        features = step.kernels.layers(self._structs, shape, struct, step.cache, hidden, captures)
        return hidden, [features] if captures else []


def fill_shape(shape: ShapeStruct, config: ModelConfig, rotary: Tensor) -> None:
    """Fill in the facts of a model that the kernels need beside its cache."""
    shape.hidden_size, shape.intermediate_size = config.hidden_size, config.intermediate_size
    shape.num_heads, shape.eps, shape.rotary = config.num_heads, config.rms_norm_eps, rotary.data_ptr()


def _linears(layer: nn.Module) -> tuple[nn.Module, ...]:
    assert isinstance(layer, DecoderLayer)
    return (layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)


def _struct(layer: nn.Module) -> LayerStruct:
    assert isinstance(layer, DecoderLayer)
    input_norm, mlp_norm = cast("NativeNorm", layer.input_norm), cast("NativeNorm", layer.mlp_norm)
    head_norm = layer.attention.qk_norm
    qkv, output, gate_up, down = (linear.struct for linear in _linears(layer))
    return LayerStruct(
        input_norm=input_norm.weight.data_ptr(),
        mlp_norm=mlp_norm.weight.data_ptr(),
        head_norm=None if head_norm is None else head_norm.weight.data_ptr(),
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        scores=layer.attention.scores.numbers,
    )
