"""Packing the weights for oneDNN changes where they lie, not what comes out; and which kernels a head gets."""

from pathlib import Path

import pytest
import torch
from torch import nn

from speculative.kernels.library import cpu_kernels
from speculative.model import loading
from speculative.model.cpu.native import Kind, NativeLinear
from speculative.model.cpu.packed import OneDnnLinear, can_pack_for_onednn, pack_head
from speculative.model.decoder import Decoder
from speculative.model.layers import Linear, PackedLinear
from speculative.model.loading import load_decoder
from tests.support.tiny_models import write_tiny_model

needs_packing = pytest.mark.skipif(
    not can_pack_for_onednn(torch.bfloat16, torch.device("cpu")), reason="oneDNN multiplies no bfloat16 on this CPU"
)


def a_target(folder: Path, weights: Kind | None) -> Decoder:
    return load_decoder(write_tiny_model(folder / "target"), dtype=torch.bfloat16, device="cpu", weights=weights)


def a_linear(num_inputs: int = 96) -> Linear:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(num_inputs, 64, bias=True, dtype=torch.bfloat16, device=torch.device("cpu"))
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "cuda")])
def test_a_head_for_torch_is_left_to_torch(tmp_path: Path, dtype: torch.dtype, device: str) -> None:
    head = nn.Sequential(a_linear())
    pack_head(head, dtype, torch.device(device), a_target(tmp_path, None))
    assert type(head[0]) is Linear


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
    outputs = [model(ids, torch.arange(len(ids)), lambda layer, query, *_: query) for model in (packed_decoder, plain)]
    assert torch.equal(*outputs)
    assert torch.equal(packed_decoder.logits(outputs[0]), plain.logits(outputs[1]))


@needs_packing
def test_a_head_beside_a_target_of_onednn_is_for_onednn(tmp_path: Path) -> None:
    head = nn.Sequential(a_linear())
    rows = torch.randn(3, 96)
    expected = head(rows.bfloat16())
    pack_head(head, torch.bfloat16, torch.device("cpu"), a_target(tmp_path, None))
    assert isinstance(head[0], OneDnnLinear)
    assert torch.equal(head(rows), expected.float())


@pytest.mark.skipif(cpu_kernels() is None, reason="there are no CPU kernels here")
@pytest.mark.parametrize(("target", "num_inputs", "kind", "error"), [("bfloat16", 96, 2, 0.5), ("w4a8", 40, 1, 0.05)])
def test_a_head_beside_a_target_of_our_kernels_is_ours(
    tmp_path: Path, target: Kind, num_inputs: int, kind: int, error: float
) -> None:
    linear = a_linear(num_inputs)
    assert linear.bias is not None
    head = nn.Sequential(linear)
    pack_head(head, torch.bfloat16, torch.device("cpu"), a_target(tmp_path, target))
    assert isinstance(head[0], NativeLinear)
    assert head[0].struct.kind == kind
    rows = torch.randn(3, num_inputs)
    expected = rows @ linear.weight.float().T + linear.bias.float()
    torch.testing.assert_close(head(rows), expected, rtol=0.02, atol=error * expected.std().item())
