"""An MTP module drafts: one layer over the target's final hidden state and the token after it.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2412.19437), section 2.2.
"""

from pathlib import Path

import torch
from torch import Tensor

from speculative.kv_cache import KVShape
from speculative.model.decoder import Decoder
from speculative.model.fingerprint import model_fingerprint
from speculative.model.layers import Attend
from speculative.model.mtp import MtpHead, load_mtp


class MtpDraftModel:
    """A module as a draft model: it reads what enters the target's LM head, and drafts through that LM head."""

    ids: Tensor | None = None

    def __init__(self, head: MtpHead, target: Decoder, fingerprint: str) -> None:
        shape = head.config.shape
        self.name = f"mtp:{fingerprint}"
        self.kv_shape = KVShape(1, shape.num_kv_heads, shape.head_dim)
        self.capture: tuple[int, ...] = (shape.num_layers,)
        self.num_features = shape.hidden_size
        self._head = head
        self._target = target

    @classmethod
    def load(cls, folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device) -> "MtpDraftModel":
        """Load a module for its target.

        Raises:
            ConfigError: it is damaged, or was made for another target.
            UnsupportedModel: it needs what this engine does not do.
        """
        head = load_mtp(folder, target, dtype=dtype, device=device)
        return cls(head, target, model_fingerprint(folder, head.config))

    def fuse(self, features: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        return self._head.fuse(features)

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N], hidden [N, hidden] -> [N, hidden]."""
        drafted: Tensor = self._head(token_ids, hidden, positions, attend)
        return drafted

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V] float32."""
        return self._target.logits(self._head.norm(hidden))
