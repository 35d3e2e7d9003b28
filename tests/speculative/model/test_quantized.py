"""Four and eight bits in groups of 32: what rounding costs, what a file keeps, and who gets such weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculative.errors import ConfigError, UnsupportedModel
from speculative.kernels import chosen
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.fingerprint import model_fingerprint
from speculative.model.loading import choose_weights, load_decoder
from speculative.model.quantized import Quantized, load_quantized, quantize, save_quantized
from tests.support.tiny_models import write_tiny_model
from tests.support.vocabulary import needs_kernels

CPU = torch.device("cpu")


def a_weight(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(24, 96, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_stays_within_half_a_step(bits: int, scale: float) -> None:
    weight = a_weight(scale)
    groups = weight.unflatten(1, (-1, 32))
    widths = groups.amax(-1) - groups.amin(-1) if bits == 4 else 2 * groups.abs().amax(-1)
    step = widths[..., None] / (15 if bits == 4 else 254)
    error = (quantize(weight, bits).to_float() - weight).unflatten(1, (-1, 32)).abs()
    assert (error <= 0.5 * step + 2e-3 * widths[..., None]).all(), "scales are float16, so the grid is a little off"


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_all_equal_survive_and_what_is_rounded_already_stays(bits: int) -> None:
    for value in (0.0, 0.5, -2.0):
        weight = torch.full((2, 64), value)
        torch.testing.assert_close(quantize(weight, bits).to_float(), weight, rtol=4e-3, atol=0)
    once = quantize(a_weight(), bits)
    again = quantize(once.to_float(), bits)
    assert torch.equal(again.numbers, once.numbers)


def test_a_file_keeps_every_number(tmp_path: Path) -> None:
    weights = {"a.weight": quantize(a_weight(), 4), "b.weight": quantize(a_weight(), 8)}
    save_quantized(tmp_path, weights)
    loaded = load_quantized(tmp_path)
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name].to_float(), weight.to_float())


def write_beside(folder: Path, own: dict[str, Quantized], values: dict[str, Quantized]) -> None:
    """Numbers, and beside them plain weights as a conversion writes them: `values`, rounded to bfloat16."""
    plain = {name: weight.to_float().bfloat16().float() for name, weight in values.items()}
    save_file(load_file(folder / "model.safetensors") | plain, folder / "model.safetensors")
    save_quantized(folder, own)


@needs_kernels
def test_a_models_own_numbers_come_before_rounding(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    down, query = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    slots = load_decoder(folder, dtype=torch.float32, device=CPU).checkpoint_slots()
    own = {name: quantize(slots[name], 4) for name in (down, query)}
    write_beside(folder, {}, own)
    rounded = load_decoder(folder, dtype=torch.float32, device=CPU, weights="w4a8")
    write_beside(folder, own, own)
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU, weights="w4a8")
    attention = decoder.layers[0].attention
    found = attention.qkv_proj(torch.eye(64)).T[: attention.sizes[0]]
    for exact, given in ((own[down], decoder.layers[0].mlp.down_proj(torch.eye(96)).T), (own[query], found)):
        assert (given - exact.to_float()).abs().max() < 1e-5
    again = rounded.layers[0].mlp.down_proj(torch.eye(96)).T
    assert (again - own[down].to_float()).abs().max() > 1e-4


@needs_kernels
@pytest.mark.parametrize(("weights", "rounds"), [("bfloat16", True), ("w4a8", False)])
def test_the_lm_head_rounds_what_it_reads_where_every_product_does(tmp_path: Path, weights: Any, rounds: bool) -> None:
    """To a bfloat16, never to eight bits: those would move logits by as much as half of all other rounding."""
    decoder = load_decoder(write_tiny_model(tmp_path), dtype=torch.float32, device=CPU, weights=weights)
    hidden = torch.randn(5, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
    hidden[:, :2] = torch.tensor([1, 0.5])
    moved = hidden.clone()
    moved[:, 1] += 2**-10  # a quarter of a bfloat16's step, an eighth of one of eight bits
    assert torch.equal(decoder.logits(hidden), decoder.logits(moved)) is rounds


@needs_kernels
def test_numbers_of_other_weights_than_the_folders_are_refused(tmp_path: Path) -> None:
    """As of a model that was trained further in the folder of a conversion: its numbers are the old ones."""
    folder = write_tiny_model(tmp_path)
    down = "model.layers.1.mlp.down_proj.weight"
    weight = quantize(load_file(folder / "model.safetensors")[down], 4)
    one_step = Quantized(
        weight.numbers ^ (torch.arange(weight.numbers.numel()) == 7).view_as(weight.numbers),
        weight.scales,
        weight.least,
    )
    write_beside(folder, {down: weight}, {down: weight})
    load_decoder(folder, dtype=torch.float32, device=CPU, weights="w4a8")
    for own in ({down: one_step}, {"model.layers.9.mlp.down_proj.weight": weight}, {"model.norm.weight": weight}):
        write_beside(folder, own, {down: weight})
        with pytest.raises(ConfigError, match=rf"{QUANTIZED_FILE}: {next(iter(own))} is not the weight.*remove"):
            load_decoder(folder, dtype=torch.float32, device=CPU, weights="w4a8")


def test_a_fingerprint_reports_the_weights(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    plain = model_fingerprint(folder)
    rounded = model_fingerprint(folder, weights="w4a8")
    assert len({plain, rounded, model_fingerprint(folder, weights="fp8")}) == 3
    assert model_fingerprint(folder, weights="bfloat16") == plain, "the checkpoint's own, whoever multiplies"
    save_quantized(folder, {"a.weight": quantize(a_weight(), 4)})
    assert model_fingerprint(folder) == plain
    assert model_fingerprint(folder, weights="w4a8") != rounded


def test_without_kernels_weights_are_torchs_own_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "cpu_kernels", lambda: None)
    save_quantized(tmp_path, {})
    for wanted in ("auto", "bfloat16"):
        assert choose_weights(wanted, tmp_path, dtype="bfloat16", device=CPU) == "bfloat16"
    for device in (CPU, torch.device("cuda")):
        with pytest.raises(ConfigError, match=r"quantization: w4a8 .* needs a CPU with AVX-512 or AVX2"):
            choose_weights("w4a8", tmp_path, dtype="bfloat16", device=device)


def test_a_damaged_file_and_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    (tmp_path / QUANTIZED_FILE).parent.mkdir()
    (tmp_path / QUANTIZED_FILE).write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match=QUANTIZED_FILE):
        load_quantized(tmp_path)
    weight = quantize(a_weight(), 4)
    for number in ("nan", "inf", "-inf"):
        weight.scales[0, 0] = float(number)
        save_quantized(tmp_path, {"a.weight": weight})
        with pytest.raises(ConfigError, match=rf"{QUANTIZED_FILE}: tensor a\.weight\.scales holds"):
            load_quantized(tmp_path)
    for bits in (4, 8):
        with pytest.raises(UnsupportedModel, match=f"too large for {bits} bits"):
            quantize(a_weight() * 1e9, bits)


@needs_kernels
def test_auto_takes_what_the_model_came_with(tmp_path: Path) -> None:
    assert choose_weights("auto", tmp_path, dtype="bfloat16", device=CPU) == "bfloat16"
    assert choose_weights("auto", tmp_path, dtype="float32", device=CPU) == "float32"
    save_quantized(tmp_path, {})
    assert choose_weights("auto", tmp_path, dtype="bfloat16", device=CPU) == "w4a8"
    assert choose_weights("auto", tmp_path, dtype="float32", device=CPU) == "float32", "float32 is asked for exactness"
