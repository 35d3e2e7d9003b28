"""The MTP module's checkpoint, and what it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.decoder import Decoder
from speculative.model.mtp import MtpHead
from tests.support.head_conformance import LAYERS, HeadConformance, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_target(tmp_path_factory.mktemp("target"))


def attend_to_itself(_layer: int, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class TestMtp(HeadConformance):
    """An MTP module passes the kit of all heads."""

    kind = "mtp"
    num_features = 64

    def test_tensors_are_named_as_in_deepseeks_checkpoints(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        layer |= {"input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "eh_proj", "shared_head.norm"}
        assert set(tensors) == {f"model.layers.{LAYERS}.{name}.weight" for name in layer}
        assert tensors[f"model.layers.{LAYERS}.eh_proj.weight"].shape == (64, 128)

    def test_it_computes_what_the_paper_says(self, head: MtpHead, target: Decoder) -> None:
        """eh_proj over (norm of the token, norm of the hidden state), then the layer; row 0 goes without its token."""
        hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
        tokens, positions = torch.tensor([5, 6, 7]), torch.arange(3)

        def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

        weight = {name.split(".", 3)[3]: slot.detach() for name, slot in head.checkpoint_slots().items()}
        embedded = target.embedding[tokens].clone()
        embedded[0] = 0
        both = torch.cat((norm(embedded, weight["enorm.weight"]), norm(hidden, weight["hnorm.weight"])), -1)
        rows = both @ weight["eh_proj.weight"].T
        value = norm(rows, weight["input_layernorm.weight"]) @ weight["self_attn.v_proj.weight"].T
        attended = value.view(3, 2, 16).repeat_interleave(2, dim=1).reshape(3, 64)
        rows = rows + attended @ weight["self_attn.o_proj.weight"].T
        normed = norm(rows, weight["post_attention_layernorm.weight"])
        gate, up = normed @ weight["mlp.gate_proj.weight"].T, normed @ weight["mlp.up_proj.weight"].T
        rows = rows + (functional.silu(gate) * up) @ weight["mlp.down_proj.weight"].T
        with torch.inference_mode():
            found = head(tokens, head.fuse(hidden), positions, attend_to_itself)
            torch.testing.assert_close(found, rows, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(head.norm(found), norm(rows, weight["shared_head.norm.weight"]))

    @pytest.mark.parametrize(
        ("change", "reported"),
        [
            ({"eh_proj.weight": None}, r"missing tensors.*eh_proj"),
            ({"shared_head.head.weight": torch.zeros(2)}, r"unexpected tensors.*shared_head\.head"),
            ({"hnorm.weight": torch.full((64,), float("nan"))}, r"hnorm\.weight holds NaN"),
            ({"enorm.weight": torch.zeros(65)}, r"enorm\.weight has shape"),
        ],
    )
    def test_weights_that_do_not_fit_are_named(
        self, folder: Path, target: Decoder, change: dict[str, Any], reported: str
    ) -> None:
        named = {f"model.layers.{LAYERS}.{name}": one for name, one in change.items()}
        self.refuse_weights(folder, target, named, reported)

    @pytest.mark.parametrize(
        ("change", "error", "reported"),
        [
            ({"architectures": ["DeepSeekMTPModel"]}, UnsupportedModel, "no MTP module with a Llama layer"),
            ({"num_nextn_predict_layers": 2}, UnsupportedModel, "num_nextn_predict_layers is 2"),
            ({"vocab_size": 128}, ConfigError, "another target: its vocabulary is 128, not 64"),
            ({"num_hidden_layers": 5}, ConfigError, "its number of layers is 5, not 4"),
            ({"hidden_size": 32}, ConfigError, "its hidden size is 32, not 64"),
        ],
    )
    def test_modules_that_do_not_fit_are_refused(
        self, folder: Path, target: Decoder, change: dict[str, Any], error: type[Exception], reported: str
    ) -> None:
        self.refuse_config(folder, target, change, error, reported)
