"""The MTP module's checkpoint: what is written loads again, and what does not fit is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.decoder import Decoder
from speculative.model.loading import load_decoder
from speculative.model.mtp import MtpConfig, MtpHead, load_mtp, save_mtp
from speculative.training.heads import initial_head
from tests.support.tiny_models import write_tiny_model

VOCAB = 64
LAYERS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_hidden_layers=LAYERS)
    return load_decoder(folder, dtype=torch.float32, device="cpu")


@pytest.fixture
def head(target: Decoder) -> MtpHead:
    """Noise on every weight, rounded to what the file keeps."""
    head = initial_head("mtp", target, torch.arange(VOCAB))
    assert isinstance(head, MtpHead)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            parameter.copy_(parameter.bfloat16())
    return head


@pytest.fixture
def folder(head: MtpHead, tmp_path: Path) -> Path:
    save_mtp(head, tmp_path / "head")
    return tmp_path / "head"


def attend_to_itself(_layer: int, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def test_a_saved_module_loads_as_it_was(head: MtpHead, folder: Path, target: Decoder) -> None:
    loaded = load_mtp(folder, target, dtype=torch.float32)
    assert loaded.embedding.data_ptr() == target.embedding.data_ptr(), "the embedding is shared"
    for (name, ours), (_, theirs) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert MtpConfig.from_folder(folder) == head.config == MtpConfig.from_folder(folder).for_target(target.config)


def test_tensors_are_named_as_in_deepseeks_checkpoints(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "eh_proj", "shared_head.norm"}
    assert set(tensors) == {f"model.layers.{LAYERS}.{name}.weight" for name in layer}
    assert tensors[f"model.layers.{LAYERS}.eh_proj.weight"].shape == (64, 128)


def test_it_computes_what_the_paper_says(head: MtpHead, target: Decoder) -> None:
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


def test_a_module_for_the_cpu_in_bfloat16_says_the_same(head: MtpHead, folder: Path, target: Decoder) -> None:
    served = load_mtp(folder, target, dtype=torch.bfloat16)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    tokens, positions = torch.tensor([3, 4, 5, 6, 7]), torch.arange(5)
    with torch.inference_mode():
        ours = head.norm(head(tokens, hidden, positions, attend_to_itself))
        fused = served.fuse(hidden.bfloat16())
        theirs = served.norm(served(tokens, fused, positions, attend_to_itself)).float()
    assert (ours - theirs).abs().max() < 0.05 * ours.abs().max()


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
    folder: Path, target: Decoder, change: dict[str, torch.Tensor | None], reported: str
) -> None:
    named = {f"model.layers.{LAYERS}.{name}": one for name, one in change.items()}
    tensors = load_file(folder / "model.safetensors") | named
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=reported):
        load_mtp(folder, target, dtype=torch.float32)


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
    folder: Path, target: Decoder, change: dict[str, object], error: type[Exception], reported: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=reported):
        load_mtp(folder, target, dtype=torch.float32)


def test_a_damaged_file_is_reported(folder: Path, target: Decoder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ConfigError, match="damaged"):
        load_mtp(folder, target, dtype=torch.float32)
