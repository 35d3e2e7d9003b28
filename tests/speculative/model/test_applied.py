"""Loaded models are compared with their checkpoints, in every form that a CPU has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.kernels.chosen import ChosenKernels
from speculative.kernels.library import cpu_kernels
from speculative.model import loading
from speculative.model.applied import check_applied
from speculative.model.decoder import Decoder
from tests.support.tiny_models import write_tiny_model

FORMS: dict[str, tuple[str | None, torch.dtype]] = {
    "torch": (None, torch.float32),
    "bfloat16 by torch": (None, torch.bfloat16),
    "float32": ("float32", torch.float32),
    "bfloat16": ("bfloat16", torch.bfloat16),
    "w4a8": ("w4a8", torch.bfloat16),
    "fp8": ("fp8", torch.bfloat16),
}


def loaded(folder: Path, form: str) -> Decoder:
    kind, dtype = FORMS[form]
    kernels = cpu_kernels()
    if kind is not None and kernels is None:
        pytest.skip("there are no CPU kernels here")
    chosen = ChosenKernels(None if kind is None else kernels, kernels)
    return loading.load_decoder(folder, dtype=dtype, device="cpu", weights=kind, kernels=chosen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama_biased", "qwen2", "qwen3", "mistral", "gemma3", "olmo2", "granite4", "phi3"])
def test_what_was_loaded_is_what_was_sent(tmp_path: Path, form: str, family: str) -> None:
    folder = write_tiny_model(tmp_path / family, family, vocab_size=64)
    check_applied(loaded(folder, form), folder, FORMS[form][1])


def skipped(slot: Tensor, tensor: Tensor) -> None:
    slot.fill_(1.0)


def transposed(slot: Tensor, tensor: Tensor) -> None:
    slot.copy_(tensor.T)


def rounded(slot: Tensor, tensor: Tensor) -> None:
    slot.copy_(tensor.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("form", [form for form in FORMS if form != "fp8"])
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (skipped, "model.layers.1.input_layernorm.weight"),
        (skipped, "model.layers.1.self_attn.k_norm.weight"),
        (skipped, "model.embed_tokens.weight"),
        (transposed, "model.layers.1.self_attn.q_proj.weight"),
        (rounded, "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_that_did_not_arrive_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, damage: Callable[[Tensor, Tensor], None], name: str
) -> None:
    folder, fill = write_tiny_model(tmp_path / "m", "qwen3", vocab_size=64, head_dim=16), loading._fill

    def filling(path: Path, own: str, slot: Tensor, tensor: Tensor) -> None:
        fill(path, own, slot, tensor)
        if own == name:
            damage(slot, tensor)

    monkeypatch.setattr(loading, "_fill", filling)
    decoder = loaded(folder, form)
    with pytest.raises(ConfigError, match=rf"{name.replace('.', '[.]')} .*did not arrive in the model"):
        check_applied(decoder, folder, FORMS[form][1])
