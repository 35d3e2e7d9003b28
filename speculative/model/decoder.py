"""A dense decoder of the Llama family, for inference."""

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.kernels.chosen import ChosenKernels, choose_kernels
from speculative.model.attention import StepAttention
from speculative.model.config import ModelConfig
from speculative.model.cpu.fused import FusedLayers
from speculative.model.cpu.native import Kind, pack_natively
from speculative.model.layers import (
    Attend,
    DecoderLayer,
    Fp8Linear,
    FusibleLayer,
    Linear,
    RMSNorm,
    Rotary,
    nan_parameter,
)
from speculative.model.quantized import Quantized, as_quantized


class Decoder(FusibleLayer):
    """Token ids in, hidden states out; attention over the cache is the caller's.

    All parameters start as NaN; fill them through `checkpoint_slots`. `fp8`: the layers' matrices have FP8 weights.
    `kernels`: of all that computes with it; None = those for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        fp8: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ChosenKernels | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.kernels = choose_kernels(device) if kernels is None else kernels
        self.embedding = nan_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        layers = [DecoderLayer(config, fp8=fp8, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embedding
        self.rotary = Rotary(config, device=device)
        self.packed: Kind | None = None  # how our CPU kernels have the weights, where they have them
        self.fused: FusedLayers | None = None  # all layers at once, where they are packed for it

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [N, hidden_size], of N packed tokens.

        `input_ids` and `positions` are int64 [N]; `attend` is called once a layer, in order. Positions count from 0
        within a sequence and stay below `config.max_position_embeddings`.
        """
        return self.run(input_ids, positions, attend)[0]

    def run(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run the layers, and keep the features that a hidden-state drafter reads.

        Returns:
            hidden [N, hidden_size], and features [N, len(capture) * hidden_size]: the hidden states that enter the
            layers of `capture`, side by side.
        """
        hidden = functional.embedding(input_ids, self.embedding).to(self.dtype)
        if self.fused is not None and isinstance(attend, StepAttention) and attend.native is not None:
            hidden, features = self.fused.run(hidden, positions, attend.native, capture)
            hidden = self.norm(hidden)
        else:
            hidden, features = self._run_layers(hidden, positions, attend, capture)
        return hidden, torch.cat(features, dim=-1) if features else hidden[:, :0]

    def _run_layers(
        self, hidden: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """The hidden states [N, hidden_size] after the final norm, and what enters the layers of `capture`."""
        rotation = self.ops.rotation(self.rotary, positions, hidden)
        features = []
        layers = cast("list[DecoderLayer]", list(self.layers))
        normed = layers[0].input_norm(hidden)
        following = (*(layer.input_norm for layer in layers[1:]), self.norm)
        for index, (layer, norm) in enumerate(zip(layers, following, strict=True)):
            if index in capture:
                features.append(hidden)
            hidden, update = layer(hidden, normed, rotation, attend, index)
            hidden, normed = self.ops.add_norm(hidden, update, norm)
        assert isinstance(normed, Tensor), "the LM head has no FP8 weights"
        return normed, features

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32."""
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]

    def pack(self, kind: Kind, quantized: dict[str, Quantized]) -> None:
        """Lay the loaded weights out for our CPU kernels; from here on activations are float32.

        Args:
            kind: of the weights. Beside four-bit ones, the LM head's have eight bits, and what it reads 16.
            quantized: weights that are quantized already, by their names in the checkpoint; the rest is rounded. Each
                leaves it when it is packed.
        """
        lm_head, slots, kernels = self.lm_head, self.checkpoint_slots(), self.kernels.model
        names = self._linear_names(slots)
        assert kernels is not None, "`choose_weights` packs nothing without them"

        def weight_of(linear: Linear) -> Quantized | Kind:
            own = names.pop(linear)  # held no longer than needed
            if kind != "w4a8":
                return kind
            bits: Literal[4, 8] = 8 if linear is lm_head else 4
            rows = linear.weight.split([len(slots[name]) for name in own])
            parts = zip(own, rows, strict=True)
            return Quantized.stack([as_quantized(weight, bits, quantized.pop(name, None)) for name, weight in parts])

        pack_natively(self, kernels, weight_of)
        self.packed = kind
        self.dtype = torch.float32
        self.fused = FusedLayers.of(self.layers, self.rotary, self.config)

    def _linear_names(self, slots: Mapping[str, Tensor]) -> dict[Linear, list[str]]:
        """The checkpoint's tensors in the rows of each Linear, in order."""
        head = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        names = {self.lm_head: [head]}
        for module in self.layers.modules():
            if isinstance(module, Linear):
                own = module.weight.untyped_storage().data_ptr()
                names[module] = [name for name, slot in slots.items() if slot.untyped_storage().data_ptr() == own]
        return names

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Return where the tensors of a Hugging Face checkpoint go: name, and the view of a parameter to copy it
        into."""
        slots: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.lm_head.weight
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in layer_slots(layer).items()}
        return slots


def layer_slots(layer: DecoderLayer) -> dict[str, Tensor]:
    """Return where a layer's tensors go, by their names within the layer."""
    attention, mlp = layer.attention, layer.mlp
    norms = {}
    if attention.qk_norm is not None:  # the checkpoint has one row for all heads: copying broadcasts it
        query, key = attention.qk_norm.weight.split((attention.num_heads, attention.num_kv_heads))
        norms = {"self_attn.q_norm.weight": query, "self_attn.k_norm.weight": key}
    return {
        "input_layernorm.weight": layer.input_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        **_linear_slots(
            attention.qkv_proj, {f"self_attn.{x}_proj": n for x, n in zip("qkv", attention.sizes, strict=True)}
        ),
        **_linear_slots(attention.o_proj, {"self_attn.o_proj": attention.o_proj.weight.shape[0]}),
        **_linear_slots(mlp.gate_up_proj, {"mlp.gate_proj": mlp.size, "mlp.up_proj": mlp.size}),
        **_linear_slots(mlp.down_proj, {"mlp.down_proj": mlp.down_proj.weight.shape[0]}),
        **norms,
    }


def _linear_slots(linear: Linear | Fp8Linear, num_rows: dict[str, int]) -> dict[str, Tensor]:
    """The projections that share one weight, row block after row block."""
    names, sizes = list(num_rows), list(num_rows.values())
    return {
        f"{name}.{part}": rows
        for part, parameter in linear.named_parameters()
        for name, rows in zip(names, parameter.split(sizes), strict=True)
    }
