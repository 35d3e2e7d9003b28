"""`python -m tools.train_head` from end to end on a tiny model, and the data that it reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from tests.support.tiny_models import write_tiny_model
from tools.train_head.__main__ import main
from tools.train_head.conversations import Conversations, answer_prompts, read_prompts, write_questions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, tokenizer=True, num_hidden_layers=4, max_position_embeddings=2560)


@pytest.fixture(scope="module")
def engine(model: Path) -> EngineCore:
    config = EngineConfig(dtype="float32", device="cpu", kv_cache_tokens=4096, drafter=DrafterConfig(kind="none"))
    return EngineCore.load(model, config)


def train(model: Path, out: Path, *options: object) -> Result:
    arguments = ["--model", model, "--out", out, "--draft-vocab", 256, "--dtype", "float32", *options]
    return CliRunner().invoke(main, [str(one) for one in arguments])


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())  # type: ignore[no-any-return]


def test_a_model_trains_its_own_drafter_and_improves_it_later(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    result = train(model, first, "--conversations", 40, "--steps", 6)
    assert result.exit_code == 0, result.output
    assert report(first)["provenance"]["conversations"] >= 2 and report(first)["draft_vocab_size"] == 256
    options = ("--data", first / "conversations.npz", "--init-from", first / "head", "--steps", 2)
    result = train(model, second, *options, "--report-minutes", 0)
    assert result.exit_code == 0, result.output
    assert [point["step"] for point in report(second)["curve"]] == [0, 1, 2]
    start, before = report(second)["curve"][0]["held_out"], report(first)["best"]["held_out"]
    assert start["sampled"] == pytest.approx(before["sampled"], abs=0.01)


def test_prompts_of_the_user_are_answered_and_learnt_from(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}."}) + "\n" for number in range(9)))
    result = train(model, tmp_path / "out", "--data", prompts, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert report(tmp_path / "out")["provenance"]["conversations"] == 9


def test_a_questions_frame_is_the_chat_templates(engine: EngineCore, model: Path) -> None:
    tokenizer = Tokenizer.from_folder(model)
    one, other = (tuple(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in ("Why", "A cat"))
    questions = write_questions(engine, tokenizer, 12)
    assert questions and len(set(questions)) == len(questions)
    for question in questions:
        assert question[0] == one[0] == other[0] and question[-2:] == one[-2:] == other[-2:]


def test_each_turn_is_answered_on_top_of_the_answers_before(engine: EngineCore, model: Path) -> None:
    tokenizer = Tokenizer.from_folder(model)
    turns: list[dict[str, str]] = [{"role": "user", "content": text} for text in ("One?", "Two?", "Three?")]
    given = [turns[0], {"role": "assistant", "content": "Yes."}, turns[1]]
    found = Conversations.pack(answer_prompts(engine, tokenizer, [turns, given]))
    starts, stops = found.starts, found.starts + found.lengths
    prompts, answers = (
        [tokenizer.decode(found.token_ids[a:b].tolist()) for a, b in zip(begins, ends, strict=True)]
        for begins, ends in ((starts, starts + found.prompt_lengths), (starts + found.prompt_lengths, stops))
    )
    assert len(found) == 4, "three turns, and the one that is still to be answered"
    said = {"role": "assistant", "content": answers[0]}
    assert prompts[2] == tokenizer.decode(tokenizer.encode_chat([turns[0], said, turns[1]]))
    assert prompts[:2] == [tokenizer.decode(tokenizer.encode_chat(one)) for one in (turns[:1], given)]
    for _ in range(3):
        turns += turns  # outgrows the model
    assert 1 < len(answer_prompts(engine, tokenizer, [turns])) < len(turns)


def test_a_line_that_is_no_prompt_is_named(model: Path, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "prompts.jsonl", Tokenizer.from_folder(model)
    path.write_bytes('{"prompt": "a\u2028b"}\r\n\n{"messages": [{"role": "user", "content": "\x85"}]}'.encode())
    assert [one[0]["content"] for one in read_prompts(path, tokenizer)] == ["a\u2028b", "\x85"]
    for line in ('{"question": "b"}', "[", "3", '{"prompt": "\\ud800"}'):
        path.write_text('{"prompt": "a"}\n' + line + "\n")
        with pytest.raises(ConfigError, match="line 2"):
            read_prompts(path, tokenizer)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({}, None),
        ({"token_ids": [1, -2, 3, 4]}, "do not fit"),
        ({"lengths": [4, 0]}, "do not fit"),
        ({"lengths": [2, 3]}, "do not fit"),
        ({"prompt_lengths": [1, 3]}, "do not fit"),
        ({"temperatures": [0.0]}, "differ in number"),
    ],
)
def test_conversations_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, list[float]], reported: str | None
) -> None:
    good = {"token_ids": [1, 2, 3, 4], "lengths": [2, 2], "prompt_lengths": [1, 1], "temperatures": [0.0, 1.0]}
    path = tmp_path / "some.npz"
    np.savez(path, **{name: np.array(value) for name, value in {**good, **change}.items()})
    if reported is not None:
        with pytest.raises(ConfigError, match=reported):
            Conversations.load(path)
        return
    Conversations.load(path).save(tmp_path / "again.npz")
    assert Conversations.load(tmp_path / "again.npz").token_ids.tolist() == [1, 2, 3, 4]
