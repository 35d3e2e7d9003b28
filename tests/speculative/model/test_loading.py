"""Every tensor of a checkpoint is accounted for, and models are found where they should be."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from serve_app.referee.book.transformers_model import TransformersModel
from speculative.errors import ConfigError, UnsupportedModel
from speculative.model import loading
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.loading import check_weights, load_decoder, resolve_model
from speculative.model.quantized import quantize, save_quantized
from tests.support.fake_hub import fake_hub
from tests.support.tiny_models import write_tiny_model

WEIGHTS = "model.safetensors"
CPU = torch.device("cpu")


def load(folder: Path) -> Decoder:
    return load_decoder(folder, dtype=torch.float32, device="cpu")


def test_a_new_decoder_is_all_nan_and_slots_cover_every_parameter(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write_tiny_model(tmp_path, "qwen3_biased"))
    decoder = Decoder(config, dtype=torch.float32, device=CPU)
    assert all(parameter.isnan().all() for parameter in decoder.parameters())
    for slot in decoder.checkpoint_slots().values():
        slot.zero_()
    assert all((parameter == 0).all() for parameter in decoder.parameters())


def test_a_tensor_in_two_shards_is_the_same_in_both_or_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    name = "model.layers.0.mlp.up_proj.weight"
    index = dict.fromkeys(weights, "a.safetensors") | {name: "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(weights, folder / "a.safetensors")
    save_file({name: weights[name]}, folder / "b.safetensors")
    assert torch.equal(load(folder).checkpoint_slots()[name], weights[name])
    for other in (weights[name] + 1, weights[name][:3]):
        save_file({name: other}, folder / "b.safetensors")
        with pytest.raises(ConfigError, match=rf"b\.safetensors: {name} differs from .* of a\.safetensors"):
            load(folder)


def test_tensors_that_the_model_does_not_take_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    weights = load_file(folder / WEIGHTS)
    keys, norm = "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"
    down = "model.layers.0.mlp.down_proj.weight"
    cases = [(name, torch.zeros(3, 64), r"has shape \[3, 64\]") for name in (keys, norm)]
    cases.append((down, weights[down].to(torch.int8), r"is torch.int8.*engine.kind: vllm"))
    for number, said in (("nan", "NaN"), ("inf", "an infinity"), ("-inf", "an infinity")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            damaged = weights[keys].to(dtype, copy=True)
            damaged[3, 5] = float(number)
            cases.append((keys, damaged, f"holds {said}"))
    for name, tensor, said in cases:
        save_file(weights | {name: tensor}, folder / WEIGHTS)
        for read in (load, check_weights, *((TransformersModel,) if "holds" in said else ())):
            with pytest.raises(ConfigError, match=rf"safetensors: tensor {name} {said}"):
                read(folder)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda raw: raw[:-100], r"has 511,228 bytes, and its header says 511,328: it was cut off"),
        (lambda raw: raw + b"\0\0", r"has 511,330 bytes, and its header says 511,328: something was added"),
        (lambda raw: raw[:300], r"is damaged: its 300 bytes do not begin with the header"),
        (lambda raw: b"", r"is damaged: its 0 bytes"),
        (lambda raw: b"<!DOCTYPE html>" * 40, r"is damaged: its 600 bytes"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"is a pointer of Git LFS"),
    ],
)
def test_a_damaged_file_is_named(change: Callable[[bytes], bytes], reported: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
    for read in (load, check_weights, TransformersModel):
        with pytest.raises(ConfigError, match=rf"model\.safetensors {reported}"):
            read(folder)


def test_a_checkpoint_that_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    added = index | {"weight_map": index["weight_map"] | {"more": max(index["weight_map"].values())}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(added))
    for read in (load, check_weights):
        with pytest.raises(ConfigError, match=r"index\.json names the tensors more, which its files lack"):
            read(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(sharded)
    next(iter(sorted(sharded.glob("model-*.safetensors")))).unlink()
    for read in (load, check_weights):
        with pytest.raises(ConfigError, match=r"lacks model-00001-of-.*named in model\.safetensors\.index\.json"):
            read(sharded)


def test_an_index_that_makes_no_sense(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ConfigError, match=r"index\.json has no `weight_map`"):
        load(folder)


def test_pickled_weights_are_refused_and_none_at_all_said_so(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        load(folder)


def test_a_folder_and_a_fetched_name_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path))
    fetched = write_tiny_model(tmp_path / "models" / "some-name")
    assert resolve_model("some-name") == fetched
    assert resolve_model(str(fetched)) == fetched
    assert resolve_model(fetched) == fetched
    other = write_tiny_model(tmp_path / "others" / "another-name")
    assert resolve_model("another-name", tmp_path / "nothing", tmp_path / "others") == other
    write_tiny_model(tmp_path / "others" / "some-name")
    assert resolve_model("some-name", tmp_path / "others") == fetched, "what was fetched comes first"


@pytest.mark.parametrize("name", ["some-name", "/no/such/folder", "./a/b", "a/b/c", ""])
def test_a_model_that_is_nowhere_says_how_to_get_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="truespec model list") as raised:
        resolve_model(name)
    assert ("There is no folder" if name.startswith(("/", ".")) else str(tmp_path)) in str(raised.value)


def test_a_gguf_file_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    (tmp_path / "weights.safetensors").touch()
    for read, name, said in (
        (resolve_model, "x.gguf", r"x\.gguf is a GGUF file, which is not read; give the folder of a checkpoint"),
        (resolve_model, "weights.safetensors", r"weights\.safetensors is a file and not a model; give the folder"),
        (loading.checkpoint_files, "", "holds GGUF files, which are not read; give what they were made of"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(tmp_path / name)


_RESOLVE = "import sys; from speculative.model.loading import *; checkpoint_files(resolve_model(sys.argv[1]))"


def test_replicas_of_one_node_share_one_download_from_the_hub(tmp_path: Path) -> None:
    """Two processes that start at once: each has the whole checkpoint when it goes on, and no second copy of it."""
    origin = write_tiny_model(tmp_path / "origin", tokenizer=True)
    (origin / "consolidated.safetensors").write_bytes(b"as Mistral has it")
    with fake_hub("org/tiny", origin) as hub:
        command = [sys.executable, "-c", _RESOLVE, "org/tiny"]
        environment = os.environ | hub.environment(tmp_path / "hub") | {"TRUESPEC_CACHE": str(tmp_path / "cache")}
        replicas = [subprocess.Popen(command, env=environment) for _ in range(2)]
        assert [replica.wait(120) for replica in replicas] == [0, 0]
        assert hub.downloads["model.safetensors"] == 1 and set(hub.downloads.values()) == {1}
        assert "consolidated.safetensors" not in hub.downloads
        del hub.files["model.safetensors"]
        environment |= {"HF_HOME": str(tmp_path / "other")}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
    assert "org/tiny has no *.safetensors on the hub; GGUF files and pickled weights are not read" in said


_READ = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from serve_app.text.tokenizer import Tokenizer
from speculative.model.file_names import read_all_but_weights
from speculative.model.loading import load_decoder, resolve_model, torch
from speculative.model.quantized import load_quantized
folder = resolve_model(sys.argv[1])
tokenizer, turn = Tokenizer.from_folder(folder), [{"role": "user", "content": "hi"}]
said = [tokenizer.render_chat(turn, tools=tools) for tools in ([], [{"type": "function"}])], tokenizer.eos_token_ids
decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
said = *said, decoder.lm_head.weight.sum().item(), sorted(load_quantized(folder))
read = sorted({name.removeprefix(f"{folder}/") for name in opened if name.startswith(str(folder))})
read += read_all_but_weights(folder)
print(json.dumps([said, read, sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))]))
"""


def test_what_is_read_from_a_folder_is_fetched_from_a_hub(tmp_path: Path) -> None:
    """Prompts, ends of text and weights of one model are the same ones; what runs code, or is not read, stays there."""
    origin = write_tiny_model(tmp_path / "origin", tokenizer=True)
    (origin / "shards").mkdir()
    (origin / "model.safetensors").rename(origin / "shards" / "1.safetensors")
    weights = load_file(origin / "shards" / "1.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "shards/1.safetensors")}
    save_quantized(origin, {"a.weight": quantize(torch.ones(2, 32), 4)})
    unread = ("own.py", "pytorch_model.bin", "original/weights.safetensors", "onnx/config.json")
    for name, content in {
        "model.safetensors.index.json": json.dumps(index),
        "chat_template.jinja": "plain",
        "additional_chat_templates/tool_use.jinja": "{{ tools | length }} tools",
        "added_tokens.json": '{"<|more|>": 415}',
        "generation_config.json": '{"eos_token_id": [2, 5]}',
        **dict.fromkeys(("preprocessor_config.json", "processor_config.json", "chat_template.json"), "{}"),
        **dict.fromkeys(unread, ""),
    }.items():
        (origin / name).parent.mkdir(exist_ok=True)
        (origin / name).write_text(content)
    with fake_hub("org/tiny", origin) as hub:
        environment = os.environ | hub.environment(tmp_path / "hub")
        command = [sys.executable, "-c", _READ]
        ours, theirs = (
            json.loads(subprocess.run([*command, name], env=environment, stdout=subprocess.PIPE, check=True).stdout)
            for name in (str(origin), "org/tiny@main")
        )
    assert ours[0] == theirs[0] and ours[0][0] == ["plain", "1 tools"]
    assert set(ours[1]) <= set(theirs[2]) and "additional_chat_templates/tool_use.jinja" in ours[1]
    assert set(ours[2]) - set(theirs[2]) == {*unread, *(name for name in ours[2] if name.startswith("."))}


def test_a_catalogue_name_is_fetched_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a replica does on a node that has just joined."""
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "fetch_model", lambda name, progress: tmp_path / f"{name} was fetched")
    assert resolve_model("smollm2-135m") == tmp_path / "smollm2-135m was fetched"


def test_a_hub_id_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"org/no-such-model.*truespec model list"):
        resolve_model("org/no-such-model")
