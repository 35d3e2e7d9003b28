"""EAGLE-3 heads in the layouts that speculators (Eagle3Speculator) and SpecForge (LlamaForCausalLMEagle3) write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import load_eagle3
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from tests.support.engines import run, settings
from tests.support.tiny_models import write_tiny_model

VOCAB, HIDDEN, LAYERS = 64, 64, 6
DRAFT_IDS = torch.tensor([0, 1, 2, *range(20, 49)])
LLAMA = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "hidden_size": HIDDEN}
LLAMA |= {"initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 128, "model_type": "llama"}
LLAMA |= {"num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "rms_norm_eps": 1e-06}
LLAMA |= {"use_cache": True, "vocab_size": VOCAB}
SPECFORGE = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "draft_vocab_size": len(DRAFT_IDS)}
SPECFORGE |= {"eos_token_id": 2, "max_window_layers": 36, "pretraining_tp": 1, "rope_scaling": None}
SPECFORGE |= {"rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
SPECFORGE |= {"transformers_version": "4.57.1", "use_sliding_window": False}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": len(DRAFT_IDS),
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **LLAMA,
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder, dtype=torch.float32, device="cpu")


def tensors(layer: str, *, embedding: bool, mapped: bool = True) -> dict[str, Tensor]:
    """Random weights under the names of a layout, whose layer is called `layer`."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        **{f"{layer}.self_attn.{name}_proj": (size, 2 * HIDDEN) for name, size in (("q", 64), ("k", 32), ("v", 32))},
        f"{layer}.self_attn.o_proj": (HIDDEN, 64),
        **{f"{layer}.mlp.{name}_proj": (96, HIDDEN) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj": (HIDDEN, 96),
        "lm_head": (len(DRAFT_IDS) if mapped else VOCAB, HIDDEN),
    }
    if embedding:
        shapes["embed_tokens"] = (VOCAB, HIDDEN)
    found = {f"{name}.weight": torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    norms = [f"{layer}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    found |= {f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator) for name in (*norms, "norm")}
    if mapped:
        found["d2t"] = DRAFT_IDS - torch.arange(len(DRAFT_IDS))
        found["t2d"] = torch.isin(torch.arange(VOCAB), DRAFT_IDS)
    return {name: one.bfloat16() if one.is_floating_point() else one for name, one in found.items()}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("maker", ["speculators", "specforge"])
def test_a_head_loads_and_drafts(
    maker: str, embedding: bool, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    config, layer = (SPECULATORS, "layers.0") if maker == "speculators" else (SPECFORGE, "midlayer")
    weights = tensors(layer, embedding=embedding)
    folder = write(tmp_path / "head", config, weights)
    head = load_eagle3(folder, target, dtype=torch.float32)
    assert head.config.norm_before_residual is (maker == "speculators")
    assert head.aux_layers == ((1, 3, 4) if maker == "speculators" else (0, 3, 5)), "or those of vLLM, of few layers"
    assert head.draft_ids.tolist() == DRAFT_IDS.tolist()
    expected = weights["embed_tokens.weight"].float() if embedding else target.embedding
    assert torch.equal(head.embedding, expected)
    assert torch.equal(head.mlp.down_proj.weight, weights[f"{layer}.mlp.down_proj.weight"].float())
    assert head.config.shape.rope.theta == 1e6

    drafter = DrafterConfig(kind="eagle3", model=str(folder), num_draft_tokens=3)
    engine = EngineCore.load(target_folder, settings(drafter=drafter))
    for seed in range(4):
        engine.add(Request(str(seed), (5 + seed, 9), SamplingParams(max_tokens=24, ignore_eos=True), seed=seed))
    assert all(len(answer.token_ids) == 24 for answer in run(engine).values())
    assert engine.take_stats().num_drafted > 40


def test_a_head_over_the_whole_vocabulary_has_no_map(target: Decoder, tmp_path: Path) -> None:
    """And a null stands for what is the target's."""
    config = SPECULATORS | {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": None}
    folder = write(tmp_path / "head", config, tensors("layers.0", embedding=True, mapped=False))
    head = load_eagle3(folder, target, dtype=torch.float32)
    assert head.draft_ids.tolist() == list(range(VOCAB)) and head.aux_layers == (0, 3, 5)


@pytest.mark.parametrize(
    ("maker", "change", "reported"),
    [
        ("speculators", {"norm_before_fc": True}, "norm_before_fc is set"),
        ("speculators", {"target_hidden_size": 32}, "another target: its hidden size of the target is 32, not 64"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "eagle_aux_hidden_state_layer_ids"),
        ("layer", {"model_type": "qwen3"}, "model_type of the layer is 'qwen3'"),
        ("layer", {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ("layer", {"vocab_size": 128}, "another target: its vocabulary is 128, not 64"),
        ("specforge", {"fc_norm": True, "norm_output": True}, "fc_norm is set"),
        ("specforge", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "`rope_type` is 'dynamic'"),
        ("specforge", {"architectures": ["DeepSeekForCausalLMEagle3"]}, "`architectures` is"),
    ],
)
def test_what_this_engine_does_not_do_is_named(
    maker: str, change: dict[str, Any], reported: str, target: Decoder, tmp_path: Path
) -> None:
    config = (SPECFORGE if maker == "specforge" else SPECULATORS) | (change if maker != "layer" else {})
    if maker == "layer":
        config["transformer_layer_config"] = {**LLAMA, **change}
    weights = tensors("midlayer" if maker == "specforge" else "layers.0", embedding=False)
    with pytest.raises((ConfigError, UnsupportedModel), match=reported):
        load_eagle3(write(tmp_path / "head", config, weights), target, dtype=torch.float32)
