"""A model of one's own on the command line: nothing of the demo's model comes along."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

from deploy.cli.application import ServeTarget, application_of
from deploy.cli.console import CONFIGS
from deploy.cli.main import main
from deploy.run.demo import Service, curl_line
from deploy.run.machine import Machine
from deploy.run.own_model import BASE, OwnModel
from deploy.run.preflight import check_machine
from serve_app.config.app_config import AppConfig
from serve_app.config.files import load_config
from speculative.errors import ConfigError
from tests.support.tiny_models import write_tiny_model


def args_of(source: str = "org/model", **placed: object) -> AppConfig:
    return application_of(ServeTarget(OwnModel(source, **placed))).application.args  # type: ignore[arg-type]


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
    assert args_of("meta-llama/Llama-3.1-8B@main").model.served_name == "Llama-3.1-8B"


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = args_of(gpus=0).pool("monolith")
    assert (pool.replicas, pool.num_gpus) == (1, 0)
    args = args_of(gpus=2)
    pool = args.pool("monolith")
    assert (pool.replicas, pool.num_gpus) == (2, 1), "our engine: a replica on each GPU"
    for gib, most in ((0, 64), (15.6, 32), (22, 64), (79.1, 128)):  # none is seen here: on a cluster
        monkeypatch.setattr(Machine, "here", lambda gib=gib: Machine(4, 2**36, (int(gib * 2**30),) if gib else ()))
        assert args_of(gpus=2).engine.max_num_seqs == most > args_of(gpus=0).engine.max_num_seqs
    args = args_of(gpus=2, engine="vllm")
    assert (args.pool("monolith").replicas, args.pool("monolith").num_gpus, args.ranks.tensor) == (1, 2, 2)


def test_drafters_go_by_their_kind_and_folder() -> None:
    assert args_of(drafter="suffix").drafter.kind == "suffix"
    assert args_of(drafter="none").drafter.kind == "none"
    assert args_of(drafter="suffix", engine="vllm").drafter.length == "static", "vLLM's own"
    assert args_of().drafter.length == args_of(engine="vllm").drafter.length == "dynamic", "none where it does not pay"
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
    assert "Give a model (a folder, or a hub id ORG/MODEL) or a file" in refused("serve")
    assert "demo is given, and --model x too; give one of them." in refused("serve", "demo", "--model", "x")
    for unset in ("", " "):
        assert "The model is empty; give a folder" in refused("config", "check", "--model", unset)
    assert "--gpus goes with a model; " in refused("config", "check", "demo", "--gpus", "1")
    assert f"Error: {CONFIGS}/own.yaml: applications[0].args.model.source: There is no" in refused(
        "config", "check", "own"
    )
    said = refused("config", "check", "--model", "nowhere/at/all")
    assert "nowhere/at/all: " in said and "fine" not in said


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
    for template, path in ((None, "v1/completions"), ("{{ messages[0].content }}", "v1/chat/completions")):
        file.write_text(json.dumps(config if template is None else config | {"chat_template": template}))
        found = check_machine(args_of(str(folder)), Machine.here())
        service = Service("http://localhost:1", "base", found.tokenizer)
        with service.client:
            line = curl_line(service)
        assert f"/{path} " in line and ('"messages"' in line) == ("chat" in path)
    assert check_machine(args_of(str(tmp_path / "on" / "another" / "node")), Machine.here()).tokenizer is None


WRONG = {
    "adapter": ("adapter_config.json", "adapter is a LoRA adapter: merge it"),
    "quants": ("m.gguf", "is a folder of GGUF files, which truespec does not serve"),
    "empty": (".", "is an empty folder; put a checkpoint into it"),
    "above": ("below/config.json", "holds no model. Did you mean above/below?"),
    "one/model.safetensors": ("", "is one file of a model; give its folder: one"),
    "one/w.gguf": ("", "is a GGUF file, which truespec does not serve"),
    "./modle": (None, "There is no file or folder ./modle here"),
    "mine.yml": (None, "There is no file mine.yml here. Did you mean mine.yaml?"),
    "x" * 300: (None, "cannot be read: File name too long; let this user read it, or give another path."),
    "a/b/c": (None, "'a/b/c' is no file or folder here, no hub id"),
    "https://huggingface.co/org/m/tree/main": (None, "is a page of the hub; give the model's id: org/m."),
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_neither_a_model_nor_a_file_is_called_what_it_is(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    file, says = WRONG[given]
    if file is not None:
        (tmp_path / given / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / given / file).mkdir() if file == "." else (tmp_path / given / file).touch()
    assert says in refused("serve", given)


@pytest.mark.parametrize("given", ["./mine", "org/mine", "mine.yaml", "demo"])
def test_flags_of_vllm_change_what_a_model_or_a_file_sets(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "mine")
    (tmp_path / "mine.yaml").write_text("applications: [{args: {model: {source: org/m@old}}}]")
    flags = "--host 0.0.0.0 --port 81 --max_model_len 2k -q bfloat16 --served-model-name=me"
    flags += " --set drafter.num_draft_tokens=2 --set proxy_location=Disabled --set access.cors_origins=['*']"
    flags += " --revision new" * (given not in ("./mine", "demo"))
    shown = CliRunner().invoke(main, ["config", "show", given, *flags.split()])
    (tmp_path / "shown.yaml").write_text(shown.output)
    read = load_config(tmp_path / "shown.yaml")
    args = read.application.args
    assert (read.http_options.host, read.http_options.port, args.model.name) == ("0.0.0.0", 81, "me")
    assert (read.proxy_location, args.drafter.num_draft_tokens, args.access.cors_origins) == ("Disabled", 2, ["*"])
    assert (args.engine.max_model_len, args.engine.quantization) == (2000, "bfloat16")
    source = {"./mine": str(tmp_path / "mine"), "org/mine": "org/mine@new", "mine.yaml": "org/m@new"}
    assert args.model.source == source.get(given, "smollm2-135m")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("demo --max-model-len 1", "--max-model-len (engine.max_model_len): must be at least 2, got 1."),
        ("org/m --set vllm.engine_args.x=4", "Error: org/m: vllm: is set, but engine.kind is torch"),
        ("demo --set access.cors_origins=[a]", "--set access.cors_origins (access.cors_origins[0]): must match"),
        ("demo --set applications[1].route_prefix=/x", "there is no section of settings that has route_prefix."),
        ("demo --set engine.dtype.x=3", "--set engine.dtype.x: there is no section of settings that has x."),
        ("demo -tp 2 --task=embed", "device. --task is a flag of vLLM's. Here it is none"),
        ("demo -dcp 2 --served-model-name x -O3", "underscores. -O3 is a flag of vLLM's. Here it is `--engine vllm`"),
        ("demo --revision v1", "smollm2-135m is no id of a hub, so it has no revisions"),
        ("demo --served-model-name a b", "give one model or file; --served-model-name takes one name."),
        ("demo --tensor-parallel-size=2", "Here it is `--engine vllm --gpus N`"),
        ("demo -tp 2", "-tp is a flag of vLLM's"),
        ("demo --gpu_memory_utilization 0.9", "`vllm.engine_args.gpu_memory_utilization`. Settings are given by --set"),
        ("demo --speculative-config.method ngram", "Here it is `--drafter`"),
        (
            "demo --set engine.dtype=half",
            "--set engine.dtype (engine.dtype): must be 'bfloat16' or 'float32', got 'half'.",
        ),
        ("demo --set engine.dtype", "--set engine.dtype has no value; give NAME=VALUE"),
        ("demo --prot 1", "Did you mean"),
    ],
)
def test_a_flag_that_is_not_taken_says_where_its_setting_is(line: str, says: str) -> None:
    assert says in refused("config", "show", *line.split())
    assert says in refused("serve", *line.split())


@pytest.mark.parametrize(
    ("stated", "line", "says"),
    [
        (None, "--gpus 1 --quantization fp8", "fine"),
        (None, "--gpus 0 -q fp8", "--quantization (engine.quantization): fp8 is not to be had here: FP8 products"),
        (None, "--gpus 1 -q w4a8", "; take quantization: auto or fp8"),
        (None, "--gpus 1 -q awq", "--quantization awq: truespec's engine has auto, float32, bfloat16, w4a8, fp8."),
        *(
            ({"quant_method": method, "bits": 4}, f"--gpus {gpus}", f"are quantized by {method} (`quantization_config`")
            for method, gpus in (("awq", 0), ("awq", 1), ("gptq", 1), ("bitsandbytes", 1))
        ),
        (".self_attn.q_proj.qweight", "--gpus 1", "q_proj.qweight is of weights quantized by GPTQ or AWQ; take"),
    ],
)
def test_forms_of_weights_are_taken_or_refused_before_anything_starts(
    stated: dict[str, object] | str | None, line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine that has them, where ours has not."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(8, 2**34, (2**34,)))
    folder = write_tiny_model(tmp_path / "m", tokenizer=True)
    if isinstance(stated, dict):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": stated}))
    elif stated:
        save_file({f"model.layers.0{stated}": torch.zeros(4, 4, dtype=torch.int32)}, folder / "model.safetensors")
    found = CliRunner().invoke(main, ["config", "check", str(folder), *line.split()])
    said = " ".join(found.output.split())
    assert says in said and (found.exit_code == 0) == (says == "fine")
    assert stated is None or "engine.kind: vllm" in said
