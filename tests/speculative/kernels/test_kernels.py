"""The CPU kernels compute what torch computes, and every row on its own: the same bits in any company."""

import ctypes
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.kernels import bindings
from speculative.kernels import library as kernels_library
from speculative.kernels.bindings import Kernels
from speculative.kernels.library import cpu_kernels, find_kernels
from speculative.model.attention import NativeStep, StepAttention
from speculative.model.config import PLAIN, ScoreRule
from speculative.model.cpu.native import NativeLinear, NativeNorm
from speculative.model.decoder import Decoder
from speculative.model.layers import Linear, RMSNorm
from speculative.model.loading import load_decoder
from speculative.model.quantized import quantize
from speculative.state.batch import AttentionRows
from speculative.state.kv_cache import KVCache, KVShape
from tests.support.tiny_models import write_tiny_model
from tests.support.vocabulary import needs_kernels

CPU = torch.device("cpu")
FORMS: tuple[str, ...] = ("float32", "bfloat16", "w4a8")
KINDS = (*FORMS, "int8")  # which has 16-bit activations, and is for LM heads
TILES = "bfloat16 by tiles"  # of AMX, emulated
FAMILIES = ("llama_biased", "llama3", "smollm", "mistral", "qwen3")


def compiled() -> Kernels:
    kernels = cpu_kernels()
    assert kernels is not None
    return kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def kernels(kind: str, request: pytest.FixtureRequest) -> Kernels:
    return request.getfixturevalue("tiles") if kind == TILES else compiled()  # type: ignore[no-any-return]


def native(
    kernels: Kernels, kind: str, num_inputs: int, num_outputs: int, *, biased: bool = True
) -> tuple[NativeLinear, Tensor, Tensor]:
    """A product of these kernels, and the weight and bias it stands for; that bias is zero where it has none."""
    linear = Linear(num_inputs, num_outputs, bias=biased, dtype=torch.float32, device=CPU)
    linear.weight.copy_(random(num_outputs, num_inputs, seed=1))
    bias = random(num_outputs, seed=2) * biased
    if linear.bias is not None:
        linear.bias.copy_(bias)
    given: Any = "bfloat16" if kind == TILES else kind
    weight = linear.weight.detach().clone() if kind == "float32" else linear.weight.bfloat16().float()
    if kind in ("w4a8", "int8"):
        given = quantize(linear.weight, 4 if kind == "w4a8" else 8)
        weight = given.to_float()
    return NativeLinear(linear, kernels, given), weight, bias


def as_read(kind: str, rows: Tensor) -> Tensor:
    """What a product of this kind makes of its rows: integers of blocks of 32, as said in kernels.h."""
    if kind == "float32":
        return rows
    if kind in ("bfloat16", TILES):
        return rows.bfloat16().float()
    most = torch.tensor(127.0 if kind == "w4a8" else 32512.0)
    blocks = rows.unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    rounded: Tensor = (blocks * (most / largest)).round() * (largest / most)
    return rounded.flatten(1)


@needs_kernels
@pytest.mark.parametrize(("num_outputs", "biased"), [(32, True), (75, True), (32, False), (75, False)])
@pytest.mark.parametrize(
    ("kind", "num_inputs"), [*((kind, 96) for kind in (*KINDS, TILES)), ("float32", 41), ("bfloat16", 41)]
)
def test_a_product(kernels: Kernels, kind: str, num_inputs: int, num_outputs: int, biased: bool) -> None:
    linear, weight, bias = native(kernels, kind, num_inputs, num_outputs, biased=biased)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 70):
        rows = random(num_rows, 200)[:, :num_inputs]  # strided, as in a forward
        expected = as_read(kind, rows).double() @ weight.double().T + bias.double()
        torch.testing.assert_close(linear(rows).double(), expected, rtol=0, atol=2e-4 if kind == TILES else 1e-4)


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("num_inputs", "biased"), [(64, False), (1536, True)])
@pytest.mark.parametrize("kind", [*KINDS, TILES])
def test_a_row_is_the_same_bits_in_any_company_on_any_number_of_threads(
    kernels: Kernels, kind: str, num_inputs: int, biased: bool
) -> None:
    linear, _, _ = native(kernels, kind, num_inputs, 80, biased=biased)
    rows = random(37, num_inputs)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row) for row in rows.split(1)])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for size in (5, 16, 20, 37):
            assert torch.equal(torch.cat([linear(part) for part in rows.split(size)]), alone)


@needs_kernels
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", [*KINDS, TILES])
def test_a_row_that_is_no_number_stays_none_and_harms_no_other(kernels: Kernels, kind: str, damage: float) -> None:
    linear, _, _ = native(kernels, kind, 64, 32)
    rows = random(3, 64)
    sound = linear(rows)
    rows[1, 40] = damage
    spoilt = linear(rows)
    assert not spoilt[1].isfinite().any()
    assert torch.equal(spoilt[[0, 2]], sound[[0, 2]])


@needs_kernels
def test_extreme_rows_are_multiplied_too() -> None:
    linear, weight, bias = native(compiled(), "int8", 64, 32)
    for scale in (0.0, 1e-30, 1e30):
        rows = random(2, 64) * scale
        expected = rows.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(linear(rows).double(), expected, rtol=1e-3, atol=1e-3 * max(scale, 1e-3))


@needs_kernels
def test_a_norm() -> None:
    norm = RMSNorm(75, 1e-5, dtype=torch.float32, device=CPU)
    norm.weight.data.copy_(random(75))
    rows = random(5, 100)[:, :75] * 3
    ours = NativeNorm(norm, compiled())
    torch.testing.assert_close(ours(rows), norm(rows).detach(), rtol=1e-5, atol=1e-6)


def cache_with(num_slots: int, dtype: torch.dtype, *, head_dim: int = 32, layers: int = 2) -> KVCache:
    cache = KVCache(KVShape(layers, 2, head_dim), num_slots, dtype=dtype, device=CPU)
    cache.data.copy_(random(*cache.data.shape, seed=5))
    return cache


def three_sequences() -> tuple[AttentionRows, int]:
    """A prefill, a long context with drafts behind it, and a single pending token, on scattered slots."""
    slots = np.random.default_rng(0).permutation(200)
    contexts = (slots[:21], slots[30:100], slots[110:147])
    own = (21, 5, 1)
    return AttentionRows(
        slots=np.concatenate([context[-n:] for context, n in zip(contexts, own, strict=True)]),
        row_starts=np.cumsum([0, *own]),
        context_slots=contexts,
    ), sum(own)


def attended(
    kernels: Kernels,
    qkv: Tensor,
    num_heads: int,
    chunks: list[int],
    scores: ScoreRule = PLAIN,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Attention of one sequence [N, num_heads + 4, head_dim] in chunks, over a cache with two heads."""
    num_slots = max(200, len(qkv))
    slots = np.random.default_rng(0).permutation(num_slots)
    cache = cache_with(num_slots, dtype, head_dim=qkv.shape[2])
    parts, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        step = NativeStep(kernels, cache, AttentionRows(slots[begin:end], np.array([0, chunk]), (slots[:end],)))
        parts.append(step.attend(1, *qkv[begin:end].split((num_heads, 2, 2), dim=1), scores))
        begin = end
    return torch.cat(parts)


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(window=20, cap=2.0), ScoreRule(scale=0.2)])
@pytest.mark.usefixtures("two_threads")
def test_attention(rule: ScoreRule, head_dim: int, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    rows, count = three_sequences()
    ours, theirs = cache_with(200, dtype, head_dim=head_dim), cache_with(200, dtype, head_dim=head_dim)
    qkv = random(count, 10, head_dim)
    query, key, value = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    found = StepAttention(ours, rows, compiled())(1, query, key, value, rule)
    plain = StepAttention(theirs, rows)
    expected = plain(1, *(part.to(dtype) for part in (query, key, value)), rule)
    assert torch.equal(ours.data, theirs.data), "what is stored"
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)


def hidden_states(
    decoder: Decoder,
    ids: Tensor,
    chunks: list[int],
    capture: tuple[int, ...] = (),
    cache_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Hidden states and features of one sequence, computed in chunks; and its cache."""
    config = decoder.config
    shape = config.kv_shape
    cache = KVCache(shape, 64, dtype=cache_dtype, device=CPU)
    parts, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        rows = AttentionRows(np.arange(begin, end), np.array([0, chunk]), (np.arange(end),))
        attend = StepAttention(cache, rows, decoder.kernels.model)
        parts.append(decoder.run(ids[begin:end], torch.arange(begin, end), attend, capture))
        begin = end
    return [torch.cat(part) for part in zip(*parts, strict=True)] + [cache.data]


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    plain = load_decoder(folder, dtype=torch.float32, device="cpu")
    packed = load_decoder(folder, dtype=torch.float32, device="cpu", weights="float32")
    assert packed.fused is not None
    ids = torch.arange(7, 47)
    expected = hidden_states(plain, ids, [40], (0, 1, 2))
    for found, wanted in zip(hidden_states(packed, ids, [40], (0, 1, 2)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.logits(expected[0]), plain.logits(expected[0]), rtol=1e-4, atol=1e-4)
    packed.fused = None  # module after module
    for found, wanted in zip(hidden_states(packed, ids, [40], (0, 1, 2)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", FORMS)
def test_a_token_is_the_same_bits_in_any_chunk(weights: str, cache_dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model(tmp_path), dtype=torch.float32, device="cpu", weights=weights)
    ids = torch.arange(7, 47)
    whole = hidden_states(decoder, ids, [40], (1,), cache_dtype)
    for chunks in ([1] * 40, [17, 4, 4, 1, 14]):
        found = hidden_states(decoder, ids, chunks, (1,), cache_dtype)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@needs_kernels
def test_four_bit_weights_are_those_of_the_rounded_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    packed = load_decoder(folder, dtype=torch.float32, device="cpu", weights="w4a8")
    rounded = load_decoder(folder, dtype=torch.float32, device="cpu")
    for linear in (module for module in rounded.modules() if isinstance(module, Linear)):
        linear.weight.copy_(quantize(linear.weight, 8 if linear is rounded.lm_head else 4).to_float())
    ids = torch.arange(7, 47)
    found, expected = (hidden_states(decoder, ids, [40])[0] for decoder in (packed, rounded))
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.05
    torch.testing.assert_close(packed.logits(expected), rounded.logits(expected), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("capability", "said"), [("AVX512", "install g++"), ("DEFAULT", "AVX-512 or AVX2")])
def test_without_a_compiler_or_avx2_there_are_none_and_it_is_said_why(
    capability: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    why = find_kernels.__wrapped__()
    assert isinstance(why, str) and said in why


@needs_kernels
def test_what_does_not_compile_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text("#error this does not compile\n")
    monkeypatch.setattr(kernels_library, "_SOURCES", (source,))
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        why = find_kernels.__wrapped__()
    assert isinstance(why, str) and "g++" in why
    assert "this does not compile" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


@needs_kernels
def test_what_was_compiled_is_kept_elsewhere_if_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").touch()  # no folder can be made in it, as on a volume that is read-only
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert isinstance(find_kernels.__wrapped__(), Kernels)
    assert f"cannot be kept in {tmp_path / 'cache'}" in caplog.text
    (library,) = tmp_path.rglob("*.so")
    assert library.parent.stat().st_mode & 0o777 == 0o700
    made = library.stat().st_mtime_ns
    (chosen,) = tmp_path.rglob("*.prefetch.json")
    chosen.write_text(json.dumps([3, 1, 0, 1, 0, 1]), encoding="utf-8")
    again = find_kernels.__wrapped__()
    assert isinstance(again, Kernels)
    assert library.stat().st_mtime_ns == made
    assert tuple(again._ways) == (3, 1, 0, 1, 0, 1), "they are set as they were measured"
    for spoilt in ("[3, 1]", "{", '["near"]'):
        chosen.write_text(spoilt, encoding="utf-8")
        assert isinstance(find_kernels.__wrapped__(), Kernels)
        assert len(json.loads(chosen.read_text(encoding="utf-8"))) == len(again._ways), "it was measured again"
    library.parent.chmod(0o777)  # anybody may have put something there
    other = kernels_library._own_folder()
    assert other != library.parent and other.stat().st_mode & 0o777 == 0o700


@needs_kernels
def test_a_struct_that_differs_from_its_mirror_is_refused_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compiled()
    library = ctypes.CDLL(kernels.file)
    assert bindings.misplaced_fields(library) == []

    class Swapped(ctypes.Structure):
        """`Linear` with its counts before its pointers, and one field less."""

        _fields_ = (
            ("num_inputs", ctypes.c_int64),
            ("num_outputs", ctypes.c_int64),
            ("weight", ctypes.c_void_p),
            ("bias", ctypes.c_void_p),
        )

    monkeypatch.setitem(bindings._MIRRORED, "Linear", Swapped)
    with pytest.raises(RuntimeError, match=r"Linear: 40 in the kernels, 32 in bindings.py; Linear.bias: 8 .*, 24 "):
        Kernels(library)
    assert "Linear.kind: 32 in the kernels, None in bindings.py" in bindings.misplaced_fields(library)
