"""Products by the tiles of AMX, emulated in C++, and the choice between them and AVX-512."""

import ctypes
import json
import logging
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculative.kernels import library as kernels_library
from speculative.kernels.bindings import Kernels, LinearStruct, ShapeStruct, StepStruct
from speculative.kernels.library import cpu_kernels
from speculative.kernels.tiles import (
    _wrong_attention,
    _wrong_products,
    measured_attention,
    measured_tiles,
)
from speculative.model.attention import StepAttention
from speculative.model.loading import load_decoder
from tests.speculative.kernels.test_kernels import attended, cache_with, hidden_states, native, random, three_sequences
from tests.support.tiny_models import write_tiny_model
from tests.support.vocabulary import needs_kernels

pytestmark = needs_kernels


def test_tiles_round_in_another_order_than_avx512(tiles: Kernels) -> None:
    """So a product that has no whole tiles of inputs is left to AVX-512, whatever its rows."""
    rows = random(20, 576)
    found = []
    for num_inputs in (576, 570):
        linear, _, _ = native(tiles, "bfloat16", num_inputs, 64)
        tiles.by_tiles = True
        by_tiles = linear(rows[:, :num_inputs])
        tiles.by_tiles = False
        found.append(torch.equal(by_tiles, linear(rows[:, :num_inputs])))
    assert found == [False, True]


def test_denormals_count_as_zero(tiles: Kernels) -> None:
    linear, _, bias = native(tiles, "bfloat16", 32, 32)
    assert torch.equal(linear(torch.full((2, 32), 1e-39)), bias.expand(2, -1))


def test_the_emulation_comes_to_the_bits_of_the_processor(tiles: Kernels) -> None:
    kernels = cpu_kernels()
    assert kernels is not None
    if not (kernels.has_tiles and kernels.permit_tiles()):
        pytest.skip("this processor has no AMX")
    before = kernels.by_tiles, kernels.attends_by_tiles
    found = []
    for one in (tiles, kernels):
        one.by_tiles = one.attends_by_tiles = True
        linear, _, _ = native(one, "bfloat16", 576, 96)
        products = linear(random(70, 576) * torch.logspace(-3, 3, 70)[:, None])
        found.append((products, attended(one, random(105, 6 + 4, 64), 6, [105])))
    kernels.by_tiles, kernels.attends_by_tiles = before
    assert all(torch.equal(emulated, ours) for emulated, ours in zip(*found, strict=True))


def tile_products(kernels: Kernels) -> int:
    """Products of two tiles that were emulated so far."""
    return c_int64.in_dll(ctypes.CDLL(kernels.file), "truespec_emulated_products").value


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("head_dim", "num_heads"), [(32, 2), (64, 6), (96, 34), (128, 64)])
def test_attention(head_dim: int, num_heads: int, num_threads: int, tiles: Kernels) -> None:
    torch.set_num_threads(num_threads)
    rows, count = three_sequences()
    qkv = random(count, num_heads + 4, head_dim)
    query, key, value = qkv.split((num_heads, 2, 2), dim=1)
    found = []
    for by_tiles in (True, False):
        tiles.attends_by_tiles = by_tiles
        found.append(
            StepAttention(cache_with(200, torch.bfloat16, head_dim=head_dim), rows, tiles)(1, query, key, value)
        )
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)  # a weight may be rounded to the next bfloat16
    assert not torch.equal(*found), "tiles were used: they round in another order"


@pytest.mark.parametrize(("head_dim", "num_heads"), [(80, 6), (64, 66)])
def test_attention_that_has_no_whole_tiles_is_left_to_avx512(head_dim: int, num_heads: int, tiles: Kernels) -> None:
    qkv = random(20, num_heads + 4, head_dim)
    by_avx512 = attended(tiles, qkv, num_heads, [20])
    tiles.attends_by_tiles = True
    assert torch.equal(attended(tiles, qkv, num_heads, [20]), by_avx512)


@pytest.mark.parametrize(("head_dim", "num_heads"), [(32, 2), (64, 6), (64, 34)])
def test_attention_of_a_row_is_the_same_bits_in_any_company_on_any_number_of_threads(
    head_dim: int, num_heads: int, tiles: Kernels
) -> None:
    tiles.attends_by_tiles = True
    qkv = random(105, num_heads + 4, head_dim)
    torch.set_num_threads(1)
    alone = attended(tiles, qkv, num_heads, [1] * 105)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for chunks in ([105], [31, 1, 1, 40, 32], [30, 7, 64, 4]):
            assert torch.equal(attended(tiles, qkv, num_heads, chunks), alone)


def test_a_token_is_the_same_bits_in_any_chunk(tiles: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that tiles do: products and attention, whose rounding differs from AVX-512's."""
    monkeypatch.setattr("speculative.kernels.chosen.cpu_kernels", lambda: tiles)
    folder = write_tiny_model(tmp_path, "mistral")  # with heads of 32
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu", weights="bfloat16")
    ids = torch.arange(7, 47)
    tiles.by_tiles, before = False, tile_products(tiles)
    plain = hidden_states(decoder, ids, [40], cache_dtype=torch.bfloat16)
    assert tile_products(tiles) == before
    tiles.by_tiles = tiles.attends_by_tiles = True
    whole = hidden_states(decoder, ids, [40], cache_dtype=torch.bfloat16)
    assert decoder.kernels.model is tiles
    assert not torch.equal(plain[0], whole[0])
    assert tile_products(tiles) > before
    torch.testing.assert_close(plain[0], whole[0], rtol=0, atol=0.02)
    for chunks in ([1] * 40, [17, 4, 4, 1, 14]):
        found = hidden_states(decoder, ids, chunks, cache_dtype=torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_kernels_that_round_differently_have_different_names(tiles: Kernels) -> None:
    names = set()
    for by_tiles in (False, True):
        for attends_by_tiles in (False, True):
            tiles.by_tiles, tiles.attends_by_tiles = by_tiles, attends_by_tiles
            names.add(tiles.name)
    assert len(names) == 4


@dataclass
class Machine:
    """Our kernels on a machine whose tiles err as told, on a clock of its own."""

    share: float = 0.1
    least_gain: int = 1
    error: float = 0.0
    error_of_batches: float = 0.0
    permits: bool = True
    has_tiles: bool = True
    by_tiles: bool = False
    attends_by_tiles: bool = False
    now: float = 0.0
    measured: int = 0

    def permit_tiles(self) -> bool:
        return self.permits

    def linear(self, linear: LinearStruct, rows: Tensor) -> Tensor:
        self.measured += 1
        self.now += self.share if self.by_tiles and len(rows) >= self.least_gain else 1.0
        if linear.num_outputs > 96:
            return rows
        kernels = cpu_kernels()
        assert kernels is not None
        found = kernels.linear(linear, rows)
        return found + self.by_tiles * (self.error + self.error_of_batches * (len(rows) > 1))

    def attend(
        self, shape: ShapeStruct, step: StepStruct, cache: Tensor, layer: int, heads: tuple[Tensor, ...]
    ) -> Tensor:
        self.measured += 1
        num_rows = step.num_rows
        self.now += self.share if self.attends_by_tiles and num_rows >= self.least_gain else 1.0
        error = self.error + self.error_of_batches * (num_rows > 1)
        return heads[0] + error if self.attends_by_tiles else heads[0]


@pytest.mark.parametrize(
    ("measured", "field", "machine", "chosen", "why"),
    [
        (measured_tiles, "by_tiles", Machine(share=0.1), True, "took 0.10 of the time"),
        (measured_tiles, "by_tiles", Machine(share=0.98), False, "took 0.98 of the time"),
        (measured_tiles, "by_tiles", Machine(error=torch.nan), False, "are wrong on this machine"),
        (measured_tiles, "by_tiles", Machine(error_of_batches=1e-5), False, "depend on the number of rows"),
        (measured_attention, "attends_by_tiles", Machine(share=0.4, least_gain=2), True, "took 0.70 of the time"),
        (measured_attention, "attends_by_tiles", Machine(share=0.98), False, "took 0.98 of the time"),
        (measured_attention, "attends_by_tiles", Machine(error=0.1), False, "is wrong on this machine"),
        (measured_attention, "attends_by_tiles", Machine(error=torch.nan), False, "is wrong on this machine"),
        (measured_attention, "attends_by_tiles", Machine(error_of_batches=1e-5), False, "depends on the number"),
    ],
)
def test_tiles_are_taken_where_they_are_right_and_gain_time(
    measured: Callable[..., Any], field: str, machine: Machine, chosen: int, why: str
) -> None:
    found, said = measured(machine, lambda: machine.now)
    assert (found, getattr(machine, field)) == (chosen, chosen)
    assert why in said


def test_the_emulation_passes_the_check_of_a_machine(emulation: Kernels) -> None:
    assert _wrong_products(emulation) == ""
    assert _wrong_attention(emulation) == ""


def test_the_choice_is_logged_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, first, second = tmp_path / "kernels-1.so", Machine(least_gain=4), Machine()
    for measured in (measured_tiles, measured_attention):
        in_its_time = partial(measured, clock=lambda: first.now)
        monkeypatch.setattr(kernels_library, measured.__name__, in_its_time)
    with caplog.at_level(logging.INFO):
        for machine in (first, second):
            kernels_library._set_tiles(machine, library)  # type: ignore[arg-type]
            assert (machine.by_tiles, machine.attends_by_tiles) == (True, True)
    assert first.measured > 0 and second.measured == 0
    assert caplog.text.count("computed by AMX tiles: products by AMX tiles took") == 1
    assert caplog.text.count("computed by AMX tiles: attention by AMX tiles took 0.55 of the time") == 1


@pytest.mark.parametrize("kept", ["", "true", "[true]", '[true, "1"]', "[true, null]", "[true, true, true]"])
def test_of_a_kept_choice_that_was_altered_nothing_is_taken(tmp_path: Path, kept: str) -> None:
    library, machine = tmp_path / "kernels-1.so", Machine(error=0.1)
    file = kernels_library._kept_choice(library, "tiles")
    file.write_text(kept, encoding="utf-8")
    kernels_library._set_tiles(machine, library)  # type: ignore[arg-type]
    assert (machine.by_tiles, machine.attends_by_tiles) == (False, False)
    assert json.loads(file.read_text(encoding="utf-8")) == [False, False]


def test_a_machine_that_refuses_its_registers_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = tmp_path / "kernels-1.so"
    machine = Machine(permits=False)
    with caplog.at_level(logging.INFO):
        kernels_library._set_tiles(machine, library)  # type: ignore[arg-type]
    assert "Linux does not give this process the registers of AMX" in caplog.text
    assert not machine.by_tiles and not list(tmp_path.iterdir())
