"""Packing the weights for oneDNN changes where they lie, not what comes out."""

from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_model
from torch import Tensor

from speculative.model import loading
from speculative.model.layers import Linear
from speculative.model.loading import load_decoder
from speculative.model.packed import PackedLinear, can_pack

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="oneDNN multiplies no bfloat16 on this CPU"
)


def first_query(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query


def test_only_bfloat16_on_the_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, torch.device("cpu"))
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@needs_packing
@pytest.mark.parametrize("num_rows", [0, 1, 5, 100])
def test_a_packed_product_is_the_plain_one(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(96, 64, bias=True, dtype=torch.bfloat16, device=torch.device("cpu"))
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows = torch.randn(num_rows, 200, generator=generator).to(torch.bfloat16)[:, :96]  # strided, as in a forward
    assert torch.equal(PackedLinear(linear)(rows), linear(rows))


@needs_packing
@pytest.mark.parametrize("family", ["smollm", "qwen2"])
def test_a_loaded_decoder_is_packed_throughout_and_computes_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, family)
    packed = load_decoder(folder, dtype=torch.bfloat16, device="cpu")
    monkeypatch.setattr(loading, "can_pack", lambda dtype, device: False)
    plain = load_decoder(folder, dtype=torch.bfloat16, device="cpu")
    assert not any(isinstance(module, Linear) for module in packed.modules())
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    ids = torch.arange(3, 20)
    outputs = [model(ids, torch.arange(len(ids)), first_query) for model in (packed, plain)]
    assert torch.equal(*outputs)
    assert torch.equal(packed.logits(outputs[0]), plain.logits(outputs[1]))
