"""The compiled layer operations against torch's operators, in the types and sizes that serve."""

import pytest
import torch

from speculative.gpu.paged_attention import KernelAttention, PagedRows
from speculative.model.config import ModelConfig
from speculative.model.layers import Attention, LayerOps, RMSNorm
from speculative.model.rotary import Rope, Rotary
from speculative.state.kv_cache import KVCache, KVShape

pytestmark = pytest.mark.gpu


@pytest.fixture
def triton(cuda: torch.device) -> LayerOps:
    from speculative.gpu.triton_layers import TritonLayerOps

    return TritonLayerOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 320])
@pytest.mark.parametrize(("hidden_size", "size"), [(576, 1536), (4096, 14336)])
def test_sums_norms_and_gates_are_torchs(
    cuda: torch.device, triton: LayerOps, hidden_size: int, size: int, num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(hidden_size, 1e-5, dtype=dtype, device=cuda)
    norm.weight.copy_(torch.randn(hidden_size, device=cuda))
    hidden, update = (torch.randn((num_rows, hidden_size), device=cuda).to(dtype) for _ in range(2))
    gate_up = torch.randn((num_rows, 2 * size), device=cuda).to(dtype)
    (added, normed), gated = triton.add_norm(hidden, update, norm), triton.gate(gate_up)
    expected, expected_norm = LayerOps().add_norm(hidden, update, norm)
    assert torch.equal(added, expected)
    limit = (8 if dtype is torch.float32 else 2) * torch.finfo(dtype).eps
    torch.testing.assert_close(normed, expected_norm, rtol=limit, atol=0)
    torch.testing.assert_close(gated, LayerOps().gate(gate_up), rtol=2 * limit, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (16, 1, 80), (4, 4, 32)])
def test_rotations_are_torchs(
    cuda: torch.device, triton: LayerOps, heads: tuple[int, int, int], qk_norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    rope = Rope.plain(1e4, head_dim)
    config = ModelConfig("LlamaForCausalLM", 16, 64, 64, 1, *heads, 1e-5, rope, 512, qk_norm=qk_norm)
    attention, rotary = (
        Attention(config, dtype=dtype, device=cuda),
        Rotary(config.rope, 512, device=cuda),
    )
    if attention.qk_norm is not None:
        attention.qk_norm.weight.copy_(torch.randn_like(attention.qk_norm.weight))
    rows = torch.randn((64, num_heads + 2 * num_kv_heads, head_dim), device=cuda).to(dtype)
    positions, slots = torch.arange(448, 512, device=cuda), torch.randperm(128, device=cuda)[:64]
    blocks = torch.zeros((64, 8), dtype=torch.int64, device=cuda)
    paged = PagedRows(slots, torch.ones(64, dtype=torch.int64, device=cuda), blocks)
    found = []
    for ops in (triton, LayerOps()):
        cache = KVCache(KVShape(1, num_kv_heads, head_dim), 128, dtype=dtype, device=cuda)
        attend = KernelAttention(cache, paged.slots, paged, lambda query, *_: query)
        query = ops.attend(rows, attention, ops.rotation(rotary, positions, rows), attend, 0)
        found.append((query, cache.data))
    for ours, expected in zip(*found, strict=True):
        if qk_norm or dtype is torch.float32:
            limit = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(ours, expected, rtol=limit, atol=limit * float(expected.abs().max()))
        else:
            assert torch.equal(ours, expected)
