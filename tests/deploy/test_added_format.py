"""A weight format from outside: in a copy of the tree, one file and an entry, as docs/architecture.md says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.changed_tree import changed_tree, run_in, with_added
from tests.support.project_files import ROOT
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
REGISTRY = "speculative/weight_formats.py"
ENTRY = '    "int8": WeightFormat("eight bits by rows", 1),\n'
INT8 = '''"""Weights of eight bits with a scale for each output, by torch's operators on any device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.model.formats import OwnFormat
from speculative.model.layers import Matrix, nan_parameter


class Int8Rows(NamedTuple):
    numbers: Tensor
    scales: Tensor

    def to_float(self) -> Tensor:
        return self.numbers * self.scales

    @classmethod
    def stack(cls, parts: Sequence["Int8Rows"]) -> "Int8Rows":
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def parameters(self) -> dict[str, Tensor]:
        return {"weight": self.numbers, "weight_scale": self.scales}


class Int8Linear(Matrix):
    def __init__(self, num_inputs, num_outputs, *, bias, dtype, device) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias, dtype=dtype, device=device)
        zeros = torch.zeros(num_outputs, num_inputs, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(zeros, requires_grad=False)
        self.weight_scale = nan_parameter(num_outputs, 1, dtype=torch.float32, device=device)

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, (self.weight * self.weight_scale).to(rows.dtype), self.bias)


class Int8(OwnFormat):
    linear = Int8Linear

    def rounded(self, weight: Tensor) -> Int8Rows:
        scales = weight.float().abs().amax(-1, keepdim=True) / 127
        return Int8Rows((weight.float() / scales).round().to(torch.int8), scales)


FORMAT = Int8("int8")
'''
IN_A_SERVICE = """
import json
from dataclasses import astuple
from pathlib import Path

import httpx
import torch

from serve_app.config.files import parse_args
from serve_app.referee.book.transformers_model import TransformersModel
from serve_app.referee.judge.known_numerics import KnownNumerics
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.weights import load_weights
from speculative.errors import ConfigError
from tools.chart import schema
from tools.faults.served import FaultyServer

folder = Path("model")
drafts = DrafterConfig(kind="ngram", num_draft_tokens=3)
settings = EngineConfig(dtype="float32", quantization="int8", device="cpu", kv_cache_tokens=512, drafter=drafts)
with FaultyServer(folder, config=settings).running() as url:
    body = {"model": "audited", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    body |= {"ignore_eos": True, "logprobs": 0}
    served = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    model = httpx.get(f"{url}/v1/models/audited", timeout=60).json()
loaded = load_weights(folder, settings, torch.device("cpu"), check=True)
config = parse_args({"model": {"source": "model"}, "engine": {"dtype": "float32", "quantization": "int8"}})
known = KnownNumerics(config).of(config.pool_names[0])
tokens = [*PROMPT, *served["token_ids"]]
independent = TransformersModel(folder, "int8").logits(tokens, len(PROMPT)).log_softmax(-1)
logprobs = independent.gather(1, torch.tensor(served["token_ids"])[:, None])[:, 0].tolist()
values = schema()["definitions"]["config.EngineSection"]["properties"]["quantization"]
try:
    EngineConfig(quantization="int3")
except ConfigError as error:
    refused = str(error)
found = [served["token_ids"], served["logprobs"]["token_logprobs"], logprobs, model["quantization"]]
print(json.dumps([*found, astuple(known), values, refused]))
"""


def test_a_format_is_served_once_it_is_in_one_file_and_in_the_registry(tmp_path: Path) -> None:
    section = PAGE.partition("**a weight format**")[2].partition("\n**")[0]
    assert "`speculative/model/formats/NAME.py`" in section and f"`{REGISTRY}`" in section
    files = with_added({REGISTRY: [("FORMATS: Mapping[str, WeightFormat] = {\n", ENTRY)]})
    tree = changed_tree(tmp_path / "tree", files | {"speculative/model/formats/int8.py": INT8})
    write_tiny_model(tree / "model", tokenizer=True)
    prompt = [3 + (7 * index) % 41 for index in range(30)]
    model = AutoModelForCausalLM.from_pretrained(tree / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            steps = parameter.data.abs().amax(-1, keepdim=True) / 127
            parameter.data = (parameter.data / steps).round() * steps
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(24):
            last = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            tokens.append(int(last[-1].argmax()))
    wanted = last[len(prompt) - 1 :].gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
    found = json.loads(run_in(tree, IN_A_SERVICE.replace("PROMPT", str(prompt))).splitlines()[-1])
    token_ids, logprobs, independent, shown, known, values, refused = found
    assert token_ids == tokens[len(prompt) :]
    for own in (logprobs, independent):
        assert (torch.tensor(own) - wanted).abs().max() < 1e-4, "float32's tolerance is ten times that"
    assert shown == "int8" and known == ["truespec", "float32", "int8", False]
    assert "int8" in values["enum"] and "`int8`: eight bits by rows" in values["description"]
    assert refused == "quantization must be one of auto, int8, float32, bfloat16, w4a8, fp8, got 'int3'."
    checking = "from deploy.cli.main import main; main(['config', 'check', 'model', '--quantization', 'int8'])"
    assert "weights: int8, eight bits by rows" in run_in(tree, checking)
