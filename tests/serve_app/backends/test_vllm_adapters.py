"""LoRA adapters of the vLLM engine, as far as they need no vLLM: settings, what lies in their files, who may go on."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.backends.vllm_parts import settings
from serve_app.backends.vllm_parts.adapters import Adapters, read_adapters
from serve_app.config.files import parse_args
from speculative.errors import ConfigError, InvalidRequest
from tests.support.tiny_adapters import LINEAR, write_tiny_adapter
from tests.support.tiny_models import write_tiny_model

WEIGHTS = "adapter_model.safetensors"
Q = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("adapters") / "m")


@pytest.fixture
def sql(model: Path, tmp_path: Path) -> Path:
    return write_tiny_adapter(tmp_path / "sql", model, seed=1)


def args(**vllm: Any) -> dict[str, Any]:
    return {"model": {"source": "base", "name": "chat"}, "engine": {"kind": "vllm"}, "vllm": vllm}


def test_adapters_reach_the_engine_and_its_cpu_build_wants_them_uncompiled() -> None:
    config = parse_args(args(lora_modules={"sql": "/sql"})).vllm_settings("decode")
    assert config.lora_modules == {"sql": "/sql"}
    settings.check_build(config, cpu=False)
    with pytest.raises(ConfigError, match=r"vllm.lora_modules needs vllm.engine_args.enforce_eager"):
        settings.check_build(config, cpu=True)
    settings.check_build(dataclasses.replace(config, engine_args={"enforce_eager": True}), cpu=True)
    assert settings.faults_of(cpu=True).mixed_adapters


def test_each_adapter_has_a_number_of_its_own_whatever_their_order(model: Path, sql: Path, tmp_path: Path) -> None:
    legal = write_tiny_adapter(tmp_path / "legal", model, seed=2, rank=10, modules=("q_proj",))
    orders = ({"sql": str(sql), "legal": str(legal)}, {"legal": str(legal), "sql": str(sql)})
    for folders in orders:
        read = read_adapters(folders, model)
        assert [one.adapter.name for one in read] == list(folders)
        assert {one.adapter.name: one.number for one in read} == {"legal": 1, "sql": 2}
    assert read.find("") is None and read.identity("") == ""
    with pytest.raises(InvalidRequest, match="no adapter 'alien'"):
        read.find("alien")


def test_vllm_makes_room_for_all_and_wraps_only_what_they_change(model: Path, sql: Path, tmp_path: Path) -> None:
    legal = write_tiny_adapter(tmp_path / "legal", model, seed=2, rank=10, modules=("q_proj",))
    both = read_adapters({"sql": str(sql), "legal": str(legal)}, model)
    expected = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 16}
    assert both.arguments({}) == expected | {"lora_target_modules": sorted(LINEAR)}
    few = both.arguments({"max_loras": 1, "max_lora_rank": 64})
    assert (few["max_loras"], few["max_cpu_loras"], few["max_lora_rank"]) == (1, 2, 64), "none is read again"
    assert both.arguments({"max_loras": 4})["max_cpu_loras"] == 4
    with pytest.raises(ConfigError, match=r"lora_modules.legal has rank 10; the maximum is 8: raise .*max_lora_rank"):
        both.arguments({"max_lora_rank": 8})
    assert Adapters({}).arguments({}) == {}
    pattern = write_tiny_adapter(tmp_path / "p", model, seed=2, config={"rank_pattern": {"q_proj": 700}})
    with pytest.raises(ConfigError, match="rank 700; the maximum is 512: vLLM takes none"):
        read_adapters({"p": str(pattern)}, model).arguments({})


def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return apply


def added(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return changed(lambda tensors: {**tensors, f"base_model.model.model.{name}": tensor})


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return changed(lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()})


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "has no adapter_config.json: give the folder"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
    "no rank": (
        lambda folder: (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": None})),
        "cannot be read",
    ),
    "cut off": (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 64), "cannot be read"),
    "another method": (
        lambda folder: (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"})),
        "of the type IA3; only LORA",
    ),
    "no tensors": (changed(lambda _: {}), "is empty"),
    "a layer too many": (renamed("layers.1.", "layers.7."), "layers.7.mlp.down_proj, which this model does not have"),
    "another name": (renamed("q_proj", "query"), "query, which this model does not have"),
    "the head": (renamed("layers.0.self_attn.q_proj", "lm_head"), "changes lm_head: vLLM does that where it samples"),
    "the embeddings": (added("embed_tokens.lora_embedding_A", torch.zeros(4, 8)), "changes embed_tokens: "),
    "whole weights": (added(f"{Q}.weight", torch.zeros(64, 64)), "not a LoRA matrix, and which vLLM would ignore"),
    "magnitudes": (added(f"{Q}.lora_magnitude_vector", torch.zeros(64)), "not a LoRA matrix"),
    "fewer inputs": (added(f"{Q}.lora_A.weight", torch.zeros(4, 32)), "q_proj with 32 inputs, and the model's has 64"),
    "fewer outputs": (added(f"{Q}.lora_B.weight", torch.zeros(32, 4)), "with 32 outputs, and the model's has 64"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_vllm_would_serve_otherwise_than_it_was_trained_is_refused(model: Path, sql: Path, fault: str) -> None:
    read_adapters({"sql": str(sql)}, model)
    spoil, message = FAULTS[fault]
    spoil(sql)
    with pytest.raises(ConfigError) as caught:
        read_adapters({"sql": str(sql)}, model)
    assert str(caught.value).startswith("vllm.lora_modules.sql") and message in str(caught.value)


def test_experts_and_packed_weights_are_left_to_vllm(model: Path, sql: Path, tmp_path: Path) -> None:
    tensors = load_file(sql / WEIGHTS)
    expert = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    save_file({**tensors, expert: torch.zeros(4, 8)}, sql / WEIGHTS)
    reported = read_adapters({"sql": str(sql)}, model).arguments({})
    assert reported["lora_target_modules"] == sorted([*LINEAR, "experts"])
    packed = tmp_path / "packed"
    shutil.copytree(model, packed)
    whole = load_file(packed / "model.safetensors")
    save_file(
        {name.replace(".weight", ".qweight"): tensor[..., :1].clone() for name, tensor in whole.items()},
        packed / "model.safetensors",
    )
    read_adapters({"sql": str(sql)}, packed)


def test_the_fingerprint_is_of_the_model_and_of_every_byte_of_its_adapters(
    model: Path, sql: Path, tmp_path: Path
) -> None:
    assert Adapters({}).with_model("f00") == "f00"
    one = read_adapters({"sql": str(sql)}, model)
    renamed_one = read_adapters({"sequel": str(sql)}, model)
    prints = {one.with_model("f00"), one.with_model("f01"), renamed_one.with_model("f00"), "f00"}
    assert len(prints) == 4
    moved = shutil.copytree(sql, tmp_path / "moved")
    assert read_adapters({"sql": str(moved)}, model).with_model("f00") == one.with_model("f00")
    one.check_unchanged()
    for name in (WEIGHTS, "adapter_config.json"):
        content = (sql / name).read_bytes()
        (sql / name).write_bytes(content[:-1] + b" ")
        assert read_adapters_fingerprint(sql, model) != one.with_model("f00")
        with pytest.raises(ConfigError, match=r"lora_modules.sql has changed in .* Restart the service"):
            one.check_unchanged()
        (sql / name).write_bytes(content)
    one.check_unchanged()


def read_adapters_fingerprint(folder: Path, model: Path) -> str:
    """Of a folder whose files may be damaged; what cannot be read has none."""
    try:
        return read_adapters({"sql": str(folder)}, model).with_model("f00")
    except ConfigError:
        return ""
