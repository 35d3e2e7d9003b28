"""EAGLE-3 draft head (Li et al., 2025, arXiv 2503.01840) and its checkpoint, as vLLM reads those of speculators and of
SpecForge.

Row r of the head stands for the target's features of position r and the token of position r + 1; it drafts the token of
position r + 2. Where the target has not been yet, the head's own hidden state stands in for the features.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.errors import ConfigError, UnsupportedModel
from speculative.kernels.bindings import DraftHeadStruct, DraftRoundStruct, LayerStruct, ShapeStruct
from speculative.model.attention import NativeStep, StepAttention, cache_shape
from speculative.model.config import ModelConfig
from speculative.model.config_file import ConfigFile
from speculative.model.cpu.fused import fill_shape
from speculative.model.cpu.native import NativeAttention, NativeLinear, NativeMLP, NativeNorm, Packed, pack_natively
from speculative.model.decoder import Decoder, projection_slots
from speculative.model.end_tokens import read_json
from speculative.model.head_checkpoint import fill_slots, read_tensors
from speculative.model.layers import MLP, Attend, Attention, FusibleLayer, Linear, RMSNorm, nan_parameter
from speculative.model.quantized import GROUP, quantize
from speculative.model.rotary import Rotary
from speculative.state.kv_cache import KVCache

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_EMBEDDING = "embed_tokens.weight"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_UNUSED = "mask_hidden"  # serves other ways of drafting


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    shape: its one layer, in the terms of a decoder; the vocabulary is the target's.
    aux_layers: the target's layers whose input is a feature, ascending; None = what vLLM takes when nothing is said.
    norm_before_residual: whether the residual goes on from the normed hidden state (speculators' heads).
    """

    shape: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False

    @classmethod
    def from_folder(cls, folder: Path) -> "Eagle3Config":
        """Read the config.json of a vLLM, SpecForge or speculators folder.

        Raises:
            ConfigError: config.json is missing, damaged or contradicts itself.
            UnsupportedModel: it is no EAGLE-3 head, or one that this engine does not run.
        """
        config = dict(read_json(folder / "config.json"))
        from_speculators = "transformer_layer_config" in config
        layer = config["transformer_layer_config"] if from_speculators else config
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"{folder}: `architectures` is {architecture!r}, no EAGLE-3 head of the Llama family "
                f"({', '.join(_ARCHITECTURES)}); give another head."
            )
        _refuse_unknown(folder, config, layer)
        shape = ModelConfig.from_json({**layer, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
        aux = _aux_layers(folder, config)
        return cls(
            shape=shape,
            draft_vocab_size=int(config.get("draft_vocab_size") or shape.vocab_size),
            target_hidden_size=int(config.get("target_hidden_size") or shape.hidden_size),
            aux_layers=None if aux is None else tuple(int(layer) for layer in aux),
            norm_before_residual=ConfigFile(config).flag("norm_before_residual", from_speculators),
        )

    def for_target(self, target: ModelConfig) -> "Eagle3Config":
        """The same head, complete: its layers of the target named, and as many positions as the target has.

        Raises:
            ConfigError: the head was made for another target.
        """
        for name, ours, theirs in (
            ("vocabulary", self.shape.vocab_size, target.vocab_size),
            ("hidden size of the target", self.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise ConfigError(f"The EAGLE-3 head was made for another target: its {name} is {ours}, not {theirs}.")
        aux_layers = self.aux_layers or default_aux_layers(target.num_layers)
        if list(aux_layers) != sorted(set(aux_layers)) or aux_layers[0] < 0 or aux_layers[-1] >= target.num_layers:
            raise ConfigError(
                f"eagle_aux_hidden_state_layer_ids {list(aux_layers)} must be ascending and name layers of the target, "
                f"which has {target.num_layers}."
            )
        longest = max(self.shape.max_position_embeddings, target.max_position_embeddings)
        shape = dataclasses.replace(self.shape, max_position_embeddings=longest)
        return dataclasses.replace(self, shape=shape, aux_layers=tuple(aux_layers))


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input EAGLE-3 reads when a checkpoint names none: an early, a middle and a late one, as in vLLM.

    Raises:
        ConfigError: the target has fewer than three layers.
    """
    if num_layers < 3:
        raise ConfigError(f"EAGLE-3 reads three layers of the target, which has {num_layers}; use another drafter.")
    layers = (2, num_layers // 2, num_layers - 3)
    return layers if layers[0] < layers[1] < layers[2] else (0, num_layers // 2, num_layers - 1)


class FusedHead:
    """A draft head's layer in one call, and its logits in another. The modules own the memory it points at."""

    def __init__(self, head: "Eagle3Head") -> None:
        parts: tuple[nn.Module, ...] = (head.attention, head.mlp, head.lm_head)
        attention, mlp, lm_head = parts
        assert isinstance(attention, NativeAttention) and isinstance(mlp, NativeMLP)
        assert isinstance(lm_head, NativeLinear)
        self._struct = DraftHeadStruct(
            embedding=head.embedding.data_ptr(),
            embedding_is_bfloat16=head.embedding.dtype == torch.bfloat16,
            residual_is_normed=head.config.norm_before_residual,
            token_norm=head.input_norm.weight.data_ptr(),
            hidden_norm=head.hidden_norm.weight.data_ptr(),
            layer=LayerStruct(
                mlp_norm=head.mlp_norm.weight.data_ptr(),
                head_norm=attention.struct.head_norm,
                qkv=attention.struct.qkv,
                output=attention.struct.output,
                gate_up=mlp.struct.gate_up,
                down=mlp.struct.down,
            ),
            norm=head.norm.weight.data_ptr(),
            lm_head=lm_head.struct,
            ids=head.draft_ids.data_ptr(),
        )
        self._rotary = head.rotary.table.float().contiguous()
        self._config = head.config.shape
        self._norm: nn.Module = head.norm
        self._lm_head = lm_head
        self._keep = (head.embedding, head.draft_ids, *head.children())  # and not the head, which has this

    @property
    def addresses(self) -> bytes:
        """Return where the weights lie that it computes with."""
        return bytes(self._struct)

    @classmethod
    def of(cls, head: "Eagle3Head") -> "FusedHead | None":
        """None where the head is not packed for our kernels."""
        norms = (head.input_norm, head.hidden_norm, head.mlp_norm, head.norm)
        packed = all(isinstance(norm, NativeNorm) for norm in norms) and isinstance(head.lm_head, NativeLinear)
        packed &= isinstance(head.attention, NativeAttention) and isinstance(head.mlp, NativeMLP)
        readable = head.embedding.dtype in (torch.bfloat16, torch.float32) and head.embedding.is_contiguous()
        readable &= head.draft_ids.is_contiguous()
        return cls(head) if packed and readable and head.config.shape.head_dim % 16 == 0 else None

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, step: NativeStep) -> Tensor:
        """token_ids, positions [N] int64 and hidden [N, hidden_size] float32 -> [N, hidden_size]."""
        struct, shape = step.struct, step.shape
        struct.positions = positions.data_ptr()
        fill_shape(shape, self._config, self._rotary)
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        return step.kernels.draft_layer(self._struct, token_ids.contiguous(), hidden, (shape, struct, step.cache))

    def shape_with(self, cache: KVCache) -> ShapeStruct:
        """The head and its cache, as `draft` takes them."""
        shape = cache_shape(cache)
        fill_shape(shape, self._config, self._rotary)
        return shape

    def draft(
        self, draft_round: DraftRoundStruct, num_drafts: int, hidden: Tensor, place: tuple[ShapeStruct, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `Kernels.draft_round`; hidden is [E, hidden_size] float32."""
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        return self._lm_head.kernels.draft_round(self._struct, draft_round, num_drafts, hidden, place)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden_size], each of them contiguous -> [R, draft_vocab] float32."""
        assert isinstance(self._norm, NativeNorm)
        return self._lm_head.after_norm(hidden, self._norm)


class Eagle3Head(FusibleLayer):
    """One decoder layer over (token, features), with a vocabulary of its own.

    All parameters start as NaN; fill them through `checkpoint_slots`. `draft_ids` [draft_vocab] int64 is the target's
    id of each draft id. Parameters ask for gradients once `requires_grad_()` is called.
    """

    draft_ids: Tensor

    def __init__(
        self, config: Eagle3Config, draft_ids: Tensor, embedding: Tensor | None, *, dtype: torch.dtype
    ) -> None:
        """Build the head on the device of `draft_ids`.

        Args:
            config: the result of `Eagle3Config.for_target`.
            draft_ids: [draft_vocab] int64, ascending.
            embedding: [vocab, hidden] the target's, shared; None = the checkpoint brings its own.
            dtype: of the weights.
        """
        super().__init__()
        shape, device = config.shape, draft_ids.device
        hidden_size, eps = shape.hidden_size, shape.rms_norm_eps
        num_features = len(config.aux_layers or ()) * config.target_hidden_size
        self.config = config
        self.fc = Linear(num_features, hidden_size, bias=False, dtype=dtype, device=device)
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            RMSNorm(hidden_size, eps, dtype=dtype, device=device) for _ in range(4)
        )
        self.attention = Attention(shape, input_size=2 * hidden_size, dtype=dtype, device=device)
        self.mlp = MLP(shape, dtype=dtype, device=device)
        self.lm_head = Linear(hidden_size, config.draft_vocab_size, bias=False, dtype=dtype, device=device)
        self.rotary = Rotary(shape.rope, shape.max_position_embeddings, device=device)
        self.owns_embedding = embedding is None
        if embedding is None:
            self.embedding: Tensor = nan_parameter(shape.vocab_size, hidden_size, dtype=dtype, device=device)
        else:
            self.embedding = embedding.detach()  # no parameter of ours: neither trained nor saved
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.fused: FusedHead | None = None  # the whole layer at once, where it is packed for it

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose input is a feature: what `Decoder.run` is to capture."""
        return self.config.aux_layers or ()

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [N, 3 * target_hidden] -> [N, hidden], the hidden state of a first draft."""
        return self.fc(features)  # type: ignore[no-any-return]

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, hidden] before the final norm: what `logits` reads, and the next draft's `hidden`.

        Args:
            token_ids: [N] int64, of position r + 1 for row r.
            hidden: [N, hidden] fused features of position r, or the head's own output for the row before.
            positions: [N] int64, r.
            attend: called once, as layer 0.
        """
        if self.fused is not None and isinstance(attend, StepAttention) and attend.native is not None:
            return self.fused.run(token_ids, hidden, positions, attend.native)
        rotation = self.ops.rotation(self.rotary, positions, hidden)
        embedded = functional.embedding(token_ids, self.embedding).to(hidden.dtype)
        normed = self.hidden_norm(hidden)
        rows = torch.cat((self.input_norm(embedded), normed), dim=-1)
        residual = normed if self.config.norm_before_residual else hidden
        hidden, normed = self.ops.add_norm(residual, self.attention(rows, rotation, attend, 0), self.mlp_norm)
        return hidden + self.mlp(normed)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, draft_vocab], in the type of the LM head's products."""
        if self.fused is not None:
            return self.fused.logits(hidden)
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def pack(self, target: Decoder) -> None:
        """Lay the loaded weights out for the kernels that its target runs on, where those are a CPU's.

        They are rounded to four bits: that changes what is proposed, never the distribution of what is emitted. Beside
        float32 they stay so.
        """
        packed, kernels = target.packed, target.kernels.model
        if packed is None or kernels is None:
            return

        def weight_of(linear: Linear) -> Packed:
            if packed == "float32":
                return "float32"
            return "bfloat16" if linear.weight.shape[1] % GROUP else quantize(linear.weight, 4)

        pack_natively(self, kernels, weight_of)
        self.fused = FusedHead.of(self)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Return where the tensors of a checkpoint go: name, and the view of a parameter to copy it into."""
        slots: dict[str, Tensor] = {
            "fc.weight": self.fc.weight,
            "midlayer.input_layernorm.weight": self.input_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            "midlayer.post_attention_layernorm.weight": self.mlp_norm.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        own = projection_slots(self.attention, self.mlp, self.config.shape.names)
        slots |= {f"midlayer.{name}": slot for name, slot in own.items()}
        if self.owns_embedding:
            slots[_EMBEDDING] = self.embedding
        return slots


def load_eagle3(
    folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> Eagle3Head:
    """The head of a folder, ready to draft for the target, whose embedding it shares unless it has its own.

    Raises:
        ConfigError: files or tensors are missing, unexpected, damaged or of another shape, a weight is not finite, or
            the head was made for another target.
        UnsupportedModel: the head needs something this engine does not do, or its weights are pickled.
    """
    device = torch.device(device or target.device)
    config = Eagle3Config.from_folder(folder).for_target(target.config)
    tensors = read_tensors(folder, config.shape, _slot_name)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}
    draft_ids = _draft_ids(folder, config, tensors).to(device)
    embedding = None if _EMBEDDING in tensors else target.embedding
    if embedding is not None and embedding.shape[1] != config.shape.hidden_size:
        raise ConfigError(
            f"{folder} lacks {_EMBEDDING}, and the target's embedding has {embedding.shape[1]} columns where the head "
            f"needs {config.shape.hidden_size}; download the checkpoint again."
        )
    head = Eagle3Head(config, draft_ids, embedding, dtype=dtype)
    fill_slots(folder, head.checkpoint_slots(), tensors)
    head.pack(target)
    return head.eval()


def _refuse_unknown(folder: Path, config: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    eagle, aux = config.get("eagle_config") or {}, _aux_layers(folder, config)
    fine = {
        f"model_type of the layer is {layer.get('model_type')!r}": layer.get("model_type", "llama") == "llama",
        f"num_hidden_layers is {layer.get('num_hidden_layers')}": layer.get("num_hidden_layers", 1) == 1,
        f"{_AUX_LAYERS} {aux} are not three layers": aux is None or len(aux) == 3,
        "use_aux_hidden_state is false": eagle.get("use_aux_hidden_state", True),
        f"logit_scale is {config.get('logit_scale')}": config.get("logit_scale", 1.0) == 1.0,
        "norm_before_fc is set": not config.get("norm_before_fc"),
        "fc_norm is set": not config.get("fc_norm"),
        "norm_output is set": not config.get("norm_output"),
    }
    for what, holds in fine.items():
        if not holds:
            raise UnsupportedModel(f"{folder}: {what}, unknown here; use another head, or `engine.kind: vllm`.")


def _aux_layers(folder: Path, config: Mapping[str, Any]) -> Sequence[int] | None:
    """`eagle_aux_hidden_state_layer_ids`, which has two places."""
    beside, inside = (place.get(_AUX_LAYERS) or None for place in (config, config.get("eagle_config") or {}))
    if beside is not None and inside is not None and beside != inside:
        raise ConfigError(
            f"{folder / 'config.json'}: `{_AUX_LAYERS}` is {beside}, and in `eagle_config` {inside}; remove one."
        )
    return inside if beside is None else beside


def _slot_name(name: str) -> str:
    """vLLM's, SpecForge's and speculators' spellings as one."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _draft_ids(folder: Path, config: Eagle3Config, tensors: dict[str, Tensor]) -> Tensor:
    """The target's id of each draft id, from d2t; t2d, where there is one, must name the same ids."""
    size, vocab_size = config.draft_vocab_size, config.shape.vocab_size
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and size != vocab_size:
        raise ConfigError(f"{folder} lacks the tensor d2t; its {size} draft ids are unknown. Download it again.")
    draft_ids = torch.arange(size) if d2t is None else torch.arange(len(d2t)) + d2t.long()
    if (
        len(draft_ids) != size
        or len(draft_ids.unique()) != size
        or not 0 <= draft_ids.min() <= draft_ids.max() < vocab_size
    ):
        raise ConfigError(
            f"{folder}: d2t must give {size} different ids below {vocab_size}; download the checkpoint again."
        )
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), draft_ids.sort().values):
        raise ConfigError(f"{folder}: t2d and d2t name different tokens; download the checkpoint again.")
    return draft_ids
