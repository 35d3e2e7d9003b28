"""Reloading of weights into kernels that pack them as oneDNN and vLLM's CPU build do."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from serve_app.backends.vllm_parts.cpu_layouts import other_than_sent, reload_in_same_layout


class FakePacking(ModuleType):
    """Stands for `vllm.model_executor.layers.utils`: it packs by the number of threads, and multiplies by the layout in
    which a shape was first packed. broken: it multiplies rightly never."""

    broken = False

    def __init__(self) -> None:
        super().__init__("utils")
        self.first_layouts: dict[tuple[int, ...], int] = {}
        self.dispatch_cpu_unquantized_gemm = self.pack

    def pack(self, layer: nn.Linear, remove_weight: bool) -> None:
        layout = torch.get_num_threads() % 2  # all even numbers have one, and all odd ones another
        shape, copy = tuple(layer.weight.shape), layer.weight.detach().clone()

        def multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            expected = self.first_layouts.setdefault(shape, layout)
            right = expected == layout and not self.broken
            return nn.functional.linear(inputs, copy if right else copy.flip(0), bias)

        layer.cpu_linear = multiply  # type: ignore[assignment]
        if remove_weight:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Model(nn.Module):
    """Two layers of one shape, whose weights go when they are packed; an embedding, and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = (layer(8, 6) for _ in range(2))
        self.embedding = layer(8, 16)
        self.head = layer(8, 16)
        self.head.weight = self.embedding.weight


def layer(num_inputs: int, num_outputs: int) -> nn.Linear:
    made = nn.Linear(num_inputs, num_outputs, bias=False).requires_grad_(False)
    made.input_size = num_inputs  # type: ignore[assignment]
    return made


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePacking]:
    packing = FakePacking()
    names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "utils", packing, raising=False)
    monkeypatch.setitem(sys.modules, f"{names[-1]}.utils", packing)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield packing
    torch.set_num_threads(before)


@pytest.fixture
def model(packing: FakePacking) -> Model:
    model = Model()
    for part in (model.inner, model.other):
        packing.pack(part, remove_weight=True)
    for part in (model.embedding, model.head):
        packing.pack(part, remove_weight=False)
    return model


def new_weights(model: Model, packing: FakePacking, **changes: Tensor) -> dict[str, Tensor]:
    """Reload as vLLM does: layer by layer, and of a tied head nothing."""
    new = {"inner": torch.randn(6, 8), "other": torch.randn(6, 8), "embedding": torch.randn(16, 8)} | changes

    def reload() -> None:
        for name, weight in new.items():
            part = getattr(model, name)
            if name == "embedding":
                part.weight.copy_(weight)
            else:
                part.weight = nn.Parameter(weight.clone(), requires_grad=False)
            packing.dispatch_cpu_unquantized_gemm(part, remove_weight=name != "embedding")

    reload_in_same_layout(model, reload)
    return new | {"head": new["embedding"]}


def assert_multiplies(model: Model, weights: dict[str, Tensor]) -> None:
    inputs = torch.randn(5, 8)
    for name, weight in weights.items():
        part = getattr(model, name)
        torch.testing.assert_close(
            part.cpu_linear(inputs, part.weight, None), inputs @ weight.T, msg=name, equal_nan=True
        )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_new_weights_are_multiplied_rightly(model: Model, packing: FakePacking, num_threads: int) -> None:
    for _ in range(2):
        torch.set_num_threads(num_threads)
        assert_multiplies(model, new_weights(model, packing))
        assert torch.get_num_threads() == num_threads
        assert packing.dispatch_cpu_unquantized_gemm == packing.pack


def test_weights_that_are_not_finite_are_not_called_wrongly_multiplied(model: Model, packing: FakePacking) -> None:
    torch.set_num_threads(2)
    some, all_nan = torch.randn(6, 8), torch.full((6, 8), torch.nan)
    some[2, 3] = torch.inf
    assert_multiplies(model, new_weights(model, packing, inner=some, other=all_nan))


def test_products_that_stay_wrong_are_an_error(model: Model, packing: FakePacking) -> None:
    packing.broken = True
    with pytest.raises(RuntimeError, match="multiply wrongly with the new weights of Linear"):
        new_weights(model, packing)
    assert torch.get_num_threads() == 1
    assert packing.dispatch_cpu_unquantized_gemm == packing.pack


def test_a_model_of_other_kernels_is_only_reloaded() -> None:
    calls: list[str] = []
    reload_in_same_layout(nn.Linear(2, 2), lambda: calls.append("reloaded"))
    assert calls == ["reloaded"]


def test_a_parameter_that_is_not_what_was_sent_is_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.mlp, model.norm, model.head = nn.Module(), nn.LayerNorm(8, bias=False), layer(8, 16)
    model.mlp.gate_up_proj, model.packed_modules_mapping = layer(8, 12), {"gate_up_proj": ["gate_proj", "up_proj"]}
    gate, up = model.mlp.gate_up_proj.weight.chunk(2)
    sent = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "norm.weight": model.norm.weight}
    sent["head.weight"] = model.head.weight[:15]  # vLLM pads it
    save_file({name: tensor.clone() for name, tensor in sent.items()}, tmp_path / "model.safetensors")
    assert other_than_sent(model, tmp_path) == ""
    model.mlp.gate_up_proj.weight[:6] = model.mlp.gate_up_proj.weight[6:].clone()
    assert other_than_sent(model, tmp_path) == "mlp.gate_up_proj.weight"
