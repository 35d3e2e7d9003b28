"""FP8 weights: rounding, products, loading, and who refuses them. Here a CPU multiplies, which no server lets it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.applied import check_applied
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.formats.fp8 import Fp8Linear
from speculative.model.fp8 import E4M3, quantize_rows
from speculative.model.loading import choose_weights, load_decoder
from tests.support.engines import naive_logits
from tests.support.tiny_models import write_tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e5, 1e30])
def test_rows_are_rounded_to_within_a_sixteenth(size: float, dtype: torch.dtype) -> None:
    """Three bits of mantissa: half a unit is 2**-4 of a number, and below 2**-6 of the scale 2**-10 of it."""
    rows = (size * drawn(64, 80)).to(dtype)
    quantized = quantize_rows(rows)
    assert quantized.numbers.dtype == E4M3 and quantized.scales.shape == (64, 1)
    error = (quantized.to_float().double() - rows.double()).abs()
    limit = torch.maximum(2.0**-4 * rows.double().abs(), 2.0**-10 * quantized.scales.double())
    assert (error <= 1.0001 * limit).all()
    assert torch.equal(quantized.numbers.float().abs().amax(1), torch.full((64,), 448.0)), "all of FP8's range is used"
    steps = size * torch.arange(1, 4096, dtype=torch.float32)[:, None] * 1.000123
    assert torch.equal(quantize_rows(steps.to(dtype)).numbers.float(), torch.full((4095, 1), 448.0)), "and no more"


def test_rows_of_zeros_and_of_no_numbers() -> None:
    rows = torch.ones(4, 16)
    rows[0], rows[1, 3], rows[2, 5], rows[3, 0] = 0.0, torch.nan, torch.inf, 1e-45
    numbers = quantize_rows(rows).to_float()
    assert not numbers[0].any()
    assert numbers[1].isnan().any() and numbers[2].isnan().any(), "the checks for NaN find them in the products"
    assert numbers[3].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(bias: bool) -> None:
    linear = Fp8Linear(96, 48, bias=bias, dtype=torch.float32, device=CPU)
    weight, rows = quantize_rows(drawn(48, 96)), drawn(5, 96, seed=1)
    linear.weight.copy_(weight.numbers)
    linear.weight_scale.copy_(weight.scales)
    if linear.bias is not None:
        linear.bias.copy_(drawn(48, seed=2))
    expected = quantize_rows(rows).to_float() @ weight.to_float().T + (0 if linear.bias is None else linear.bias)
    torch.testing.assert_close(linear(rows), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(linear(quantize_rows(rows)), linear(rows)), "whoever quantizes"


# -- loading --------------------------------------------------------------------------------------------------------


def load(folder: Path, **changes: Any) -> Decoder:
    return load_decoder(folder, **{"dtype": torch.float32, "device": "cpu", "weights": "fp8", **changes})


def write_fp8_dynamic(folder: Path, origin: Path, quantization: Mapping[str, Any] = FP8_DYNAMIC) -> Path:
    """As llm-compressor writes it, the scales in bfloat16."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(origin / "model.safetensors").items():
        tensors[name] = tensor
        if "_proj.weight" in name:
            scales = quantize_rows(tensor).scales.bfloat16()
            tensors |= {name: (tensor / scales.float()).clamp(-448, 448).to(E4M3), f"{name}_scale": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((origin / "config.json").read_text()) | {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", ["llama", "llama_biased", "smollm", "qwen2", "qwen3"])
def test_a_loaded_model_has_the_nearest_weights_and_nearly_the_same_logits(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    decoder, plain = load(folder), load(folder, weights=None)
    check_applied(decoder, folder, torch.float32)
    assert decoder.lm_head.weight.dtype == decoder.embedding.dtype == torch.float32
    assert sum(isinstance(part, Fp8Linear) for part in decoder.modules()) == 4 * decoder.config.num_layers
    ids = torch.arange(3, 35)[None]
    found, reference = (naive_logits(model, ids).log_softmax(-1) for model in (decoder, plain))
    assert 0 < (found - reference).abs().mean() < 0.3, "its layers add up random numbers, whose errors do not cancel"


def test_a_checkpoint_in_fp8_keeps_its_numbers(tmp_path: Path) -> None:
    origin = write_tiny_model(tmp_path / "origin")
    folder = write_fp8_dynamic(tmp_path / "fp8", origin)
    tensors = load_file(folder / "model.safetensors")
    slots = load(folder).checkpoint_slots()
    assert slots.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(slots[name].float(), tensor.float()), name
    assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(origin)


def test_a_scale_that_is_missing_and_a_nan_are_named(tmp_path: Path) -> None:
    folder = write_fp8_dynamic(tmp_path / "fp8", write_tiny_model(tmp_path / "origin"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {name} holds NaN"):
        load(folder)
    tensors[name].view(torch.uint8)[3, 5] = 0
    del tensors[f"{name}_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks the tensors {name}_scale"):
        load(folder)


def test_whoever_has_no_fp8_products_does_not_read_fp8_weights(tmp_path: Path) -> None:
    folder = write_fp8_dynamic(tmp_path / "fp8", write_tiny_model(tmp_path / "origin"))
    with pytest.raises(UnsupportedModel, match=r"is torch\.float8_e4m3fn.*FP8 alone is read, on a GPU"):
        load(folder, weights=None)


def changed(**changes: Any) -> dict[str, Any]:
    """FP8_DYNAMIC with other values at a path, its parts joined by two underscores."""
    config = json.loads(json.dumps(FP8_DYNAMIC))
    for path, value in changes.items():
        *parents, name = path.split("__")
        part = config
        for parent in parents:
            part = part[parent]
        part[name] = value
    return config  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        changed(format="pack-quantized"),
        changed(ignore=["lm_head", "model.layers.0.mlp.down_proj"]),
        changed(kv_cache_scheme={"num_bits": 8}),
        changed(config_groups__group_0__weights__strategy="tensor"),
        changed(config_groups__group_0__weights__type="int"),
        changed(config_groups__group_0__input_activations=None),
        changed(config_groups__group_0__input_activations__dynamic=False),
    ],
    ids=str,
)
def test_other_quantized_checkpoints_are_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    folder = write_fp8_dynamic(tmp_path / "fp8", write_tiny_model(tmp_path / "origin"), quantization)
    with pytest.raises(UnsupportedModel, match=f"quantized by {quantization['quant_method']} .* take the checkpoint"):
        load(folder)


@pytest.mark.parametrize(
    ("weights", "sizes", "refused"),
    [
        ("fp8", {"hidden_size": 72, "num_attention_heads": 4, "head_dim": 16}, "16, and hidden_size is 72"),
        ("fp8", {"intermediate_size": 100}, "16, and intermediate_size is 100"),
        ("fp8", {"num_key_value_heads": 1, "head_dim": 24}, "16, and num_key_value_heads x head_dim is 24"),
        ("w4a8", {"hidden_size": 48}, "32, and hidden_size is 48"),
        ("w4a8", {"head_dim": 20}, "32, and num_attention_heads x head_dim is 80"),
    ],
)
def test_sizes_that_the_products_do_not_take_are_refused(
    weights: str, sizes: dict[str, int], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{weights} needs sizes .* multiples of {refused}; take .*: auto"):
        load(write_tiny_model(tmp_path, **sizes), weights=weights)


# -- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "torch_version", "reason"),
    [
        (CPU, "bfloat16", None, "2.13.0", r"need a GPU; on a CPU take quantization: w4a8"),
        (CUDA, "float32", (9, 0), "2.13.0", r"dtype is float32; take dtype: bfloat16"),
        (CUDA, "bfloat16", (8, 6), "2.13.0", r"need 8\.9 or higher, and A thing has .* 8\.6; take quantization: auto"),
        (CUDA, "bfloat16", (8, 9), "2.9.1+cu130", r"torch 2\.9\.1 launches .* install torch 2\.12"),
        (CUDA, "bfloat16", (8, 9), "2.12.0+cu130", None),
        (CUDA, "bfloat16", (9, 0), "2.9.1+cu130", None),
        (CUDA, "bfloat16", None, "2.13.0", None),  # before there is a GPU, one to come counts as able
    ],
)
def test_devices_without_fp8_are_refused_with_the_reason(
    device: torch.device,
    dtype: str,
    capability: tuple[int, int] | None,
    torch_version: str,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A thing")
    monkeypatch.setattr(torch, "__version__", torch_version)
    if reason is None:
        assert choose_weights("fp8", tmp_path, dtype=dtype, device=device) == "fp8"
        return
    with pytest.raises(ConfigError, match=f"quantization: fp8 is not to be had here: .*{reason}"):
        choose_weights("fp8", tmp_path, dtype=dtype, device=device)


def test_a_checkpoint_in_fp8_is_taken_as_it_is_or_refused(tmp_path: Path) -> None:
    folder = write_fp8_dynamic(tmp_path / "fp8", write_tiny_model(tmp_path / "origin"))
    for wanted in ("auto", "fp8"):
        assert choose_weights(wanted, folder, dtype="bfloat16", device=CUDA) == "fp8"
        with pytest.raises(ConfigError, match="a checkpoint not in FP8"):
            choose_weights(wanted, folder, dtype="bfloat16", device=CPU)
    with pytest.raises(ConfigError, match=r"holds weights in fp8, and .* bfloat16; take quantization: auto"):
        choose_weights("bfloat16", folder, dtype="bfloat16", device=CUDA)
