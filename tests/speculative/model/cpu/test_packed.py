"""Packing the weights for oneDNN changes where they lie, not what comes out; and which kernels a head gets."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from speculative.kernels.library import cpu_kernels
from speculative.model import loading
from speculative.model.cpu import packed
from speculative.model.cpu.native import Kind, NativeLinear
from speculative.model.cpu.packed import OneDnnLinear, can_pack, can_pack_for_onednn, pack_weights
from speculative.model.layers import Linear, PackedLinear
from speculative.model.loading import load_decoder
from tests.support.tiny_models import write_tiny_model

needs_packing = pytest.mark.skipif(
    not can_pack_for_onednn(torch.bfloat16, torch.device("cpu")), reason="oneDNN multiplies no bfloat16 on this CPU"
)


def first_query(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query


def a_linear(num_inputs: int = 96) -> Linear:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(num_inputs, 64, bias=True, dtype=torch.bfloat16, device=torch.device("cpu"))
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def test_only_bfloat16_on_the_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, torch.device("cpu"), cpu_kernels())
    assert not can_pack(torch.bfloat16, torch.device("cuda"), None)


@needs_packing
@pytest.mark.parametrize("num_rows", [0, 1, 5, 100])
def test_a_packed_product_is_the_plain_one(num_rows: int) -> None:
    linear = a_linear()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(num_rows, 200, generator=generator).to(torch.bfloat16)[:, :96]  # strided, as in a forward
    assert torch.equal(OneDnnLinear(linear)(rows), linear(rows))


@needs_packing
@pytest.mark.parametrize("family", ["smollm", "qwen2"])
def test_a_loaded_decoder_is_packed_throughout_and_computes_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, family)
    packed_decoder = load_decoder(folder, dtype=torch.bfloat16, device="cpu")
    monkeypatch.setattr(loading, "can_pack_for_onednn", lambda dtype, device: False)
    plain = load_decoder(folder, dtype=torch.bfloat16, device="cpu")
    assert not any(isinstance(module, Linear) for module in packed_decoder.modules())
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    ids = torch.arange(3, 20)
    outputs = [model(ids, torch.arange(len(ids)), first_query) for model in (packed_decoder, plain)]
    assert torch.equal(*outputs)
    assert torch.equal(packed_decoder.logits(outputs[0]), plain.logits(outputs[1]))


@needs_packing
def test_a_head_for_onednn_takes_rows_of_a_float32_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "prefers_onednn", lambda: True)
    head = nn.Sequential(a_linear())
    rows = torch.randn(3, 96)
    expected = head(rows.bfloat16())
    pack_weights(head, None, cpu_kernels())
    assert isinstance(head[0], OneDnnLinear)
    assert torch.equal(head(rows), expected.float())


@pytest.mark.skipif(cpu_kernels() is None, reason="there are no CPU kernels here")
@pytest.mark.parametrize(
    ("target", "num_inputs", "kind", "error"),
    [("bfloat16", 96, "w8a8", 0.05), ("w4a8", 96, "w4a8", 0.5), ("w4a8", 40, "bfloat16", 0.05)],
)
def test_a_head_for_our_kernels_has_few_bits_where_they_fit(
    target: Kind, num_inputs: int, kind: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "prefers_onednn", lambda: False)
    linear = a_linear(num_inputs)
    head = nn.Sequential(linear)
    pack_weights(head, target, cpu_kernels())
    assert isinstance(head[0], NativeLinear)
    assert head[0].kind == kind
    rows = torch.randn(3, num_inputs)
    expected = rows @ linear.weight.float().T + linear.bias.float()
    torch.testing.assert_close(head(rows), expected, rtol=0.02, atol=error * expected.std().item())
