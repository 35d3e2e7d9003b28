"""A model of one's own by `--model`: nothing of the demo's model comes along."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from deploy.cli.console import CONFIGS
from deploy.cli.main import main
from deploy.run.demo import Service, curl_line
from deploy.run.own_model import BASE, OwnModel, own_application
from deploy.run.preflight import chats
from serve_app.config.app_config import AppConfig
from serve_app.config.files import load_config
from speculative.errors import ConfigError
from tests.support.tiny_models import write_tiny_model


def args_of(source: str = "org/model", **placed: object) -> AppConfig:
    return own_application(OwnModel(source, **placed)).application.args  # type: ignore[arg-type]


def refused(*line: str) -> str:
    said = CliRunner().invoke(main, list(line))
    assert said.exit_code != 0
    return " ".join(said.output.split())


def test_nothing_in_the_file_for_ones_own_model_belongs_to_another() -> None:
    own = load_config(BASE).application.args
    assert own.model.model_fields_set == {"source"} and own.drafter.model is None
    sizes = {"max_model_len", "kv_cache_tokens"}
    assert not own.engine.model_fields_set & sizes, "lengths and cache are the model's and the machine's"
    assert "smollm" not in BASE.read_text().lower()


def test_a_model_is_served_under_its_own_name_and_with_its_own_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Mistral-7B"
    (folder / "head").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for source in (str(folder), "."):  # a relative folder is found from anywhere
        args = args_of(source, drafter="eagle3:head")
        assert (args.model.source, args.model.served_name) == (str(folder), "Mistral-7B")
        assert args.drafter.model == str(folder / "head")
        assert args.model.chat_template is None
    assert args_of("meta-llama/Llama-3.1-8B@main", name="llama").model.served_name == "llama"


def test_where_it_runs() -> None:
    pool = args_of(gpus=0).pool("monolith")
    assert (pool.replicas, pool.num_gpus) == (1, 0)
    args = args_of(gpus=2)
    pool = args.pool("monolith")
    assert (pool.replicas, pool.num_gpus) == (2, 1), "our engine: a replica on each GPU"
    assert args.engine.max_num_seqs > args_of(gpus=0).engine.max_num_seqs, "a GPU has room for more"
    args = args_of(gpus=2, engine="vllm")
    assert (args.pool("monolith").replicas, args.pool("monolith").num_gpus, args.ranks.tensor) == (1, 2, 2)


def test_drafters_go_by_their_kind_and_folder() -> None:
    assert args_of(drafter="suffix").drafter.kind == "suffix"
    assert args_of(drafter="none").drafter.kind == "none"
    drafter = args_of(drafter="draft_model:Qwen/Qwen3-0.6B").drafter
    assert (drafter.kind, drafter.model) == ("draft_model", "Qwen/Qwen3-0.6B")
    for given, fault in (
        ("eagle", "--drafter eagle: the kinds are none, ngram"),
        ("eagle3", "--drafter eagle3: eagle3 drafters have weights; give eagle3:FOLDER"),
        ("ngram:/models/head", "--drafter ngram:/models/head: only draft_model, eagle3, mtp take weights"),
    ):
        with pytest.raises(ConfigError, match=fault):
            args_of(drafter=given)


def test_a_command_takes_a_file_or_a_model_and_says_what_goes_with_which() -> None:
    assert "Give a configuration file, or --model" in refused("serve")
    assert "demo.yaml names its own model; give it or --model, not both." in refused("serve", "demo", "--model", "x")
    for unset in ("", " "):
        assert "--model is empty; give a folder" in refused("config", "check", "--model", unset)
    assert "--gpus goes with --model; " in refused("config", "check", "demo", "--gpus", "1")
    assert f"Error: {CONFIGS}/own.yaml: applications[0].args.model.source: There is no" in refused(
        "config", "check", "own"
    )
    said = refused("config", "check", "--model", "nowhere/at/all")
    assert "--model nowhere/at/all: " in said and "fine" not in said


def test_what_is_shown_can_be_kept_and_served(tmp_path: Path) -> None:
    file, given = tmp_path / "my.yaml", ["--model", "org/m", "--gpus", "2", "--drafter", "suffix"]
    file.write_text(CliRunner().invoke(main, ["config", "show", *given]).output)
    kept, own = load_config(file).application.args, args_of("org/m", gpus=2, drafter="suffix")
    assert kept.engine_config("monolith") == own.engine_config("monolith")
    assert kept.pool("monolith") == own.pool("monolith")
    values = yaml.safe_load(CliRunner().invoke(main, ["config", "values", "--model", "org/m", "--gpus", "1"]).output)
    assert values["config"]["model"] == {"source": "org/m"} and values["pools"]["monolith"]["gpus"] == 1


def test_a_base_model_is_tried_with_a_text(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "base", tokenizer=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    service = Service("http://localhost:1", "base")
    with service.client:
        for template, path in ((None, "v1/completions"), ("{{ messages[0].content }}", "v1/chat/completions")):
            file.write_text(json.dumps(config if template is None else config | {"chat_template": template}))
            line = curl_line(service, chats=chats(args_of(str(folder))))
            assert f"/{path} " in line and ('"messages"' in line) == ("chat" in path)
    assert chats(args_of(str(tmp_path / "on" / "another" / "node")))
    assert chats(args_of(str(folder), name="x"))
