"""A dense decoder, for inference."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.kernels.chosen import ChosenKernels, choose_kernels
from speculative.model.attention import StepAttention
from speculative.model.config import ModelConfig, TensorNames
from speculative.model.cpu.fused import FusedLayers
from speculative.model.cpu.native import Packed, pack_natively
from speculative.model.formats import EMBEDDING, LM_HEAD, Format, stacked
from speculative.model.forms import own_files
from speculative.model.layers import (
    MLP,
    Attend,
    Attention,
    DecoderLayer,
    FusibleLayer,
    Linear,
    Matrix,
    Rotation,
    nan_parameter,
    norm_of,
)
from speculative.model.quantized import Quantized
from speculative.model.rotary import Rotary
from speculative.model.tensor_files import TensorFiles
from speculative.weight_formats import FORMATS


class Decoder(FusibleLayer):
    """Token ids in, hidden states out; attention over the cache is the caller's.

    All parameters start as NaN; fill them through `checkpoint_slots`. `weights`: the format of the layers'
    matrices; None = plain. `kernels`: of all that computes with it; None = those for the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        weights: Format | None = None,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ChosenKernels | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.kernels = choose_kernels(device) if kernels is None else kernels
        self.embedding = nan_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        kinds = config.layer_kinds
        self.weights = Format() if weights is None else weights
        linear = self.weights.linear
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, linear=linear, dtype=dtype, device=device) for kind in kinds
        )
        self.norm = norm_of(config, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embedding
        ropes = list(dict.fromkeys((config.rope, *(kind.rope for kind in kinds if kind.rope))))
        longest = config.max_position_embeddings
        self.rotaries = nn.ModuleList(Rotary(rope, longest, device=device) for rope in ropes)
        self._rotary_of = [ropes.index(kind.rope or config.rope) for kind in kinds]
        self.packed: str | None = None  # the format in which our CPU kernels have the weights, where they have them
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
        if self.config.form.embedding_multiplier != 1:
            hidden = hidden * torch.tensor(self.config.form.embedding_multiplier, dtype=self.dtype).item()  # rounded
        if self.fused is not None and isinstance(attend, StepAttention) and attend.native is not None:
            hidden, features = self.fused.run(hidden, positions, attend.native, capture)
            hidden = self.norm(hidden)
        else:
            rotations: list[Rotation] = [
                self.ops.rotation(cast("Rotary", rotary), positions, hidden) for rotary in self.rotaries
            ]
            features = []
            layers = cast("list[DecoderLayer]", list(self.layers))
            normed = layers[0].input_norm(hidden)
            following = (*(layer.input_norm for layer in layers[1:]), self.norm)
            for index, (layer, norm) in enumerate(zip(layers, following, strict=True)):
                if index in capture:
                    features.append(hidden)
                hidden, update = layer(hidden, normed, rotations[self._rotary_of[index]], attend, index)
                hidden, normed = self.ops.add_norm(hidden, update, norm)
            assert isinstance(normed, Tensor), "the LM head has no FP8 weights"
            hidden = normed
        return hidden, torch.cat(features, dim=-1) if features else hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32."""
        return self.project(hidden).float()

    def project(self, hidden: Tensor) -> Tensor:
        """The same, in the type of the LM head's products."""
        logits: Tensor = self.lm_head(hidden)
        form = self.config.form
        if form.logit_multiplier != 1:
            logits = logits * form.logit_multiplier
        if form.logit_cap is not None:
            logits = (logits.float() / form.logit_cap).tanh().mul(form.logit_cap).to(logits.dtype)
        return logits

    def pack(self, folder: Path) -> None:
        """Lay the loaded weights of a folder out for our CPU kernels; from here on activations are float32."""
        slots, kernels = self.checkpoint_slots(), self.kernels.model
        form, head = self.weights, EMBEDDING if self.config.tie_word_embeddings else LM_HEAD
        names = {self.lm_head: [head]}  # the checkpoint's tensors in the rows of each Linear, in order
        for module in self.layers.modules():
            if isinstance(module, Linear):
                own = module.weight.untyped_storage().data_ptr()
                names[module] = [name for name, slot in slots.items() if slot.untyped_storage().data_ptr() == own]
        given = TensorFiles(own_files(folder, form.name))
        assert kernels is not None, "there is nothing to pack for"

        def weight_of(linear: Linear) -> Packed:
            own = names.pop(linear)  # held no longer than needed
            if FORMATS[form.name].plain:
                return "float32" if form.name == "float32" else "bfloat16"
            parts = zip(own, linear.weight.split([len(slots[name]) for name in own]), strict=True)
            weight = stacked([form.read(name, rows, given, self.dtype) for name, rows in parts])
            assert isinstance(weight, Quantized), "our kernels multiply with no others"
            return weight

        pack_natively(self, kernels, weight_of, whole=self.config.has_llama_shape)
        self.packed = form.name
        self.dtype = torch.float32
        self.fused = FusedLayers.of(self.layers, cast("Rotary", self.rotaries[0]), self.config)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Return where the tensors of a Hugging Face checkpoint go: name, and the view of a parameter to copy it
        into."""
        names = self.config.names
        slots: dict[str, Tensor] = {EMBEDDING: self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            slots[LM_HEAD] = self.lm_head.weight
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.attention, layer.mlp
            norms = (layer.input_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
            weights = [norm.weight for norm in norms if not isinstance(norm, nn.Identity)]
            of_norms = {f"{name}.weight": weight for name, weight in zip(names.norms, weights, strict=True)}
            own = of_norms | projection_slots(attention, mlp, names)
            if attention.qk_norm is not None:
                weight = attention.qk_norm.weight  # where heads have one each, copying broadcasts the checkpoint's row
                each = 1 if weight.ndim == 2 else attention.head_dim
                query, key = weight.split((attention.num_heads * each, attention.num_kv_heads * each))
                own |= {"self_attn.q_norm.weight": query, "self_attn.k_norm.weight": key}
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in own.items()}
        return slots


def projection_slots(attention: Attention, mlp: MLP, names: TensorNames) -> dict[str, Tensor]:
    """Return where the tensors of a layer's projections go; those that share one weight, row block after row block."""
    blocks: tuple[tuple[Matrix, tuple[str, ...], tuple[int, ...]], ...] = (
        (attention.qkv_proj, names.qkv, attention.sizes if len(names.qkv) == 3 else (sum(attention.sizes),)),
        (attention.o_proj, (names.output,), (len(attention.o_proj.weight),)),
        (mlp.gate_up_proj, names.gate_up, (mlp.size, mlp.size) if len(names.gate_up) == 2 else (2 * mlp.size,)),
        (mlp.down_proj, (names.down,), (len(mlp.down_proj.weight),)),
    )
    return {
        f"{name}.{part}": rows
        for linear, own, sizes in blocks
        for part, parameter in linear.named_parameters()
        for name, rows in zip(own, parameter.split(sizes), strict=True)
    }
