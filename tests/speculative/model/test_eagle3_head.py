"""The EAGLE-3 head's checkpoint: the public formats, and what does not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from speculative.cache.kv_cache import KVCache, KVShape
from speculative.errors import ConfigError, UnsupportedModel
from speculative.kernels.library import cpu_kernels
from speculative.model.attention import StepAttention
from speculative.model.cpu.native import Kind, NativeLinear
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, default_aux_layers, load_eagle3
from speculative.model.head_checkpoint import read_held_out_rates, write_held_out_rates
from speculative.model.loading import load_decoder
from speculative.state.batch import AttentionRows
from speculative.training.heads import draft_vocabulary
from tests.support.head_conformance import DRAFT_IDS, LAYERS, VOCAB, HeadConformance, tiny_target
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_target(tmp_path_factory.mktemp("target"))


class TestEagle3(HeadConformance):
    """An EAGLE-3 head passes the kit of all heads."""

    kind = "eagle3"
    num_features = 3 * 64

    def test_its_vocabulary_and_its_features_come_back(self, folder: Path, target: Decoder) -> None:
        loaded = load_eagle3(folder, target, dtype=torch.float32, device="cpu")
        assert loaded.draft_ids.tolist() == DRAFT_IDS.tolist()
        assert loaded.aux_layers == default_aux_layers(LAYERS) == (0, 2, 3)

    @pytest.mark.skipif(cpu_kernels() is None, reason="there are no CPU kernels here")
    @pytest.mark.parametrize(("weights", "kind"), [("float32", 0), ("bfloat16", 2), ("w4a8", 2)])
    def test_a_head_has_four_bits_unless_its_target_is_exact(
        self, tmp_path: Path, folder: Path, weights: Kind, kind: int
    ) -> None:
        model = write_tiny_model(tmp_path / "target", vocab_size=VOCAB, num_hidden_layers=4)
        target = load_decoder(model, dtype=torch.bfloat16, device="cpu", weights=weights)
        served = load_eagle3(folder, target, dtype=torch.bfloat16)
        assert {linear.struct.kind for linear in served.modules() if isinstance(linear, NativeLinear)} == {kind}

    @pytest.mark.skipif(cpu_kernels() is None, reason="there are no CPU kernels here")
    @pytest.mark.parametrize("norm_before_residual", [False, True])
    def test_one_call_is_the_modules_one_after_another_to_the_bit(
        self, tmp_path: Path, folder: Path, norm_before_residual: bool
    ) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_before_residual": norm_before_residual}))
        model = write_tiny_model(tmp_path / "target", vocab_size=VOCAB, num_hidden_layers=4)
        target = load_decoder(model, dtype=torch.bfloat16, device="cpu", weights="bfloat16")
        served = load_eagle3(folder, target, dtype=torch.bfloat16, device="cpu")
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

    def test_the_files_are_what_vllm_reads(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        layer |= {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
        expected = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
        assert set(tensors) == expected | {"d2t", "t2d"}
        assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)  # reads token and hidden state
        assert (torch.arange(len(DRAFT_IDS)) + tensors["d2t"]).tolist() == DRAFT_IDS.tolist()
        assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
        config = AutoConfig.from_pretrained(folder)  # vLLM reads it so
        assert config.architectures == ["LlamaForCausalLMEagle3"]
        assert (config.num_hidden_layers, config.vocab_size, config.draft_vocab_size) == (1, VOCAB, len(DRAFT_IDS))
        assert config.rope_parameters["rope_theta"] == 10000.0
        assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]

    def test_a_speculators_folder_loads(self, head: Eagle3Head, folder: Path, target: Decoder) -> None:
        config = json.loads((folder / "config.json").read_text())
        of_the_head = ("architectures", "eagle_config", "draft_vocab_size")
        layer = {name: config[name] for name in config if name not in of_the_head}
        (folder / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["Eagle3Speculator"],
                    "speculators_model_type": "eagle3",
                    "draft_vocab_size": len(DRAFT_IDS),
                    "target_hidden_size": 64,
                    "norm_before_residual": True,
                    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                    "transformer_layer_config": layer | {"max_position_embeddings": 8},
                }
            )
        )
        tensors = load_file(folder / "model.safetensors")
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        own = torch.randn(VOCAB, 64)
        save_file(renamed | {"embed_tokens.weight": own}, folder / "model.safetensors")
        loaded = load_eagle3(folder, target, dtype=torch.float32, device="cpu")
        assert loaded.config.norm_before_residual
        assert loaded.aux_layers == (1, 2, 3)
        assert torch.equal(loaded.embedding, own)
        assert torch.equal(loaded.fc.weight, head.fc.weight)
        assert len(loaded.rotary.table) == 512, "as many positions as the target"

    @pytest.mark.parametrize("rates", [{"sampled": [0.5, 1.5]}, {"greedy": "high"}, {"greedy": [10**400]}, [0.5]])
    def test_held_out_rates_that_cannot_be_are_refused(self, folder: Path, rates: Any) -> None:
        assert read_held_out_rates(folder) == ((), ()), "a head that somebody else trained"
        write_held_out_rates(folder, [0.5, 0.4], [0.75])
        assert read_held_out_rates(folder) == ((0.5, 0.4), (0.75,))
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"held_out_acceptance": rates}))
        with pytest.raises(ConfigError, match=r"held_out_acceptance is .* numbers between 0 and 1"):
            read_held_out_rates(folder)

    @pytest.mark.parametrize(
        ("change", "reported"),
        [
            ({"fc.weight": None}, "missing tensors.*fc.weight"),
            ({"stray": torch.zeros(2)}, "unexpected tensors.*stray"),
            ({"norm.weight": torch.full((64,), float("nan"))}, "norm.weight holds NaN"),
            ({"norm.weight": torch.zeros(65)}, "norm.weight has shape"),
            ({"d2t": None}, "lacks the tensor d2t"),
            ({"d2t": torch.zeros(7, dtype=torch.long)}, "different ids"),
            ({"d2t": torch.full((32,), 40)}, "different ids below 64"),
            ({"t2d": torch.ones(64, dtype=torch.bool)}, "t2d and d2t name different tokens"),
            ({"model.norm.weight": torch.zeros(64)}, r"norm\.weight of model\.safetensors .* differ"),
            ({"layers.0.hidden_norm.weight": torch.zeros(64)}, r"hidden_norm\.weight of model\.safetensors .* differ"),
            ({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}, "inv_freq is not what the rotary settings"),
        ],
    )
    def test_weights_that_do_not_fit_are_named(
        self, folder: Path, target: Decoder, change: dict[str, Any], reported: str
    ) -> None:
        self.refuse_weights(folder, target, change, reported)

    @pytest.mark.parametrize(
        ("change", "error", "reported"),
        [
            ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModel, "no EAGLE-3 head"),
            ({"num_hidden_layers": 2}, UnsupportedModel, "num_hidden_layers is 2"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "use_aux_hidden_state"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2], "eagle_config": {}}, UnsupportedModel, "three layers"),
            (
                {"eagle_aux_hidden_state_layer_ids": [0, 1, 9], "eagle_config": {}},
                ConfigError,
                "name layers of the target",
            ),
            ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, ConfigError, r"\[0, 1, 2\], and in `eagle_config`"),
            ({"norm_before_residual": "false"}, ConfigError, "`norm_before_residual` must be true or false"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, UnsupportedModel, "`rope_type` is 'yarn'"),
            ({"vocab_size": 128}, ConfigError, "another target: its vocabulary is 128, not 64"),
            ({"target_hidden_size": 32}, ConfigError, "another target"),
        ],
    )
    def test_heads_that_do_not_fit_are_refused(
        self, folder: Path, target: Decoder, change: dict[str, Any], error: type[Exception], reported: str
    ) -> None:
        self.refuse_config(folder, target, change, error, reported)

    def test_only_safetensors_are_read(self, folder: Path, target: Decoder) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(UnsupportedModel, match="pickled"):
            load_eagle3(folder, target, dtype=torch.float32, device="cpu")

    def test_the_features_are_those_of_vllm_by_default(self, head: Eagle3Head, target: Decoder) -> None:
        assert default_aux_layers(30) == (2, 15, 27)
        assert default_aux_layers(6) == (0, 3, 5)
        with pytest.raises(ConfigError, match="three layers"):
            default_aux_layers(2)
        config = head.config
        assert dataclasses.replace(config, aux_layers=None).for_target(target.config) == config


def test_the_draft_vocabulary_holds_the_commonest_tokens() -> None:
    counts = torch.tensor([0, 5, 9, 1, 7]).numpy()
    assert draft_vocabulary(counts, 3).tolist() == [1, 2, 4]
    assert draft_vocabulary(counts, 3, always=(0,)).tolist() == [0, 2, 4]
    assert draft_vocabulary(counts, 99).tolist() == [0, 1, 2, 3, 4]
