"""The EAGLE-3 head's checkpoint: the public formats, and what does not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculative.errors import ConfigError, UnsupportedModel
from speculative.kernels.library import cpu_kernels
from speculative.model.attention import StepAttention
from speculative.model.cpu.native import NativeLinear
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, default_aux_layers, load_eagle3
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.model.loading import load_decoder
from speculative.state.batch import AttentionRows
from speculative.state.kv_cache import KVCache, KVShape
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.vocabulary import needs_kernels
from tools.train_head.head import initial_head, save_head

LAYERS = 4
DRAFT_IDS = torch.tensor([0, 1, 2, *range(20, 49)])


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return load_decoder(target, dtype=torch.float32, device="cpu")


@pytest.fixture
def head(decoder: Decoder) -> Eagle3Head:
    """Noise on every weight, rounded to what the file keeps."""
    head = initial_head(decoder, DRAFT_IDS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            parameter.copy_(parameter.bfloat16())
    return head


@pytest.fixture
def folder(head: Eagle3Head, tmp_path: Path) -> Path:
    save_head(head, tmp_path / "head")
    return tmp_path / "head"


def head_for(target: Path, folder: Path, weights: str | None) -> Eagle3Head:
    """The head as it is loaded beside a target in bfloat16 with these weights."""
    decoder = load_decoder(target, dtype=torch.bfloat16, device="cpu", weights=weights)
    return load_eagle3(folder, decoder, dtype=torch.bfloat16)


def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """Made up, so that query, key and value of each row all show in what comes out."""
    return query + (key + value).repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def test_a_saved_head_loads_as_it_was(head: Eagle3Head, folder: Path, decoder: Decoder) -> None:
    loaded = load_eagle3(folder, decoder, dtype=torch.float32)
    assert loaded.embedding.data_ptr() == decoder.embedding.data_ptr(), "the embedding is shared"
    for (name, ours), (_, theirs) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.config == head.config and loaded.draft_ids.tolist() == DRAFT_IDS.tolist()
    assert loaded.aux_layers == default_aux_layers(LAYERS) == (0, 2, 3)


@pytest.mark.parametrize("weights", [None, pytest.param("bfloat16", marks=needs_kernels)])
def test_a_head_for_the_cpu_in_bfloat16_says_the_same(
    target: Path, head: Eagle3Head, folder: Path, weights: str | None
) -> None:
    served = head_for(target, folder, weights)
    features = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(2))
    tokens, positions = torch.arange(3, 8), torch.arange(5)
    with torch.inference_mode():
        ours, theirs = (
            one.logits(one(tokens, one.fuse(rows), positions, attend))
            for one, rows in ((head, features), (served, features.bfloat16()))
        )
    rounding = 0.05 if weights is None else 0.4  # to four bits, beside our kernels
    assert (ours - theirs.float()).abs().max() < rounding * ours.abs().max()


@needs_kernels
@pytest.mark.parametrize(("weights", "kind"), [("float32", 0), ("bfloat16", 2), ("w4a8", 2)])
def test_a_head_has_four_bits_unless_its_target_is_exact(target: Path, folder: Path, weights: str, kind: int) -> None:
    served = head_for(target, folder, weights)
    assert {linear.struct.kind for linear in served.modules() if isinstance(linear, NativeLinear)} == {kind}


@needs_kernels
def test_a_matrix_that_is_no_whole_number_of_groups_wide_stays_in_bfloat16(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "target", intermediate_size=40, num_hidden_layers=LAYERS)
    served = head_for(model, write_tiny_head(tmp_path / "head", model), "bfloat16")
    assert served.mlp.down_proj.struct.kind == 1 and served.mlp.gate_up_proj.struct.kind == 2


@needs_kernels
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_one_call_is_the_modules_one_after_another_to_the_bit(
    target: Path, folder: Path, norm_before_residual: bool
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_before_residual": norm_before_residual}))
    served = head_for(target, folder, "bfloat16")
    fused, shape = served.fused, served.config.shape
    assert fused is not None
    tokens = torch.arange(3, 13)
    hidden = served.fuse(torch.randn(10, 3 * 64, generator=torch.Generator().manual_seed(2)))

    def drafted() -> list[torch.Tensor]:
        """Hidden states, logits and cache, of a few rows and then of more behind them."""
        kept = KVShape(1, shape.num_kv_heads, shape.head_dim)
        cache = KVCache(kept, 32, dtype=torch.float32, device=hidden.device)
        cache.data.zero_()
        parts = []
        for begin, end in ((0, 7), (7, 10)):
            rows = AttentionRows(np.arange(begin, end), np.array([0, end - begin]), (np.arange(end),))
            attend = StepAttention(cache, rows, cpu_kernels())
            parts.append(served(tokens[begin:end], hidden[begin:end], torch.arange(begin, end), attend))
        out = torch.cat(parts)
        return [out, served.logits(out), cache.data]

    with torch.inference_mode():
        at_once = drafted()
        served.fused = None
        for ours, theirs in zip(at_once, drafted(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rates", [{"sampled": [0.5, 1.5]}, {"greedy": "high"}, {"greedy": [10**400]}, [0.5]])
def test_held_out_rates_that_cannot_be_are_refused(folder: Path, rates: Any) -> None:
    assert read_held_out_rates(folder) == ((), ()), "a head that somebody else trained"
    change = {"held_out_acceptance": {"sampled": [0.5, 0.4], "greedy": [0.75]}}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_held_out_rates(folder) == ((0.5, 0.4), (0.75,))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"held_out_acceptance": rates}))
    with pytest.raises(ConfigError, match=r"held_out_acceptance is .* numbers from 0 to 1"):
        read_held_out_rates(folder)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"fc.weight": None}, "missing tensors.*fc.weight"),
        ({"stray": torch.zeros(2)}, "unexpected tensors.*stray"),
        ({"norm.weight": torch.full((64,), float("nan"))}, "norm.weight holds NaN"),
        ({"norm.weight": torch.zeros(65)}, "norm.weight has shape"),
        ({"d2t": None}, "lacks the tensor d2t"),
        ({"d2t": torch.full((32,), 40)}, "different ids below 64"),
        ({"t2d": torch.ones(64, dtype=torch.bool)}, "t2d and d2t name different tokens"),
        ({"model.norm.weight": torch.zeros(64)}, r"norm\.weight of model\.safetensors .* differ"),
        ({"layers.0.hidden_norm.weight": torch.zeros(64)}, r"hidden_norm\.weight of model\.safetensors .* differ"),
        ({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}, "inv_freq is not what the rotary settings"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    folder: Path, decoder: Decoder, change: dict[str, Any], reported: str
) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=reported):
        load_eagle3(folder, decoder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "reported"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModel, "no EAGLE-3 head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "use_aux_hidden_state"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "eagle_config": {}}, UnsupportedModel, "three layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9], "eagle_config": {}}, ConfigError, "name layers of the target"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, ConfigError, r"\[0, 1, 2\], and in `eagle_config`"),
        ({"norm_before_residual": "false"}, ConfigError, "`norm_before_residual` must be true or false"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    folder: Path, decoder: Decoder, change: dict[str, Any], error: type[Exception], reported: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=reported):
        load_eagle3(folder, decoder, dtype=torch.float32)


def test_only_safetensors_are_read(folder: Path, decoder: Decoder) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickled"):
        load_eagle3(folder, decoder, dtype=torch.float32, device="cpu")


def test_the_features_are_those_of_vllm_by_default(head: Eagle3Head, decoder: Decoder) -> None:
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(6) == (0, 3, 5)
    with pytest.raises(ConfigError, match="three layers"):
        default_aux_layers(2)
    config = head.config
    assert dataclasses.replace(config, aux_layers=None).for_target(decoder.config) == config
