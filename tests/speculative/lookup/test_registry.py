"""A drafter without weights is one file: this test writes one, and takes it away again."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import speculative.lookup
from deploy.faults.toy import engine_over
from serve_app.backends.vllm_parts.settings import check_settings
from speculative.config import DrafterConfig, EngineConfig, drafter_kinds
from speculative.drafting.weightless import make_weightless
from speculative.errors import ConfigError
from speculative.lookup import registry
from speculative.lookup.registry import drafter, registered
from speculative.options import Options
from speculative.request import Request, SamplingParams
from tests.support.engines import NO_DRAFTS, assert_idle, run, tiny_engine
from tests.support.markov_chain import sample, worst_window
from tests.support.tiny_models import write_tiny_model

MODULE = '''
"""Drafts again what came last."""

from dataclasses import dataclass

from speculative.lookup.registry import drafter
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
IN_A_FILE = """
import sys, speculative.lookup
speculative.lookup.__path__.append(sys.argv[1])
from deploy.run.reference import configuration_reference
from serve_app.config.app_config import AppConfig
for length in (3, 9):
    given = {"model": {"source": "x"}, "drafter": {"kind": "echo", "echo_length": length, "num_draft_tokens": 5}}
    try:
        print(AppConfig.model_validate(given).engine_config("decode").drafter.options[0])
    except ValueError as error:
        print(error)
print("tokens that are drafted again" in configuration_reference(), "torch" in sys.modules)
"""


@pytest.fixture
def echo_folder(tmp_path: Path) -> Path:
    (tmp_path / "lookup").mkdir()
    (tmp_path / "lookup" / "echo.py").write_text(MODULE)
    return tmp_path / "lookup"


@pytest.fixture
def _echo(echo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    importlib.invalidate_caches()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_REGISTERED", registered())
        patch.setattr(speculative.lookup, "__path__", [*speculative.lookup.__path__, str(echo_folder)])
        assert "echo" in drafter_kinds()
        yield
    del sys.modules["speculative.lookup.echo"]
    with pytest.raises(ConfigError, match=r"drafter.kind must be one of none, ngram, suffix, .*, got 'echo'"):
        DrafterConfig(kind="echo")


@pytest.mark.usefixtures("_echo")
def test_one_file_adds_a_drafter_and_the_text_stays(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", vocab_size=64)
    requests = [
        Request(str(i), tuple(range(3, 5 + i)), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        for i in range(4)
    ]
    texts = []
    for config in (NO_DRAFTS, DrafterConfig(kind="echo", num_draft_tokens=4, echo_length=3)):
        engine = tiny_engine(folder, drafter=config)
        for request in requests:
            engine.add(request)
        texts.append({name: answer.token_ids for name, answer in run(engine).items()})
        assert_idle(engine)
    assert texts[0] == texts[1]
    stats = engine.take_stats()
    assert stats.num_drafted > 100 and stats.num_drafted <= 3 * stats.num_drafts


@pytest.mark.usefixtures("_echo")
def test_one_file_adds_a_drafter_and_the_distribution_stays() -> None:
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    echo = make_weightless(DrafterConfig(kind="echo", num_draft_tokens=3))
    engine = engine_over(table, echo, num_drafts=4)
    samples = sample(engine, (3,), 4000, 6)
    assert worst_window(samples, table.double().softmax(-1).numpy(), 3) < 5
    stats = engine.take_stats()
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.usefixtures("_echo")
def test_vllm_does_not_have_it() -> None:
    with pytest.raises(ConfigError, match=r"drafter.kind echo is not supported by vLLM: use none, ngram, suffix"):
        check_settings(EngineConfig(drafter=DrafterConfig(kind="echo")), {})


def test_its_options_are_fields_of_the_configuration_file(echo_folder: Path) -> None:
    command = [sys.executable, "-c", IN_A_FILE, str(echo_folder)]
    read, refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n", 1)
    assert read == "EchoOptions(echo_length=3)"
    assert "drafter.echo_length" in refused and "less than or equal to 8" in refused
    assert refused.endswith("True False\n"), "in the reference, and nothing of it needs torch"


def test_options_stay_where_something_else_is_replaced() -> None:
    config = DrafterConfig(kind="suffix", suffix_depth=9)
    assert replace(config, sampled=False) == DrafterConfig(kind="suffix", suffix_depth=9, sampled=False)


def test_names_are_taken_once() -> None:
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
        ({"ngram_min": 9}, r"drafter.ngram_min must be at most ngram_max \(4\), got 9"),
        ({"suffix_depth": 257}, "drafter.suffix_depth must be between 1 and 256, got 257"),
        ({"ngramm_max": 3}, "drafter.ngramm_max is not an option of any drafter"),
    ],
)
def test_wrong_options_are_reported_by_name(options: dict[str, int], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        DrafterConfig(**options)  # type: ignore[arg-type]
