"""A GGUF file becomes the checkpoint it was made from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.catalogue import CATALOGUE, download_gguf
from speculative.model.config import ModelConfig
from speculative.model.gguf import convert_gguf
from speculative.model.loading import load_decoder
from speculative.model.quantized import load_quantized
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, write_tiny_model

pytestmark = pytest.mark.slow


def converted(folder: Path, family: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """The folder a GGUF was written from, and the folder it was converted to."""
    origin, made = write_tiny_model(folder / "origin", family, tokenizer=True), folder / "made"
    gguf_path = write_tiny_gguf(folder / "model.gguf", origin, **changes)
    made.mkdir()
    convert_gguf(gguf_path, made)
    return origin, made


@pytest.mark.parametrize("family", ["llama", "smollm"])
def test_the_way_through_gguf_and_back(family: str, tmp_path: Path) -> None:
    origin, made = converted(tmp_path, family)
    expected, found = load_file(origin / "model.safetensors"), load_file(made / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    assert ModelConfig.from_folder(made) == ModelConfig.from_folder(origin)
    load_decoder(made, dtype=torch.float32, device="cpu")


def test_the_tokenizer_survives(tmp_path: Path) -> None:
    origin, made = converted(tmp_path, tokenizer__ggml__pre="gpt-2")
    before, after = AutoTokenizer.from_pretrained(origin), AutoTokenizer.from_pretrained(made)
    text = "<|im_start|>user\nThe other  sail, café 1234 😀<|im_end|>\n"
    ids = after(text)["input_ids"]
    assert ids == before(text)["input_ids"]
    assert (ids[0], ids[-2]) == (1, 2), "special tokens are one id each"
    assert after.decode(ids) == text
    assert (after.bos_token_id, after.eos_token_id, after.chat_template) == (1, 2, CHAT_TEMPLATE)


def test_smollm_splits_digits_before_anything_merges_across_them(tmp_path: Path) -> None:
    _, made = converted(tmp_path)
    backend = AutoTokenizer.from_pretrained(made).backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  12")] == ["a", "ĠĠ", "1", "2"]


def test_a_tokenizer_that_puts_bos_first_or_eos_last(tmp_path: Path) -> None:
    _, made = converted(tmp_path / "bos", tokenizer__ggml__add_bos_token=True)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer("the")["input_ids"][0] == 1
    assert 1 not in tokenizer("the", add_special_tokens=False)["input_ids"]
    _, made = converted(tmp_path / "eos", tokenizer__ggml__add_eos_token=True)
    ids = RawTokenizer.from_file(str(made / "tokenizer.json")).encode("the").ids
    assert ids[-1] == 2 and 1 not in ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("general.architecture", "gemma3"),
        ("llama.expert_count", 8),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 4.0),  # without a type: linear, to llama.cpp
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.scale", 0.5),
        ("llama.logit_scale", 0.25),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "chatglm-bpe"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="convert the original checkpoint"):
        converted(tmp_path, **{field.replace(".", "__"): value})


def test_keys_that_change_nothing_are_let_pass(tmp_path: Path) -> None:
    neutral = {"llama__rope__scaling__type": "none", "llama__expert_count": 0, "llama__attention__value_length": 16}
    converted(tmp_path, **neutral, llama__tensor_data_layout="Meta AI original pth", general__file_type=1)


def test_a_file_that_is_no_gguf_or_was_cut_off(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "broken.gguf", write_tiny_model(tmp_path / "origin", tokenizer=True))
    content = path.read_bytes()
    cut = [content[: len(content) * share // 8] for share in range(8)]
    for damaged in (b"not a GGUF file at all, but long enough to look at", *cut, content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"broken\.gguf cannot be read .* was cut off; download it again"):
            convert_gguf(path, tmp_path)


def test_what_is_missing_and_what_is_unknown_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks llama\.block_count"):
        converted(tmp_path / "missing", llama__block_count=None)
    with pytest.raises(UnsupportedModel, match=r"GGUF tensor blk\.0\.\w+\.bias is not one of a plain Llama"):
        converted(tmp_path, "llama_biased")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
def test_quantized_numbers_are_kept_as_they_are(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    types = dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_down"), kind) | {"output": GGMLQuantizationType.Q8_0}
    _, made = converted(tmp_path, types=types)
    weights, quantized = load_file(made / "model.safetensors"), load_quantized(made)
    assert len(quantized) == 2 * 4 + 1, "two layers and the LM head"
    assert [*made.glob("*.safetensors")] == [made / "model.safetensors"], "all of these vLLM loads as weights"
    for name, weight in quantized.items():
        assert weight.bits == (8 if name == "lm_head.weight" else 4)
        assert torch.equal(weight.to_float().bfloat16(), weights[name]), name


@pytest.mark.parametrize("types", [{}, {"ffn_down": GGMLQuantizationType.Q8_0}])
def test_a_file_without_four_bit_tensors_leaves_none(types: dict[str, GGMLQuantizationType], tmp_path: Path) -> None:
    _, made = converted(tmp_path, types=types)
    assert load_quantized(made) == {}


def test_the_real_model_equals_transformers_own_conversion(tmp_path: Path) -> None:
    gguf_path = download_gguf(CATALOGUE["smollm2-135m"], tmp_path, lambda line: None)
    made = tmp_path / "made"
    made.mkdir()
    convert_gguf(gguf_path, made)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf_path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    expected, found = reference.state_dict(), load_file(made / "model.safetensors")
    assert expected.keys() - found.keys() == {"lm_head.weight"}, "tied to the embedding"
    quantized = load_quantized(made)
    assert len(quantized) == 30 * 7 + 1
    assert all(torch.equal(weight.to_float().bfloat16(), found[name]) for name, weight in quantized.items())
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    config = json.loads((made / "config.json").read_text())
    for name in ("hidden_size", "num_key_value_heads", "vocab_size", "max_position_embeddings", "eos_token_id"):
        assert config[name] == getattr(reference.config, name), name
    assert ModelConfig.from_folder(made).rope.theta == reference.config.rope_parameters["rope_theta"]
