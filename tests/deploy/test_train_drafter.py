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
from deploy.models import fetch_model
from serve_app.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import load_eagle3
from speculative.model.loading import load_decoder
from speculative.model.mtp import load_mtp
from speculative.request import Request, SamplingParams
from speculative.training.data import Conversations
from speculative.training.heads import HeadKind, initial_head, save_head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=4)


def train(model: Path, out: Path, *options: object) -> Result:
    arguments = ["train-drafter", "--model", model, "--out", out, "--draft-vocab", 256, *options]
    return CliRunner().invoke(main, [str(one) for one in arguments])


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())  # type: ignore[no-any-return]


def curve(out: Path) -> list[dict[str, Any]]:
    return report(out)["curve"]  # type: ignore[no-any-return]


def test_a_model_trains_its_own_drafter(model: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "out", tmp_path / "report.json"
    result = train(model, out, "--conversations", 40, "--steps", 6, "--json", told)
    assert result.exit_code == 0, result.output
    assert "the model answers" in result.output and "step 6" in result.output
    assert json.loads(told.read_text())["provenance"]["conversations"] >= 2
    assert [point["step"] for point in curve(out)] == [0, 6]
    assert len(load_eagle3(out / "head", decoder(model), dtype=torch.float32).draft_ids) == 256
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")

    assert "--resume" in train(model, out, "--steps", 8).output, "a training is not overwritten"
    assert [point["step"] for point in curve(out)] == [0, 6]
    resumed = train(model, out, "--steps", 8, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "resumed: step 6" in resumed.output
    assert [point["step"] for point in curve(out)] == [0, 6, 8]
    assert report(out)["provenance"]["init_from"] is None
    assert report(out)["final"] == curve(out)[-1]


def test_an_mtp_module_is_trained_and_improved_later(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    result = train(model, first, "--kind", "mtp", "--conversations", 40, "--steps", 4)
    assert result.exit_code == 0, result.output
    load_mtp(first / "head", decoder(model), dtype=torch.float32)
    assert (report(first)["draft_vocab_size"], report(first)["loss_vocab_size"]) == (512, 256)

    data = ("--data", first / "conversations.npz", "--init-from", first / "head")
    assert "no EAGLE-3 head" in train(model, second, *data, "--steps", 2).output, "it is of another kind"
    result = train(model, second, *data, "--kind", "mtp", "--steps", 2, "--checkpoint-minutes", 0)
    assert result.exit_code == 0, result.output
    assert curve(second)[0]["held_out"]["acceptance"] == pytest.approx(
        curve(first)[-1]["held_out"]["acceptance"], abs=0.01
    )
    assert report(second)["provenance"]["init_from"] == str(first / "head")
    result = train(model, second, *data[:2], "--kind", "mtp", "--steps", 3, "--resume")
    assert result.exit_code == 0, result.output
    assert report(second)["provenance"]["init_from"] == str(first / "head"), "what it began from stays told"
    assert [point["step"] for point in curve(second)] == [0, 1, 2, 3]


def decoder(model: Path) -> Decoder:
    return load_decoder(model, dtype=torch.float32, device="cpu")


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_two_minutes_make_a_head_of_the_real_model_better(
    kind: HeadKind, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, out = fetch_model("smollm2-135m"), tmp_path / "out"
    written = tmp_path_factory.getbasetemp() / "conversations-of-the-real-model.npz"
    data = ("--data", written) if written.exists() else ("--conversations", 60)
    result = train(folder, out, "--kind", kind, *data, "--draft-vocab", 4096, "--minutes", 2, "--threads", 2)
    assert result.exit_code == 0, result.output
    if not written.exists():
        Conversations.load(out / "conversations.npz").save(written)
    first, last = (curve(out)[place]["held_out"] for place in (0, -1))
    assert last["acceptance"][0] > first["acceptance"][0] + 0.05
    save_head(initial_head(kind, decoder(folder), torch.arange(4096)), tmp_path / "start")
    assert accepted_share(folder, kind, out / "head") > accepted_share(folder, kind, tmp_path / "start") + 0.02


def accepted_share(folder: Path, kind: HeadKind, head: Path) -> float:
    """What the engine expects to accept of a head's drafts, on a question it was not trained on."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        max_num_seqs=8,
        kv_cache_tokens=2048,
        drafter=DrafterConfig(kind=kind, model=str(head), num_draft_tokens=3),
    )
    engine = EngineCore.load(folder, config)
    prompt = tuple(Tokenizer.from_folder(folder).encode_chat([{"role": "user", "content": "Why is the sky blue?"}]))
    for seed in range(4):
        engine.add(Request(str(seed), prompt, SamplingParams(max_tokens=40, ignore_eos=True), seed=seed))
    while engine.has_work:
        engine.step()
    stats = engine.take_stats()
    return stats.expected_accepted / stats.num_drafted
