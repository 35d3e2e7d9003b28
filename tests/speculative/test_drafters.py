"""A drafter without weights is one file: this test writes one, and takes it away again."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from speculative.config import DrafterConfig
from speculative.drafters import drafter, registered
from speculative.errors import ConfigError
from speculative.options import Options
from tests.support.changed_tree import changed_tree, run_in
from tests.support.tiny_models import write_tiny_model

MODULE = '''
"""Drafts again what came last."""

from dataclasses import dataclass

from speculative.drafters import drafter
from speculative.options import Options, option
from speculative.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EchoOptions(Options):
    echo_length: int = option(2, "`echo`: tokens that are drafted again.", least=1, most=8)


@drafter("echo", EchoOptions)
class EchoDrafter:
    def __init__(self, options: EchoOptions, max_drafts: int) -> None:
        self.length = min(options.echo_length, max_drafts)

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        return sequence.tokens[-self.length :][:max_drafts]

    def forget(self, request_id: str) -> None:
        pass
'''
CONFIGURATION = """
applications:
  - args:
      model: {{source: {folder}}}
      engine: {{dtype: float32, device: cpu, max_num_seqs: 4, kv_cache_tokens: 1024}}
      drafter: {{kind: echo, echo_length: {length}, num_draft_tokens: 5}}
"""
IN_A_SERVICE = """
import json, sys
from serve_app.backends.vllm_parts.settings import check_settings
from tools.reference import configuration_reference
from tools.chart import schema
from serve_app.config.files import load_config
from speculative.errors import ConfigError

config = load_config("good.yaml").applications[0].args
try:
    load_config("bad.yaml")
except ConfigError as error:
    refused = str(error)
described = [line for line in configuration_reference().splitlines() if "echo_length" in line]
allowed = schema()["definitions"]["config.DrafterSection"]["properties"]["echo_length"]
assert "torch" not in sys.modules, "settings need none of it"

from pathlib import Path
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams

engine_config = config.engine_config("decode")
try:
    check_settings(engine_config, {})
except ConfigError as error:
    vllm = str(error)
engine = EngineCore.load(Path(config.model.source), engine_config)
engine.add(Request("r", (5, 6, 7), SamplingParams(max_tokens=24, logit_bias=((7, 100.0),))))
num_accepted = 0
while engine.has_work:
    num_accepted += sum(delta.num_accepted for delta in engine.step())
read = engine_config.drafter.options[0].echo_length
print(json.dumps([read, refused, vllm, described, allowed, num_accepted, engine.take_stats().num_accepted]))
"""


def test_one_file_is_enough_from_the_configuration_file_to_accepted_drafts(tmp_path: Path) -> None:
    tree = changed_tree(tmp_path / "tree", {"speculative/lookup/echo.py": MODULE})
    folder = write_tiny_model(tmp_path / "m", tokenizer=True)
    for name, length in (("good", 3), ("bad", 9)):
        (tree / f"{name}.yaml").write_text(CONFIGURATION.format(folder=folder, length=length))
    read, refused, vllm, described, allowed, *accepted = json.loads(run_in(tree, IN_A_SERVICE))
    assert read == 3
    assert re.search(r"^bad.yaml: applications\[0\].args.drafter.echo_length: must be at most 8", refused)
    assert vllm.startswith("drafter.kind echo is not supported by vLLM: use none, ngram, suffix")
    assert len(described) == 1 and "`echo`: tokens that are drafted again." in described[0]
    assert (allowed["minimum"], allowed["maximum"], allowed["default"]) == (1, 8, 2)
    assert accepted[0] == accepted[1] > 12, "the text is one token again and again"


def test_options_stay_where_something_else_is_replaced() -> None:
    config = DrafterConfig.of(kind="suffix", suffix_depth=9)
    assert replace(config, sampled=False) == DrafterConfig.of(kind="suffix", suffix_depth=9, sampled=False)


def test_names_are_taken_once() -> None:
    with pytest.raises(ConfigError, match=r"drafter.kind must be one of none, ngram, suffix, .*, got 'echo'"):
        DrafterConfig(kind="echo")
    before = registered()
    assert list(before) == ["ngram", "suffix"]
    with pytest.raises(ValueError, match="ngram is registered twice"):
        drafter("ngram", Options)  # of a drafter that has none
    with pytest.raises(ValueError, match="suffix_depth"):
        drafter("other", before["suffix"].options)
    assert registered() == before


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"ngram_max": 0}, "drafter.ngram_max must be at least 1, got 0"),
        ({"num_draft_tokens": 65}, "drafter.num_draft_tokens must be between 1 and 64, got 65"),
        ({"ngram_min": 9}, r"drafter.ngram_min must be at most ngram_max \(4\), got 9"),
        ({"suffix_depth": 257}, "drafter.suffix_depth must be between 1 and 256, got 257"),
        ({"suffix_depth": 4, "suffix_min_match": 5}, "drafter.suffix_min_match"),
        ({"suffix_min_probability": float("nan")}, "drafter.suffix_min_probability"),
        ({"ngramm_max": 3}, "drafter.ngramm_max is not an option of any drafter"),
    ],
)
def test_wrong_options_are_reported_by_name(options: dict[str, float], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        DrafterConfig.of(**options)
