"""`truespec train-drafter` from end to end on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tiny_models import write_tiny_model

from deploy.cli import main
from deploy.jobs.train_drafter import read_prompts
from speculative.errors import ConfigError
from speculative.model.eagle3 import load_eagle3
from speculative.model.loading import load_decoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=4)


def train(model: Path, out: Path, *options: object) -> Result:
    arguments = ["train-drafter", "--model", model, "--out", out, "--draft-vocab", 256, *options]
    return CliRunner().invoke(main, [str(one) for one in arguments])


def curve(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "report.json").read_text())["curve"]  # type: ignore[no-any-return]


def test_a_model_trains_its_own_drafter(model: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "out", tmp_path / "report.json"
    result = train(model, out, "--conversations", 40, "--steps", 6, "--json", told)
    assert result.exit_code == 0, result.output
    assert "the model answers" in result.output and "step 6" in result.output
    assert json.loads(told.read_text())["provenance"]["conversations"] >= 2
    assert [point["step"] for point in curve(out)] == [0, 6]
    target = load_decoder(model, dtype=torch.float32, device="cpu")
    assert len(load_eagle3(out / "head", target, dtype=torch.float32, device="cpu").draft_ids) == 256

    assert "--resume" in train(model, out, "--steps", 8).output, "a training is not overwritten"
    assert [point["step"] for point in curve(out)] == [0, 6]
    resumed = train(model, out, "--steps", 8, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "resumed: step 6" in resumed.output
    assert [point["step"] for point in curve(out)] == [0, 6, 8]


def test_prompts_of_the_user_are_answered_and_learnt_from(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Count to {number}."} for number in range(9)]
    lines.append({"messages": [{"role": "user", "content": "Hello"}]})  # type: ignore[dict-item]
    prompts.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    result = train(model, tmp_path / "out", "--data", prompts, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["provenance"]["conversations"] == 10


@pytest.mark.parametrize(
    ("data", "told"), [("no.npz", "cannot be read"), ("no.jsonl", "cannot be read"), ("no.txt", "neither")]
)
def test_wrong_data_is_told(model: Path, tmp_path: Path, data: str, told: str) -> None:
    result = train(model, tmp_path / "out", "--data", tmp_path / data, "--steps", 1)
    assert result.exit_code == 1
    assert told in " ".join(result.output.split())


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path, lambda messages: [1])
