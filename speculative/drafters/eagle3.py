"""An EAGLE-3 head drafts: one layer over the target's own hidden states.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(2503.01840).
"""

from pathlib import Path

import torch
from torch import Tensor

from speculative.kv_cache import KVShape
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, load_eagle3
from speculative.model.fingerprint import model_fingerprint
from speculative.model.fused import FusedHead
from speculative.model.layers import Attend


class Eagle3DraftModel:
    """A head as a draft model: it reads the features that enter three of the target's layers."""

    def __init__(self, head: Eagle3Head, fingerprint: str) -> None:
        shape = head.config.shape
        self.name = f"eagle3:{fingerprint}"
        self.kv_shape = KVShape(1, shape.num_kv_heads, shape.head_dim)
        self.capture = head.aux_layers
        self.num_features = len(head.aux_layers) * head.config.target_hidden_size
        self.ids: Tensor | None = head.draft_ids
        self._head = head

    @classmethod
    def load(cls, folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device) -> "Eagle3DraftModel":
        """Load a head in the public format.

        Raises:
            ConfigError: it is damaged, or was made for another target.
            UnsupportedModel: it needs what this engine does not do.
        """
        head = load_eagle3(folder, target, dtype=dtype, device=device)
        return cls(head, model_fingerprint(folder, head.config))

    @property
    def fused(self) -> FusedHead | None:
        """The head as our CPU kernels run it, where it is packed for them."""
        return self._head.fused

    def fuse(self, features: Tensor) -> Tensor:
        """[N, num_features] -> [N, hidden]."""
        return self._head.fuse(features)

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N], hidden [N, hidden] -> [N, hidden]."""
        drafted: Tensor = self._head(token_ids, hidden, positions, attend)
        return drafted

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, draft vocabulary] float32."""
        return self._head.logits(hidden)
