"""Fused layer operations, in Triton's interpreter, against torch's operators."""

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.gpu.paged_attention import KernelAttention, PagedRows
from speculative.model.attention import CacheAttention
from speculative.model.config import ModelConfig
from speculative.model.fp8 import E4M3, ScaledRows, quantize_rows
from speculative.model.layers import Attention, LayerOps, RMSNorm, use_layer_ops
from speculative.model.loading import load_decoder
from speculative.model.rotary import Rope, Rotary
from speculative.state.kv_cache import KVCache, KVShape
from tests.support.tiny_models import write_tiny_model
from tests.support.torch_operators import TorchAttend
from tests.support.triton_interpreter import needs_triton, nobodys

pytestmark = [pytest.mark.slow, needs_triton]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Units in the last place. The interpreter cuts bfloat16 off where a GPU rounds.
NORM_UNITS = {torch.float32: 8, torch.float16: 1, torch.bfloat16: 2}
GATE_UNITS = {torch.float32: 8, torch.float16: 2, torch.bfloat16: 4}
PAIRS = [(64, 1, torch.float32), (576, 3, torch.float16), (1536, 64, torch.bfloat16), (576, 64, torch.float32)]
NUM_SLOTS, TRASH = 96, 95
TORCH = LayerOps()


@pytest.fixture
def triton() -> LayerOps:
    from speculative.gpu.triton_layers import TritonLayerOps

    return TritonLayerOps()


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def units(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units in the last place."""
    assert found.dtype == expected.dtype
    _, exponents = torch.frexp(expected.double())
    unit = torch.finfo(expected.dtype).eps * torch.exp2(exponents.double() - 1)
    return float(((found.double() - expected.double()).abs() / unit).max())


@pytest.mark.parametrize(("size", "num_rows", "dtype"), PAIRS)
def test_sum_and_norm(triton: LayerOps, size: int, num_rows: int, dtype: torch.dtype) -> None:
    hidden, update = drawn(num_rows, size, dtype=dtype), drawn(num_rows, size, dtype=dtype, seed=1)
    norm = RMSNorm(size, 1e-5, dtype=dtype, device=CPU)
    norm.weight.copy_(drawn(size, dtype=dtype, seed=2))
    added, normed = triton.add_norm(hidden, update, norm)
    expected, expected_norm = TORCH.add_norm(hidden, update, norm)
    if dtype is torch.bfloat16:
        assert units(added, expected) <= 1
        expected_norm = norm(added)
    else:
        assert torch.equal(added, expected)
    assert units(normed, expected_norm) <= NORM_UNITS[dtype]
    alone = triton.add_norm(hidden[:1], update[:1], norm)
    assert torch.equal(alone[0], added[:1]) and torch.equal(alone[1], normed[:1]), "a row is a function of itself"


@pytest.mark.parametrize(("size", "num_rows", "dtype"), PAIRS)
def test_gate(triton: LayerOps, size: int, num_rows: int, dtype: torch.dtype) -> None:
    gate_up = drawn(num_rows, 2 * size, dtype=dtype)
    assert units(triton.gate(gate_up), TORCH.gate(gate_up)) <= GATE_UNITS[dtype]
    ends = torch.tensor([[gate] * 3 + [1.0, -1.0, 0.5] for gate in (-60.0, -0.0, 0.0, 60.0, torch.inf)])
    assert torch.allclose(triton.gate(ends), TORCH.gate(ends), rtol=1e-6, atol=0)


@pytest.fixture(params=[torch.float32, torch.float16], ids=["9.0", "8.9"])
def rounded_fp8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry of a mantissa that is rounded up: here torch rounds, as a GPU does; of
    compute capability 8.9 by way of float16."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, to: Any, mode: Any) -> Any:
        if to != tl.float8e4nv:
            return convert(data, source, to, mode)
        return torch.from_numpy(data).to(request.param).to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def assert_same_rows(found: ScaledRows, expected: ScaledRows) -> None:
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.numbers.float(), expected.numbers.float())


@pytest.mark.usefixtures("rounded_fp8")
@pytest.mark.parametrize(("size", "num_rows", "dtype"), [*PAIRS, (80, 3, torch.bfloat16), (5000, 1, torch.float16)])
def test_rows_are_quantized_alike(triton: LayerOps, size: int, num_rows: int, dtype: torch.dtype) -> None:
    rows = drawn(num_rows, size, dtype=dtype)
    rows[num_rows // 2] = 0
    rows[-1, -1] = 1e4
    assert_same_rows(triton.quantize(rows), quantize_rows(rows))


@pytest.mark.usefixtures("rounded_fp8")
@pytest.mark.parametrize(("size", "dtype"), list(zip((80, 576, 5000), DTYPES, strict=True)))
def test_what_a_norm_or_a_gate_quantizes_at_once_is_what_it_gives_rounded(
    triton: LayerOps, size: int, dtype: torch.dtype
) -> None:
    hidden, update = drawn(3, size, dtype=dtype), drawn(3, size, dtype=dtype, seed=1)
    hidden[1] = update[1] = 0
    found = []
    for feeds_fp8 in (True, False):
        norm = RMSNorm(size, 1e-5, dtype=dtype, device=CPU, feeds_fp8=feeds_fp8)
        norm.weight.copy_(drawn(size, dtype=dtype, seed=2))
        found.append(triton.add_norm(hidden, update, norm))
    (added, quantized), (expected, normed) = found
    assert isinstance(quantized, ScaledRows) and isinstance(normed, Tensor)
    assert torch.equal(added, expected)
    assert_same_rows(quantized, quantize_rows(normed))
    gate_up = drawn(3, 2 * size, dtype=dtype)
    gate_up[1, size:] = 0
    quantized, gated = triton.gate(gate_up, feeds_fp8=True), triton.gate(gate_up)
    assert isinstance(quantized, ScaledRows) and isinstance(gated, Tensor)
    assert_same_rows(quantized, quantize_rows(gated))


@pytest.mark.usefixtures("rounded_fp8")
def test_rows_that_are_no_numbers_stay_so(triton: LayerOps) -> None:
    rows = torch.ones(4, 80)
    rows[0, 3], rows[1, 7], rows[2], rows[3, 5] = torch.nan, torch.inf, torch.nan, 1e-45
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # the interpreter computes with numpy
        numbers = triton.quantize(rows).numbers
    has_nan = numbers.float().isnan().any(1)
    assert has_nan.tolist() == [True, True, True, False]


class QueriesAlone(CacheAttention):
    """Gives the query back."""

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        self.cache, self.slots = cache, slots

    def attend_stored(self, layer: int, query: Tensor, *_: object) -> Tensor:
        assert layer == 1
        return query.contiguous()


@pytest.mark.parametrize(
    ("heads", "num_rows", "qk_norm", "dtype"),
    [
        ((9, 3, 64), 64, False, torch.float16),
        ((15, 5, 80), 3, True, torch.float32),
        ((7, 1, 96), 1, False, torch.bfloat16),
        ((7, 1, 96), 64, True, torch.float16),
        ((4, 4, 128), 3, False, torch.float32),
        ((6, 2, 256), 3, True, torch.bfloat16),
    ],
)
def test_rotation_and_storing(
    triton: LayerOps, heads: tuple[int, int, int], qk_norm: bool, num_rows: int, dtype: torch.dtype
) -> None:
    """Every third row stands for nothing: all of them go to one slot, and what is there means nothing."""
    rope = Rope.plain(1e4, heads[2])
    config = ModelConfig("LlamaForCausalLM", 16, 64, 64, 2, *heads, 1e-5, rope, 512, qk_norm=qk_norm)
    attention, rotary = (
        Attention(config, dtype=dtype, device=CPU),
        Rotary(config.rope, 512, device=CPU),
    )
    if attention.qk_norm is not None:
        attention.qk_norm.weight.copy_(drawn(*attention.qk_norm.weight.shape, dtype=dtype, seed=3))
    random = torch.Generator().manual_seed(4)
    slots, positions = (torch.randperm(size, generator=random)[:num_rows] for size in (TRASH, 512))
    slots[2::3], positions[2::3] = TRASH, 0
    rows = drawn(num_rows, heads[0] + 2 * heads[1], heads[2], dtype=dtype)
    queries, caches = [], []
    for ops in (triton, TORCH):
        cache = KVCache(KVShape(2, heads[1], heads[2]), NUM_SLOTS, dtype=dtype, device=CPU)
        cache.data.fill_(torch.nan)
        rotation = ops.rotation(rotary, positions, rows)
        with nobodys(cache.data[:, :, TRASH:]):
            queries.append(ops.attend(rows, attention, rotation, QueriesAlone(cache, slots), 1))
        caches.append(cache.data[:, :, :TRASH])
    written = caches[0].isfinite()
    assert torch.equal(written, caches[1].isfinite()), "the slots of the rows, and no others"
    assert torch.equal(caches[0][1, 1][written[1, 1]], caches[1][1, 1][written[1, 1]]), "values are only copied"
    for found, expected in ((queries[0], queries[1]), (caches[0][written], caches[1][written])):
        if dtype is torch.float16 and not qk_norm:
            assert torch.equal(found, expected)
        else:  # relative to the numbers that were rotated: differences of like ones are small
            roundings = 4 if dtype is torch.bfloat16 else 2
            limit = roundings * (1 + qk_norm) * torch.finfo(dtype).eps * float(expected.abs().max())
            assert (found.double() - expected.double()).abs().max() <= limit


IDS, POSITIONS = torch.tensor([5, 6, 7, 8, 9, 0]), torch.tensor([0, 1, 2, 0, 1, 0])


def two_sequences(config: ModelConfig) -> KernelAttention[PagedRows]:
    """Over an empty cache; the last row stands for nothing."""
    slots, blocks = torch.tensor([0, 1, 2, 12, 13, 20]), torch.tensor([[0, 2], [3, 1]])
    cache = KVCache(config.kv_shape, 24, dtype=torch.float32, device=CPU)
    rows = PagedRows(slots, torch.tensor([1, 2, 3, 1, 2, 0]), blocks)
    return KernelAttention(cache, slots, rows, TorchAttend(4))


@pytest.mark.usefixtures("rounded_fp8")
@pytest.mark.parametrize(("family", "weights"), [("qwen2", None), ("qwen3", None), ("llama_biased", "fp8")])
def test_a_whole_decoder(triton: LayerOps, tmp_path: Path, family: str, weights: Literal["fp8"] | None) -> None:
    """With the features that enter every layer. With FP8 weights, a difference in the last bit may round otherwise."""
    folder = write_tiny_model(tmp_path, family)
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu", weights=weights)
    limit = 1e-4 if weights is None else 0.05
    found = []
    for ops in (triton, TORCH):
        use_layer_ops(decoder, ops)
        capture = tuple(range(decoder.config.num_layers + 1))
        found.append(decoder.run(IDS, POSITIONS, two_sequences(decoder.config), capture))
    for ours, expected in zip(*found, strict=True):
        assert torch.allclose(ours[:5], expected[:5], rtol=limit, atol=limit)
