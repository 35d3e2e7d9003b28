"""Heads draft: one layer over the target's own hidden states.

Sources: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(2503.01840); MTP modules as in DeepSeek-AI, "DeepSeek-V3 Technical Report" (2412.19437), section 2.2.
"""

from pathlib import Path

import torch
from torch import Tensor

from speculative.cache.kv_cache import KVShape
from speculative.model.cpu.fused import FusedHead
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, load_eagle3
from speculative.model.fingerprint import model_fingerprint
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.model.layers import Attend
from speculative.model.mtp import MtpHead, load_mtp
from speculative.scheduling.draft_length import ExpectedRates


class _HeadDraftModel:
    """The base of heads as draft models: a name, the cache of one layer, and the layer."""

    ids: Tensor | None = None
    held_out_rates: ExpectedRates = (), ()
    fused: FusedHead | None = None

    def __init__(self, kind: str, head: Eagle3Head | MtpHead, fingerprint: str) -> None:
        shape = head.config.shape
        self.name = f"{kind}:{fingerprint}"
        self.kv_shape = KVShape(1, shape.num_kv_heads, shape.head_dim)
        self.hidden_size = shape.hidden_size
        self.network = head

    def fuse(self, features: Tensor) -> Tensor:
        """[N, num_features] -> [N, hidden]."""
        return self.network.fuse(features)

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N], hidden [N, hidden] -> [N, hidden]."""
        drafted: Tensor = self.network(token_ids, hidden, positions, attend)
        return drafted


class Eagle3DraftModel(_HeadDraftModel):
    """An EAGLE-3 head: it reads the features that enter three of the target's layers, and drafts by its own LM head."""

    def __init__(self, head: Eagle3Head, fingerprint: str) -> None:
        super().__init__("eagle3", head, fingerprint)
        self.capture = head.aux_layers
        self.num_features = len(head.aux_layers) * head.config.target_hidden_size
        self.ids, self.fused = head.draft_ids, head.fused
        self._head = head

    @classmethod
    def load(cls, folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device) -> "Eagle3DraftModel":
        """Load a head in the public format.

        Raises:
            ConfigError: it is damaged, or was made for another target.
            UnsupportedModel: it needs what this engine does not do.
        """
        head = load_eagle3(folder, target, dtype=dtype, device=device)
        model = cls(head, model_fingerprint(folder, head.config))
        model.held_out_rates = read_held_out_rates(folder)
        return model

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, draft vocabulary]."""
        return self._head.logits(hidden)


class MtpDraftModel(_HeadDraftModel):
    """An MTP module: it reads what enters the target's LM head, and drafts through that LM head."""

    def __init__(self, head: MtpHead, target: Decoder, fingerprint: str) -> None:
        super().__init__("mtp", head, fingerprint)
        self.capture: tuple[int, ...] = (head.config.shape.num_layers,)
        self.num_features = head.config.shape.hidden_size
        self._norm, self._target = head.norm, target

    @classmethod
    def load(cls, folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device) -> "MtpDraftModel":
        """Load a module for its target; raises as `Eagle3DraftModel.load`."""
        head = load_mtp(folder, target, dtype=dtype, device=device)
        model = cls(head, target, model_fingerprint(folder, head.config))
        model.held_out_rates = read_held_out_rates(folder)
        return model

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V]."""
        return self._target.lm_head(self._norm(hidden))  # type: ignore[no-any-return]
