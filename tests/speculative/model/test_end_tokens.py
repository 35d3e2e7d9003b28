"""What ends an answer: what any of a checkpoint's files names, and nothing that is no token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from speculative.drafting.weights import check_same_model
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.end_tokens import END_TOKEN_FILES, end_tokens
from speculative.request import FinishReason, Request, SamplingParams
from tests.support.engines import run, tiny_engine
from tests.support.tiny_models import write_tiny_model

TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "<|endoftext|>": 3}, "merges": []},
    "added_tokens": [{"id": 3, "content": "<|endoftext|>"}, {"id": 4, "content": "<|im_end|>"}],
}


def write(folder: Path, **files: Any) -> Path:
    for name in END_TOKEN_FILES:
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def of(tokenizer: Any, config: Any) -> dict[str, Any]:
    """A tokenizer's two files."""
    return {"tokenizer_config": config, "tokenizer": tokenizer}


def test_every_file_has_its_say(tmp_path: Path) -> None:
    generation, config, of_tokenizer = "generation_config.json", "config.json", "tokenizer_config.json"
    special = "special_tokens_map.json"
    tuned = {  # whose base's end of text still stands in two of the files
        "config": {"eos_token_id": 3, "vocab_size": 5},
        "generation_config": {"eos_token_id": 3},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
    }
    named = {"special_tokens_map": {"eos_token": "b"}}
    new_form = {"eos_token": "a", "added_tokens_decoder": {}}
    cases: tuple[tuple[dict[str, Any], dict[int, tuple[str, ...]]], ...] = (
        ({**tuned, "tokenizer": TOKENIZER}, {3: (generation, config), 4: (of_tokenizer,)}),
        ({"config": {"eos_token_id": [2, 1]}}, {2: (config,), 1: (config,)}),
        (
            {"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [7, 2]}},
            {7: (generation,), 2: (generation, config)},
        ),
        ({"config": {"eos_token_id": None}, "generation_config": {}}, {}),
        ({"config": {"text_config": {"eos_token_id": 9, "vocab_size": 10}}}, {9: (config,)}),
        (of(TOKENIZER, {"eos_token": {"content": "c", "lstrip": False}}), {2: (of_tokenizer,)}),
        (of(TOKENIZER, {}) | named, {1: (special,)}),
        (of(TOKENIZER, {"eos_token": "a"}) | named, {0: (of_tokenizer,), 1: (special,)}),
        (of(TOKENIZER, new_form) | named, {0: (of_tokenizer,)}),
        (of(TOKENIZER, {"eos_token": ""}), {}),
        (of({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}, {"eos_token": "b"}), {1: (of_tokenizer,)}),
        (of(TOKENIZER, {"eos_token": "z"}) | {"added_tokens": {"z": 8}}, {8: (of_tokenizer,)}),
        (
            {"tokenizer_config": {"eos_token": "z", "added_tokens_decoder": {"5": {"content": "z"}}}},
            {5: (of_tokenizer,)},
        ),
        ({"tokenizer_config": {"eos_token": "z"}}, {}),  # weights without a tokenizer
        ({}, {}),
    )
    for files, wanted in cases:
        assert end_tokens(write(tmp_path, **files)) == wanted, files


def test_what_is_no_token_is_refused_with_its_file_and_field(tmp_path: Path) -> None:
    for wrong in (-1, True, "2", 2.0, [1, None], [[2]], {"a": 1}):
        for name in ("config", "generation_config"):
            with pytest.raises(ConfigError, match=rf"/{name}\.json: `eos_token_id` has "):
                end_tokens(write(tmp_path, **{name: {"eos_token_id": wrong}}))
    for wrong in (5, True, ["a"], {"text": "a"}, {"content": 3}):
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: `eos_token` is "):
            end_tokens(write(tmp_path, **of(TOKENIZER, {"eos_token": wrong})))
    with pytest.raises(ConfigError, match=r"`eos_token` is 'z', which is no token of tokenizer\.json"):
        end_tokens(write(tmp_path, **of(TOKENIZER, {"eos_token": "z"})))
    for files in (of(TOKENIZER, {"eos_token": "<|im_end|>"}), {"generation_config": {"eos_token_id": [1, 4]}}):
        with pytest.raises(ConfigError, match=r"is token 4, and the model's tokens go from 0 to 3 .*`vocab_size`"):
            end_tokens(write(tmp_path, config={"vocab_size": 4}, **files))
    damages = ({"added_tokens": [1]}, {"added_tokens": [{"content": "z"}]}, {"model": {"vocab": [1]}}, {"model": 1})
    for damaged in damages:
        with pytest.raises(ConfigError, match=r"tokenizer\.json is damaged"):
            end_tokens(write(tmp_path, **of(damaged, {"eos_token": "z"})))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        end_tokens(tmp_path)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat fine-tune: config.json and generation_config.json have its base's end of text, 0."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tuned") / "model", tokenizer=True)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": 0}))
    return folder


def answer(engine: EngineCore, token: int, **params: Any) -> Any:
    """An answer in which one token is all but certain."""
    asked = SamplingParams(max_tokens=8, temperature=1, logit_bias=((token, 100.0),), **params)
    engine.add(Request("r", (5, 6), asked, seed=3))
    return run(engine)["r"]


def test_an_engine_ends_with_any_of_them(tuned: Path) -> None:
    assert ModelConfig.from_folder(tuned).eos_token_ids == (0, 2)
    engine = tiny_engine(tuned)
    for token in (0, 2):
        ended = answer(engine, token)
        assert (ended.finish_reason, ended.stop_token_id, ended.token_ids) == (FinishReason.STOP, token, [token])
        went_on = answer(engine, token, ignore_eos=True)
        assert (went_on.finish_reason, went_on.token_ids) == (FinishReason.LENGTH, [token] * 8)
        later = answer(engine, token, min_tokens=3)
        assert later.finish_reason is FinishReason.STOP and later.token_ids[-1] == token
        assert len(later.token_ids) == 4 and not {0, 2} & set(later.token_ids[:3])


def test_new_weights_may_come_without_a_tokenizer(tuned: Path, tmp_path: Path) -> None:
    served = ModelConfig.from_folder(tuned)
    bare = Path(shutil.copytree(tuned, tmp_path / "bare", ignore=shutil.ignore_patterns("tok*", "special*", "gen*")))
    assert ModelConfig.from_folder(bare).eos_token_ids == (0,)
    check_same_model(bare, served)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    with pytest.raises(ConfigError, match="eos_token_ids"):
        check_same_model(bare, served)
