"""`truespec train-drafter` from end to end on a tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from deploy.cli.main import main
from deploy.jobs.train_drafter import answer_prompts, read_prompts
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError, InvalidRequest
from speculative.model.catalogue import fetch_model
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import load_eagle3
from speculative.model.loading import load_decoder
from speculative.model.mtp import load_mtp
from speculative.request import Request, SamplingParams
from speculative.training.data import Conversations
from speculative.training.heads import HeadKind, initial_head, save_head
from tests.support.tiny_models import write_tiny_model


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
    out, reported = tmp_path / "out", tmp_path / "report.json"
    result = train(model, out, "--conversations", 40, "--steps", 6, "--json", reported)
    assert result.exit_code == 0, result.output
    assert "the model answers" in result.output and "step 6" in result.output
    assert json.loads(reported.read_text())["provenance"]["conversations"] >= 2
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
    assert report(second)["provenance"]["init_from"] == str(first / "head"), "it still names its start"
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


def test_each_turn_is_answered_on_top_of_the_answers_before(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, tokenizer=True, max_position_embeddings=2560)
    target, tokenizer = decoder(model), Tokenizer.from_folder(model)
    engine = EngineCore(target, target.config, EngineConfig(dtype="float32", device="cpu", kv_cache_tokens=4096))
    turns: list[dict[str, str]] = [{"role": "user", "content": text} for text in ("One?", "Two?", "Three?")]
    given = [turns[0], {"role": "assistant", "content": "Yes."}, turns[1]]
    found = answer_prompts(engine, tokenizer, [turns, given], lambda done, total: None)
    starts, stops = found.starts, found.starts + found.lengths
    prompts, answers = (
        [tokenizer.decode(found.token_ids[a:b].tolist()) for a, b in zip(begins, ends, strict=True)]
        for begins, ends in ((starts, starts + found.prompt_lengths), (starts + found.prompt_lengths, stops))
    )
    assert len(found) == 4, "three turns, and the one that is still to be answered"
    said = {"role": "assistant", "content": answers[0]}
    assert prompts[2] == tokenizer.decode(tokenizer.encode_chat([turns[0], said, turns[1]]))
    said_again = {"role": "assistant", "content": answers[2]}
    assert prompts[3] == tokenizer.decode(tokenizer.encode_chat([turns[0], said, turns[1], said_again, turns[2]]))
    assert prompts[:2] == [tokenizer.decode(tokenizer.encode_chat(one)) for one in (turns[:1], given)]
    for _ in range(3):
        turns += turns  # outgrows the model
    assert 1 < len(answer_prompts(engine, tokenizer, [turns], lambda done, total: None)) < len(turns)


@pytest.mark.parametrize(
    ("data", "reported"), [("no.npz", "cannot be read"), ("no.jsonl", "cannot be read"), ("no.txt", "neither")]
)
def test_wrong_data_is_reported(model: Path, tmp_path: Path, data: str, reported: str) -> None:
    result = train(model, tmp_path / "out", "--data", tmp_path / data, "--steps", 1)
    assert result.exit_code == 1
    assert reported in " ".join(result.output.split())


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path, lambda messages: [1])
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "\\ud800"}]}\n')
    with pytest.raises(ConfigError, match=r"line 3 .*surrogate"):
        read_prompts(path, lambda messages: [1])
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*no chat template"):
        read_prompts(path, untemplated)


def untemplated(messages: object) -> list[int]:
    raise InvalidRequest("messages", "This model has no chat template.")


def test_a_prompt_may_hold_what_else_separates_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "a\u2028b"}\r\n{"prompt": "\x85"}'.encode())
    reported: list[str] = []
    read_prompts(path, lambda messages: reported.append(messages[0]["content"]) or [1])  # type: ignore[func-returns-value]
    assert reported == ["a\u2028b", "\x85"]


def shown(result: Result) -> str:
    """What a command said, on one line."""
    return " ".join(result.output.split())


def test_an_end_that_never_comes_is_refused(model: Path, tmp_path: Path) -> None:
    for minutes in ("0", "nan"):
        result = train(model, tmp_path / "out", "--minutes", minutes)
        assert result.exit_code > 0 and "minutes" in shown(result)


def test_a_folder_that_cannot_be_written_is_reported_before_the_work(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = train(model, tmp_path / "file" / "out", "--steps", 1)
    assert result.exit_code == 1
    assert "cannot be written" in shown(result) and "--out" in shown(result)
    assert "loading" not in result.output


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve conversations of random tokens."""
    path = tmp_path_factory.mktemp("data") / "conversations.npz"
    tokens = np.random.default_rng(0).integers(3, 512, (24, 6)).tolist()
    rows = [tuple(row) for row in tokens]
    Conversations.pack(rows[:12], rows[12:], [0.0, 1.0] * 6).save(path)
    return path


@pytest.fixture
def begun(model: Path, data: Path, tmp_path: Path) -> Path:
    """The folder of a training to go on with."""
    out = tmp_path / "out"
    result = train(model, out, "--data", data, "--steps", 1)
    assert result.exit_code == 0, result.output
    return out


def test_a_resumed_training_keeps_what_it_began_with(model: Path, data: Path, begun: Path, tmp_path: Path) -> None:
    other_data, same_name = tmp_path / "other.npz", tmp_path / "conversations.npz"
    shutil.copy(data, other_data)
    Conversations.load(data).first(9).save(same_name)
    other_model = write_tiny_model(tmp_path / "model", tokenizer=True, num_hidden_layers=4, seed=1)
    before = (begun / "report.json").read_bytes()
    for option, changed, arguments in (
        ("--data", model, ("--data", other_data)),
        ("--data", model, ("--data", same_name)),
        ("--data", model, ()),
        ("--model", other_model, ("--data", data)),
        ("--kind", model, ("--data", data, "--kind", "mtp")),
    ):
        result = train(changed, begun, *arguments, "--steps", 2, "--resume")
        assert result.exit_code == 1, result.output
        assert f"{option} " in shown(result) and "began with" in shown(result)
        assert (begun / "report.json").read_bytes() == before
    moved = shutil.copytree(model, tmp_path / "moved")
    result = train(moved, begun, "--data", data, "--steps", 2, "--resume")
    assert result.exit_code == 0, result.output
    assert report(begun)["provenance"]["data"] == "conversations.npz"


def test_a_damaged_checkpoint_names_itself_and_the_way_out(model: Path, data: Path, begun: Path) -> None:
    for name in ("state.pt", "report.json", "head/model.safetensors", "head/config.json"):
        whole = (begun / name).read_bytes()
        (begun / name).write_bytes(whole[: len(whole) // 2])
        result = train(model, begun, "--data", data, "--steps", 2, "--resume")
        assert result.exit_code == 1, result.output
        assert name.split("/")[0] in shown(result) and "Delete state.pt and report.json" in shown(result)
        assert "download" not in shown(result)
        (begun / name).write_bytes(whole)
    (begun / "state.pt").unlink()
    (begun / "report.json").unlink()
    result = train(model, begun, "--data", data, "--steps", 2, "--resume")
    assert result.exit_code == 0, "as it says: " + result.output


def test_conversations_beyond_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    Conversations.pack([(1, 2)] * 9, [(3, 5000)] * 9, [0.0] * 9).save(path)
    result = train(model, tmp_path / "out", "--data", path, "--steps", 1)
    assert result.exit_code == 1 and "token id 5000" in shown(result)


def test_a_run_that_was_interrupted_while_it_wrote_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations are kept over a restart, belong to their model, and are rewritten where they are damaged."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}."}) + "\n" for number in range(6)))
    arguments = ("--data", prompts, "--steps", 1, "--resume")

    def interrupted(*args: object, **options: object) -> None:
        raise ConfigError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr("deploy.jobs.train_drafter.compute_features", interrupted)
        assert "interrupted" in train(model, out, *arguments).output
    whole = Conversations.load(out / "conversations.npz")
    other_model = write_tiny_model(tmp_path / "model", tokenizer=True, num_hidden_layers=4, seed=1)
    assert "began with" in shown(train(other_model, out, *arguments))

    (out / "conversations.npz").write_bytes(b"PK")
    result = train(model, out, *arguments)
    assert result.exit_code == 0, result.output
    assert "the model answers" in result.output
    assert np.array_equal(Conversations.load(out / "conversations.npz").token_ids, whole.token_ids)
    result = train(model, out, *arguments[:2], "--steps", 2, "--resume")
    assert result.exit_code == 0, result.output
    assert "were written before" in result.output and "the model answers" not in result.output
    assert report(out)["provenance"]["data"] == "prompts.jsonl"


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
