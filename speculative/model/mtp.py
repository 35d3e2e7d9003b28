"""Multi-token-prediction module (DeepSeek-AI, 2024, arXiv 2412.19437, section 2.2) and its checkpoint.

Row r stands for the target's hidden state of position r and the token of position r + 1; it drafts the token of
position r + 2. The hidden state is the one after the target's final norm, as vLLM passes it; where the target has not
been yet, the module's own stands in for it, before the module's norm, as there. One module makes all drafts.

A folder holds config.json (a Llama layer's, with the target's `num_hidden_layers`, and `num_nextn_predict_layers` 1)
and the tensors that DeepSeek's checkpoints name `model.layers.{num_hidden_layers}.*`, without the embedding and the LM
head: these are the target's.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speculative.end_tokens import read_json
from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.config import ModelConfig
from speculative.model.cpu.packed import pack_head
from speculative.model.decoder import Decoder, layer_slots
from speculative.model.head_checkpoint import fill_slots, layer_json, read_tensors, rounded, write_head
from speculative.model.layers import Attend, DecoderLayer, FusibleLayer, Linear, RMSNorm, Rotary

_ARCHITECTURE = "LlamaMTPModel"


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The shape of an MTP module: its one layer, in the terms of a decoder; `shape.num_layers` is the target's."""

    shape: ModelConfig

    @classmethod
    def from_folder(cls, folder: Path) -> "MtpConfig":
        """Read config.json.

        Raises:
            ConfigError: config.json is missing, damaged or contradicts itself.
            UnsupportedModel: it is no MTP module, or one that this engine does not run.
        """
        config = read_json(folder / "config.json")
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture != _ARCHITECTURE:
            raise UnsupportedModel(
                f"{folder}: `architectures` is {architecture!r}, no MTP module with a Llama layer ({_ARCHITECTURE}); "
                "give another module, or `engine.kind: vllm`."
            )
        num_modules = config.get("num_nextn_predict_layers", 1)
        if num_modules != 1:
            raise UnsupportedModel(
                f"{folder}: num_nextn_predict_layers is {num_modules}, and one module makes all drafts here; keep the "
                "first module's tensors and set it to 1, or use `engine.kind: vllm`."
            )
        return cls(ModelConfig.from_json({**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}))

    def for_target(self, target: ModelConfig) -> "MtpConfig":
        """The same module, with as many positions as the target has.

        Raises:
            ConfigError: the module was made for another target.
        """
        for name, ours, theirs in (
            ("vocabulary", self.shape.vocab_size, target.vocab_size),
            ("hidden size", self.shape.hidden_size, target.hidden_size),
            ("number of layers", self.shape.num_layers, target.num_layers),
        ):
            if ours != theirs:
                raise ConfigError(f"The MTP module was made for another target: its {name} is {ours}, not {theirs}.")
        longest = max(self.shape.max_position_embeddings, target.max_position_embeddings)
        return MtpConfig(dataclasses.replace(self.shape, max_position_embeddings=longest))

    def to_json(self) -> dict[str, Any]:
        """The config.json that `from_folder` reads."""
        return {
            **layer_json(self.shape),
            "architectures": [_ARCHITECTURE],
            "num_hidden_layers": self.shape.num_layers,
            "num_nextn_predict_layers": 1,
        }


class MtpHead(FusibleLayer):
    """One decoder layer over (token, hidden state), with the embedding and the LM head of its target.

    All parameters start as NaN; fill them through `checkpoint_slots`. They ask for gradients once `requires_grad_()` is
    called. What drafts is the target's LM head over `norm` of what `forward` gives.
    """

    def __init__(self, config: MtpConfig, embedding: Tensor, *, dtype: torch.dtype) -> None:
        """Build the module on the device of `embedding`, [vocab, hidden], the target's; `dtype` is of the weights."""
        super().__init__()
        shape, device = config.shape, embedding.device
        size = shape.hidden_size
        self.config = config
        self.enorm, self.hnorm, self.norm = (
            RMSNorm(size, shape.rms_norm_eps, dtype=dtype, device=device) for _ in range(3)
        )
        self.eh_proj = Linear(2 * size, size, bias=False, dtype=dtype, device=device)
        self.layer = DecoderLayer(shape, dtype=dtype, device=device)
        self.rotary = Rotary(shape, device=device)
        self.embedding = embedding.detach()  # no parameter of ours: neither trained nor saved

    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden state [N, hidden] in the type that the module works in; `forward` norms it."""
        return features.to(self.hnorm.weight.dtype)

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, hidden] before `norm`: what is drafted from, and the next draft's `hidden`.

        Args:
            token_ids: [N] int64, of position r + 1 for row r; row 0 goes without its token, as in vLLM.
            hidden: [N, hidden] of the target at position r, or the module's own output for the row before.
            positions: [N] int64, r.
            attend: called once, as layer 0.
        """
        embedded = functional.embedding(token_ids, self.embedding).to(hidden.dtype)
        embedded = embedded.masked_fill((positions == 0)[:, None], 0)
        rows = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        rows = rows.to(hidden.dtype)  # under autocast too the residual stays float32
        rotation = self.ops.rotation(self.rotary, positions, hidden)
        rows, update = self.layer(rows, self.layer.input_norm(rows), rotation, attend, 0)
        return rows + update  # type: ignore[no-any-return]

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Return where the tensors of a checkpoint go: name, and the view of a parameter to copy it into."""
        slots = {
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "eh_proj.weight": self.eh_proj.weight,
            **layer_slots(self.layer),
            "shared_head.norm.weight": self.norm.weight,
        }
        return {f"model.layers.{self.config.shape.num_layers}.{name}": slot for name, slot in slots.items()}


def load_mtp(folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device | str | None = None) -> MtpHead:
    """The module of a folder, ready to draft for the target, whose embedding it shares.

    Raises:
        ConfigError: files or tensors are missing, unexpected, damaged or of another shape, a weight is NaN, or the
            module was made for another target.
        UnsupportedModel: the module needs something this engine does not do, or its weights are pickled.
    """
    config = MtpConfig.from_folder(folder).for_target(target.config)
    head = MtpHead(config, target.embedding.to(device or target.device), dtype=dtype)
    fill_slots(folder, head.checkpoint_slots(), read_tensors(folder, config.shape))
    pack_head(head, dtype, head.embedding.device, target)
    return head.eval()


def save_mtp(head: MtpHead, folder: Path) -> None:
    """Write the module as a folder that `load_mtp` reads; bfloat16, whatever it was trained in.

    Raises:
        ValueError: the module was packed for serving on a CPU; save the one it was loaded from.
    """
    write_head(folder, head.config.to_json(), rounded(head))
