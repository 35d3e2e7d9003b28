"""A weight format from outside: in a copy of the tree, one file and an entry, as docs/architecture.md says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.changed_tree import changed_tree, files_to_add_to, run_in, served_in, with_added
from tests.support.tiny_models import greedy, write_tiny_model

pytestmark = pytest.mark.slow

MODULE = "speculative/model/formats/NAME.py"
REGISTRY = "speculative/weight_formats.py"
ENTRY = '    "int8": WeightFormat("eight bits by rows", 1),\n'
INT8 = '''"""Weights of eight bits with a scale for each output, by torch's operators on any device."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.model.formats import Format
from speculative.model.fp8 import ScaledRows
from speculative.model.layers import Matrix, nan_parameter


class Int8Linear(Matrix):
    def __init__(self, num_inputs, num_outputs, *, bias, dtype, device) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias, dtype=dtype, device=device)
        zeros = torch.zeros(num_outputs, num_inputs, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(zeros, requires_grad=False)
        self.weight_scale = nan_parameter(num_outputs, 1, dtype=torch.float32, device=device)

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, (self.weight * self.weight_scale).to(rows.dtype), self.bias)


class Int8(Format):
    linear = Int8Linear

    def rounded(self, weight: Tensor) -> ScaledRows:
        scales = weight.float().abs().amax(-1, keepdim=True) / 127
        return ScaledRows((weight.float() / scales).round().to(torch.int8), scales)


FORMAT = Int8("int8")
'''
WITHOUT_A_SERVICE = """
import json
import sys
from dataclasses import astuple
from pathlib import Path

from serve_app.config.files import parse_args
from serve_app.deployments.known_numerics import KnownNumerics
from speculative.config import EngineConfig
from speculative.errors import ConfigError
from tools.chart import schema

config = parse_args({"model": {"source": "model"}, "engine": {"dtype": "float32", "quantization": "int8"}})
known = KnownNumerics(config).of(config.pool_names[0])
values = schema()["definitions"]["config.EngineSection"]["properties"]["quantization"]
try:
    EngineConfig(quantization="int3")
except ConfigError as error:
    refused = str(error)
assert "torch" not in sys.modules, "a server knows formats without it"

import torch

from serve_app.referee.book.transformers_model import TransformersModel
from speculative.drafting.weights import load_weights
from speculative.model.applied import check_applied

found = TransformersModel(Path("model"), "int8").logits(TOKENS, 1).log_softmax(-1)
logprobs = found.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
settings = EngineConfig(dtype="float32", quantization="int8", device="cpu", kv_cache_tokens=512)
decoder = load_weights(Path("model"), settings, torch.device("cpu"), check=True).decoder
decoder.layers[1].mlp.down_proj.weight[3, 5] ^= 1
try:
    check_applied(decoder, Path("model"), torch.float32)
except ConfigError as error:
    damaged = str(error)
print(json.dumps([logprobs, astuple(known), values, refused, damaged]))
"""


def test_a_format_is_served_once_it_is_in_one_file_and_in_the_registry(tmp_path: Path) -> None:
    assert {MODULE, REGISTRY} <= files_to_add_to("a weight format**")
    files = with_added({REGISTRY: [("FORMATS: Mapping[str, WeightFormat] = {\n", ENTRY)]})
    tree = changed_tree(tmp_path / "tree", files | {MODULE.replace("NAME", "int8"): INT8})
    write_tiny_model(tree / "model", tokenizer=True)
    prompt = [3 + (7 * index) % 41 for index in range(30)]
    model = AutoModelForCausalLM.from_pretrained(tree / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            steps = parameter.data.abs().amax(-1, keepdim=True) / 127
            parameter.data = (parameter.data / steps).round() * steps
    wanted, of_wanted = greedy(model, prompt, 24)
    tokens, logprobs = served_in(tree, prompt, 24, quantization="int8")
    program = WITHOUT_A_SERVICE.replace("TOKENS", str([*prompt, *tokens]))
    independent, known, values, refused, damaged = json.loads(run_in(tree, program).splitlines()[-1])
    assert tokens == wanted
    for own in (logprobs, independent[len(prompt) - 1 :]):
        assert (torch.tensor(own) - torch.tensor(of_wanted)).abs().max() < 1e-4, "float32's tolerance is ten times that"
    assert known == ["truespec", "float32", "int8", False]
    assert "int8" in values["enum"] and "`int8`: eight bits by rows" in values["description"]
    assert refused == "quantization must be one of auto, int8, float32, bfloat16, w4a8, fp8, got 'int3'."
    assert "model.layers.1.mlp.down_proj.weight did not arrive in the model" in damaged
    checking = "from deploy.cli.main import main; main(['config', 'check', 'model', '--quantization', 'int8'])"
    assert "weights: int8, eight bits by rows" in run_in(tree, checking)
