"""Writes tiny LoRA adapters with random weights, as PEFT saves them, and models with one merged into them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_tiny_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = LINEAR,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter of a model; returns its folder.

    Its weights are drawn wide enough that answers differ clearly. `config` are further fields of
    `adapter_config.json`, in place of those that there would be.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in modules:
            num_outputs, num_inputs = weight.shape
            for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                noise = torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = 0.2 * noise
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    reported = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(reported | dict(config or {})), encoding="utf-8")
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the adapter merged into its weights, W + (alpha / r) B A; returns its folder."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / config["r"]
    weights, parts = (load_file(one) for one in (model / "model.safetensors", adapter / "adapter_model.safetensors"))
    for name in [name for name in parts if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        change = scale * parts[f"{module}.lora_B.weight"] @ parts[name]
        weights[f"{module.removeprefix('base_model.model.')}.weight"] += change
    shutil.copytree(model, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
