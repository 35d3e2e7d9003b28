"""What the checkpoint of every head does: one kit of tests for EAGLE-3 heads and MTP modules.

A test module subclasses `HeadConformance`, names the kind, and gives a module-scoped fixture `target`, for which
`tiny_target` makes the decoder. It parametrizes what does not fit itself, and has the kit refuse it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculative.errors import ConfigError
from speculative.kernels.library import cpu_kernels
from speculative.model.cpu.native import Kind
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, load_eagle3
from speculative.model.loading import load_decoder
from speculative.model.mtp import load_mtp
from speculative.training.heads import DraftHead, HeadKind, initial_head, save_head
from tests.support.tiny_models import write_tiny_model

VOCAB = 64
LAYERS = 4
needs_kernels = pytest.mark.skipif(cpu_kernels() is None, reason="there are no CPU kernels here")
DRAFT_IDS = torch.tensor([0, 1, 2, *range(20, 49)])  # of heads with a vocabulary of their own


def tiny_target(folder: Path) -> Decoder:
    """What the heads draft for."""
    write_tiny_model(folder, vocab_size=VOCAB, num_hidden_layers=LAYERS)
    return load_decoder(folder, dtype=torch.float32, device="cpu")


def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Made up, so that query, key and value of each row all show in what comes out."""
    return query + (key + value).repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def drafted(head: DraftHead, features: Tensor) -> Tensor:
    """An EAGLE-3 head's logits, or what of an MTP module the target's LM head reads."""
    tokens, positions = torch.arange(3, 3 + len(features)), torch.arange(len(features))
    hidden = head(tokens, head.fuse(features), positions, attend)
    if isinstance(head, Eagle3Head):
        return head.logits(hidden)
    normed: Tensor = head.norm(hidden)
    return normed


class HeadConformance:
    """What holds for a head of any kind."""

    kind: ClassVar[HeadKind]
    num_features: ClassVar[int]  # of a row of the target

    @pytest.fixture
    def head(self, target: Decoder) -> DraftHead:
        """Noise on every weight, rounded to what the file keeps."""
        head = initial_head(self.kind, target, DRAFT_IDS)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
                parameter.copy_(parameter.bfloat16())
        return head

    @pytest.fixture
    def folder(self, head: DraftHead, tmp_path: Path) -> Path:
        save_head(head, tmp_path / "head")
        return tmp_path / "head"

    def load(self, folder: Path, target: Decoder, dtype: torch.dtype = torch.float32) -> DraftHead:
        return (load_mtp if self.kind == "mtp" else load_eagle3)(folder, target, dtype=dtype)

    def refuse_weights(self, folder: Path, target: Decoder, change: Mapping[str, Tensor | None], reported: str) -> None:
        """These tensors, put in or (None) left out, are reported."""
        tensors = {**load_file(folder / "model.safetensors"), **change}
        save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=reported):
            self.load(folder, target)

    def refuse_config(
        self, folder: Path, target: Decoder, change: Mapping[str, Any], error: type[Exception], reported: str
    ) -> None:
        """These fields of the configuration are reported."""
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(error, match=reported):
            self.load(folder, target)

    def test_a_saved_head_loads_as_it_was(self, head: DraftHead, folder: Path, target: Decoder) -> None:
        loaded = self.load(folder, target)
        assert loaded.embedding.data_ptr() == target.embedding.data_ptr(), "the embedding is shared"
        for (name, ours), (_, theirs) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        assert not any(parameter.requires_grad for parameter in loaded.parameters())

    def test_a_config_survives_its_file(self, head: DraftHead, folder: Path, target: Decoder) -> None:
        config = type(head.config).from_folder(folder)
        assert config == config.for_target(target.config) == head.config

    @pytest.mark.parametrize("weights", [None, pytest.param("bfloat16", marks=needs_kernels)])
    def test_a_head_for_the_cpu_in_bfloat16_says_the_same(
        self, tmp_path: Path, head: DraftHead, folder: Path, weights: Kind | None
    ) -> None:
        model = write_tiny_model(tmp_path / "target", vocab_size=VOCAB, num_hidden_layers=LAYERS)
        target = load_decoder(model, dtype=torch.bfloat16, device="cpu", weights=weights)
        served = self.load(folder, target, torch.bfloat16)
        features = torch.randn(5, self.num_features, generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            ours, theirs = drafted(head, features), drafted(served, features.bfloat16())
        rounding = 0.05 if weights is None else 0.4  # to four bits, beside our kernels
        assert (ours - theirs.float()).abs().max() < rounding * ours.abs().max()

    def test_a_damaged_file_is_reported(self, folder: Path, target: Decoder) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(ConfigError, match="damaged"):
            self.load(folder, target)
