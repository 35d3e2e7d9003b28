"""FP8 products on a GPU against those of the same numbers in float32."""

import pytest
import torch

from speculative.model.formats.fp8 import FORMAT, Fp8Linear
from speculative.model.fp8 import ScaledRows, quantize_rows
from speculative.model.layers import LayerOps, RMSNorm, use_layer_ops

pytestmark = pytest.mark.gpu
SIZES = [(576, 1536), (4096, 6144), (14336, 4096)]


@pytest.fixture
def device(cuda: torch.device) -> torch.device:
    if why := FORMAT.why_not(cuda, "bfloat16", None):
        pytest.skip(why)
    return cuda


@pytest.fixture
def triton(device: torch.device) -> LayerOps:
    from speculative.gpu.triton_layers import TritonLayerOps

    return TritonLayerOps()


def linear_on(device: torch.device, num_inputs: int, num_outputs: int, *, bias: bool) -> Fp8Linear:
    linear = Fp8Linear(num_inputs, num_outputs, bias=bias, dtype=torch.bfloat16, device=device)
    weight = quantize_rows(torch.randn((num_outputs, num_inputs), device=device))
    linear.weight.copy_(weight.numbers)
    linear.weight_scale.copy_(weight.scales)
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(num_outputs, device=device))
    return linear


def product_in_float32(linear: Fp8Linear, rows: ScaledRows) -> torch.Tensor:
    product = (rows.numbers.double() * rows.scales) @ (linear.weight.double() * linear.weight_scale).T
    return (product if linear.bias is None else product + linear.bias.double()).float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 320, 500])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_a_product_is_that_of_the_same_numbers_in_float32(
    device: torch.device, triton: LayerOps, num_inputs: int, num_outputs: int, num_rows: int, bias: bool
) -> None:
    torch.manual_seed(0)
    linear = linear_on(device, num_inputs, num_outputs, bias=bias)
    use_layer_ops(linear, triton)
    rows = torch.randn((num_rows, num_inputs), device=device).bfloat16()
    rows[num_rows // 2] = 0
    expected = product_in_float32(linear, quantize_rows(rows))
    limit = 2.0**-8 * float(expected.abs().max())  # of the bfloat16 that it is rounded to, and of the order of sums
    torch.testing.assert_close(linear(rows).float(), expected, rtol=2.0**-7, atol=limit)


@pytest.mark.parametrize("num_rows", [1, 5, 320])
@pytest.mark.parametrize(("size", "hidden_size"), [(1536, 576), (14336, 4096), (28672, 8192)])
def test_kernels_quantize_as_torch_does(
    device: torch.device, triton: LayerOps, hidden_size: int, size: int, num_rows: int
) -> None:
    torch.manual_seed(0)
    hidden, update = (torch.randn((num_rows, hidden_size), device=device).bfloat16() for _ in range(2))
    gate_up = torch.randn((num_rows, 2 * size), device=device).bfloat16()
    hidden[0, 5], update[num_rows // 2] = 1e4, 0
    norms = [RMSNorm(hidden_size, 1e-5, dtype=torch.bfloat16, device=device, feeds_fp8=fp8) for fp8 in (True, False)]
    for norm in norms:
        norm.weight.fill_(1.25)
    (_, normed), (_, plain) = (triton.add_norm(hidden, update, norm) for norm in norms)
    pairs = [
        (normed, plain),
        (triton.gate(gate_up, feeds_fp8=True), triton.gate(gate_up)),
        (triton.quantize(hidden), hidden),
    ]
    for found, rows in pairs:
        assert isinstance(found, ScaledRows) and isinstance(rows, torch.Tensor)
        expected = quantize_rows(rows)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.numbers.float(), expected.numbers.float())
