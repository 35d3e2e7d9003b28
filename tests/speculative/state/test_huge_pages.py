"""Weights and the KV cache in large pages: nothing changes, nothing overlaps, and all lives as long as it is held."""

import gc
import mmap

import pytest
import torch

from speculative.state.huge_pages import PAGE, HugePages
from speculative.state.kv_cache import KVCache, KVShape


def tensors() -> list[torch.Tensor]:
    shapes = [(3, 5), (1,), (700, 1000), (4, 33, 7), (40_000, 1_000), (64,)]
    dtypes = [torch.bfloat16, torch.uint8, torch.float32, torch.int32, torch.int16, torch.float32]
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 100, shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("supported", [True, False])
def test_what_is_kept_stays_as_it_was(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    given = tensors()
    given[2] = given[2].t()
    pages = HugePages()
    kept = [pages.keep(tensor) for tensor in given]
    for tensor in kept:
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    expected = [tensor.clone() for tensor in given]
    del pages, given
    gc.collect()
    for index, tensor in enumerate(kept):
        assert torch.equal(tensor, expected[index]) and tensor.dtype == expected[index].dtype
        tensor.zero_()
        assert all(
            torch.equal(other, same) for other, same in zip(kept[index + 1 :], expected[index + 1 :], strict=True)
        )


def keys_and_values() -> torch.Tensor:
    return KVCache(KVShape(2, 4, 64), 8192, dtype=torch.bfloat16, device=torch.device("cpu")).data


@pytest.mark.parametrize("supported", [True, False])
def test_a_cache_begins_with_zeros(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    data = keys_and_values()
    assert data.shape == (2, 2, 8192, 4, 64) and data.dtype == torch.bfloat16 and data.is_contiguous()
    assert not data.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without such pages")
@pytest.mark.parametrize("kind", ["weights", "cache"])
def test_large_pages_are_asked_for(kind: str) -> None:
    kept = keys_and_values() if kind == "cache" else HugePages().keep(torch.ones(3 * PAGE, dtype=torch.uint8))
    assert kept.data_ptr() % PAGE == 0
    start, flags = "", ""
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            if "-" in line.split()[0] and ":" not in line.split()[0]:
                low, high = (int(part, 16) for part in line.split()[0].split("-"))
                start = line if low <= kept.data_ptr() < high else ""
            elif start and line.startswith("VmFlags"):
                flags = line
    assert " hg" in flags
