"""What cannot be served is refused before anything starts, with its field and the fix."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from deploy.cli.console import CONFIGS
from deploy.cli.main import main
from deploy.run import preflight
from deploy.run.machine import Machine
from deploy.run.preflight import check_cluster, check_machine
from serve_app.config.app_config import AppConfig
from serve_app.config.files import parse_args
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.tokenizer_layouts import layouts, write_layout

GIB = 2**30
MACHINE = Machine(num_cpus=2, memory_bytes=8 * GIB)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Folders by what they hold."""
    root = tmp_path_factory.mktemp("models")
    model = write_tiny_model(root / "model", tokenizer=True, num_hidden_layers=4)
    return {
        "model": str(model),
        "short": str(write_tiny_model(root / "short", max_position_embeddings=64)),
        "other": str(write_tiny_model(root / "other", vocab_size=96)),
        "eagle3": str(write_tiny_head(root / "head", model)),
    }


def config(models: Mapping[str, str], **changes: Any) -> AppConfig:
    args = {"model": {"source": models["model"], "name": "tiny"}, "topology": "monolith"}
    engine = {"kv_cache_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 64}
    return parse_args(args | {"engine": engine} | {"engine": engine | changes.pop("engine", {})} | changes)


def faults(checked: AppConfig, machine: Machine = MACHINE) -> list[str]:
    return check_machine(checked, machine).faults


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_what_can_be_served_has_no_fault(models: Mapping[str, str], tmp_path: Path) -> None:
    keys, token = tmp_path / "keys.yaml", tmp_path / "token"
    keys.write_text("keys: []")
    token.write_text("secret")
    used = {"access": {"keys_file": str(keys)}, "admin": {"token_file": str(token)}}
    assert faults(config(models, drafter={"kind": "eagle3", "model": models["eagle3"]}, **used)) == []
    assert faults(config(models, drafter={"kind": "draft_model", "model": models["model"]})) == []
    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}  # they share two cores
    assert faults(config(models, topology="disaggregated", pools=pools)) == []


def test_a_template_of_another_model_is_refused_on_either_engine(
    models: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(models["model"], tmp_path / "model"))
    write_layout(folder, layouts()["llama 2"], {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ 1 }}"})
    monkeypatch.setattr(preflight, "_is_installed", lambda package: True)
    for kind in ("torch", "vllm"):
        given = {"engine": {"kind": kind}, "drafter": {"kind": "ngram"}}
        own = {"source": str(folder), "name": "m"}
        assert faults(config(models, model=own, **given)) == []
        found = only(faults(config(models, model=own | {"chat_template": "smollm2-tools"}, **given)))
        assert re.search(r"model\.chat_template: smollm2-tools writes <\|im_start\|>.* remove the setting to", found)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"model": {"source": "./missing"}}, r"model\.source: There is no folder \./missing here"),
        ({"drafter": {"kind": "eagle3", "model": "missing"}}, r"drafter\.model: No model 'missing'"),
        ({"pools": {"monolith": {"num_gpus": 1}}}, r"num_gpus: .* 1 GPUs .*1 x 1\); .* 0 that torch .* set it to 0"),
        ({"pools": {"monolith": {"num_cpus": 64}}}, r"num_cpus: one replica asks for 64 CPUs, .* 2: .* to 2 at most"),
        ({"access": {"keys_file": "/missing/keys"}}, r"access\.keys_file: /missing/keys: cannot be read"),
        ({"receipts": {"key_file": "/missing/key"}}, r"receipts\.key_file: /missing/key holds no private key"),
        ({"replay": {"tolerance": "/missing/t"}}, r"replay\.tolerance: /missing/t holds no tolerance .*; `truespec"),
        ({"admin": {"token_file": "/missing/token"}}, r"admin\.token_file: /missing/token cannot be read"),
        ({"engine": {"kind": "vllm"}}, r"engine\.kind: needs vllm, .* not installed: pip install -e '\.\[vllm\]'"),
        ({"model": {"source": "{model}", "chat_template": "/missing.jinja"}}, r"chat_template: .*/missing.jinja"),
        ({"engine": {"max_model_len": 900, "kv_cache_tokens": 1024}}, r"max_model_len: is 900, .* 512 positions"),
        (
            {"drafter": {"kind": "draft_model", "model": "{eagle3}"}},
            r"drafter\.model: .*`architectures` is \['Ll.*Eagle3'",
        ),
        (
            {"drafter": {"kind": "eagle3", "model": "{model}"}},
            r"drafter\.model: .*`architectures` is 'LlamaForCausalLM'",
        ),
        (
            {"drafter": {"kind": "draft_model", "model": "{other}"}},
            r"drafter\.model: .* vocabulary \(96 ids\) than the model \(\d+\), .*; take a draft model of the same",
        ),
        (
            {"drafter": {"kind": "draft_model", "model": "{short}"}},
            r"drafter\.model: .* has 64 positions, and requests may have 512; set max_model_len to 64",
        ),
        ({"handoff": {"transport": "nixl"}}, r"handoff\.transport: needs nixl, which is not installed: pip install"),
    ],
)
def test_what_is_not_here_is_reported_with_its_field_and_the_fix(
    changes: dict[str, Any], reported: str, models: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_is_installed", lambda package: False)
    named = yaml.safe_load(re.sub(r"\{(\w+)\}", lambda found: models[found[1]], yaml.safe_dump(changes)))
    assert re.search(r"^applications\[0\]\.args\..*" + reported, only(faults(config(models, **named))))


def test_a_cache_that_no_memory_holds_is_refused_with_what_would_fit(models: Mapping[str, str]) -> None:
    wanted = {"kv_cache_tokens": 2**24, "dtype": "float32", "quantization": "float32"}
    found = only(faults(config(models, engine=wanted)))
    of_cache = 4 * 2 * 2 * 16 * 4 * 2**24 / GIB  # layers x keys and values x heads x width x bytes x tokens
    assert f"args.engine.kv_cache_tokens: 16777216 tokens take {of_cache:.1f} GiB" in found
    assert "of 1 replicas, and this machine has 8.0 GiB; set it well below 83" in found
    assert faults(config(models, engine=wanted), Machine(2, 20 * GIB)) == []
    pools = {"monolith": {"autoscaling": {"min_replicas": 2, "max_replicas": 9}}}
    assert "each of 2 replicas" in only(faults(config(models, engine=wanted, pools=pools), Machine(2, 20 * GIB)))
    pools = {"monolith": {"num_gpus": 1}}
    on_a_gpu = config(models, engine=wanted, pools=pools)
    assert faults(on_a_gpu, Machine(2, GIB, (20 * GIB,))) == []
    assert "and one GPU has 8.0 GiB" in only(faults(on_a_gpu, Machine(2, 99 * GIB, (8 * GIB,))))


def test_each_pool_is_measured_by_what_it_computes_on(models: Mapping[str, str]) -> None:
    """A pool on GPUs does not lend the other one their memory."""
    wanted = {"kv_cache_tokens": 2**24, "dtype": "float32", "quantization": "float32"}
    pools = {"prefill": {"num_gpus": 1}, "decode": {}}
    mixed = config(models, engine=wanted, pools=pools, topology="disaggregated")
    assert "this machine has 8.0 GiB" in only(faults(mixed, Machine(2, 8 * GIB, (20 * GIB,))))
    assert "one GPU has 8.0 GiB" in only(faults(mixed, Machine(2, 20 * GIB, (8 * GIB,))))
    assert faults(mixed, Machine(2, 20 * GIB, (20 * GIB,))) == []
    fp8 = config(models, engine={"quantization": "fp8"}, pools=pools, topology="disaggregated")
    assert "FP8 products need a GPU" in only(faults(fp8, Machine(2, GIB, (GIB,))))


def test_a_copy_of_the_embedding_is_no_further_weight(models: Mapping[str, str], tmp_path: Path) -> None:
    tied = write_tiny_model(tmp_path / "tied", "smollm", tokenizer=True)
    weights = load_file(tied / "model.safetensors")
    num_weights = sum(tensor.numel() for tensor in weights.values())
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tied / "model.safetensors")
    checked = config(models, model={"source": str(tied), "name": "x"}, engine={"dtype": "float32"})
    assert "model.source: the weights take" in only(faults(checked, Machine(2, 4 * num_weights - 1)))
    assert "engine.kv_cache_tokens" in only(faults(checked, Machine(2, 4 * num_weights)))
    found = only(faults(config(models, engine={"dtype": "float32"}), Machine(2, 2**16)))
    assert "args.model.source: the weights take 0.0 GiB in float32 on each of 1 replicas" in found


def test_gpus_that_no_pool_asks_for_are_hinted_at(models: Mapping[str, str]) -> None:
    def hints(num_gpus: int, device: str = "auto", **pools: Any) -> list[str]:
        checked = config(models, engine={"device": device}, topology="disaggregated", pools=pools)
        return check_machine(checked, Machine(2, 8 * GIB, (GIB,) * num_gpus)).hints

    assert hints(0) == hints(2, "cpu") == hints(2, prefill={"num_gpus": 1}, decode={"num_gpus": 0.5}) == []
    assert len(hints(2)) == 2
    hint = only(hints(2, prefill={"num_gpus": 1}))
    assert re.search(r"args.pools.decode.num_gpus is 0.* this machine has 2 GPUs: set it to 1, or engine.device", hint)
    both = "has 1 GPUs: set num_gpus of each pool to 0.5, or topology to monolith, or engine.device to cpu"
    assert [both in hint for hint in hints(1)] == [True, True], "set to 1 each, they would be refused"


@pytest.mark.parametrize(
    ("pools", "num_gpus", "reported"),
    [
        ((1, 0.5, 1, 0.5), 1, None),
        ((1, 0.7, 3, 0.1), 1, None),
        ((1, 1 / 3, 2, 1 / 3), 1, None),  # Ray rounds them
        ((1, 1, 1, 1), 1, r"ask for 2 GPUs together \(prefill 1 x 1, decode 1 x 1\); this machine has 1 .*: set "
                          r"num_gpus of each pool to 0\.5, or topology to monolith"),
        ((1, 0.5, 1, 0.6), 1, r"decode\.num_gpus: .* 1\.1 GPUs together \(prefill 1 x 0\.5, decode 1 x 0\.6\)"),
        ((2, 0.6, 1, 0.6), 2, r"prefill\.num_gpus: .* 1\.8 .*, and as each part lies on one of them, they need 3; "),
        ((1, 1, 2, 1), 1, r"set num_gpus of each pool to 0\.33"),
    ],
)  # fmt: skip
def test_parts_of_gpus_are_added_up(
    pools: tuple[int, float, int, float], num_gpus: int, reported: str | None, models: Mapping[str, str]
) -> None:
    prefill, decode = ({"replicas": pools[at], "num_gpus": pools[at + 1]} for at in (0, 2))
    asked = config(models, topology="disaggregated", pools={"prefill": prefill, "decode": decode})
    found = faults(asked, Machine(2, GIB, (GIB,) * num_gpus))
    assert found == [] if reported is None else re.search(reported, only(found)), found


def test_weights_must_fit_into_the_part_of_a_gpu_that_each_replica_would_have(models: Mapping[str, str]) -> None:
    """The parts are set, or the same check asks for them: nothing else is refused once they are set."""
    for part, replicas, num_gpus, missing in (
        (0.5, 1, 1, ()),
        (1, 1, 1, ("pools.prefill.num_gpus",)),
        (1, 2, 2, ("pools.decode.num_gpus",)),
    ):
        pools = {"prefill": {"num_gpus": part}, "decode": {"num_gpus": part, "replicas": replicas}}
        asked = config(models, topology="disaggregated", pools=pools, engine={"kv_cache_tokens": 1024})
        found = faults(asked, Machine(2, GIB, (600_000,) * num_gpus))  # more than the weights, and half of it is less
        assert [re.search(r"args\.([\w.]+)", one)[1] for one in found] == [*missing, "model.source"], found
        assert "on each of 1 replicas, and 0.5 of one GPU has 0.0 GiB; take a smaller model" in found[-1]


def test_fp8_weights_take_a_byte_each_and_a_gpu(models: Mapping[str, str], tmp_path: Path) -> None:
    engine = {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_tokens": 1024}
    pools, room = {"monolith": {"num_gpus": 1}}, 300_000  # between one and two bytes for each of the model's numbers
    plain = config(models, engine=engine | {"quantization": "auto", "kv_cache_tokens": 16}, pools=pools)
    assert "the weights take" in only(faults(plain, Machine(2, GIB, (room,))))
    small = config(models, engine=engine | {"kv_cache_tokens": 16}, pools=pools)
    assert faults(small, Machine(2, GIB, (room,))) == []
    assert "GiB in fp8 on each" in only(faults(small, Machine(2, GIB, (2**16,))))
    odd = write_tiny_model(tmp_path / "odd", tokenizer=True, intermediate_size=72)
    served = config(models, model={"source": str(odd), "name": "x"}, engine=engine, pools=pools)
    assert "engine.quantization: fp8 needs sizes that are multiples of 16" in only(
        faults(served, Machine(2, GIB, (GIB,)))
    )


def test_a_model_that_lacks_its_tokenizer_or_its_weights_is_refused(models: Mapping[str, str], tmp_path: Path) -> None:
    faults_of = {"tokenizer.json": "holds no tokenizer.json", "model.safetensors": "has neither model.safe"}
    for missing, reported in faults_of.items():
        broken = shutil.copytree(models["model"], tmp_path / missing)
        (broken / missing).unlink()
        found = only(faults(config(models, model={"source": str(broken), "name": "x"})))
        assert f"args.model.source: {broken} {reported}" in found


@pytest.mark.parametrize(
    ("pool", "reported"),
    [
        ({"num_cpus": 2, "replicas": 4}, None),
        (
            {"num_cpus": 2, "replicas": 5},
            "num_cpus: the pools ask for 10 CPUs together (monolith 5 x 2), and the cluster has 8",
        ),
        ({"num_cpus": 2, "autoscaling": {"max_replicas": 9}}, None),
        ({"num_gpus": 1}, "num_gpus: the pools ask for 1 GPUs together (monolith 1 x 1), and the cluster has 0"),
    ],
)
def test_what_a_cluster_lacks_is_refused(
    pool: dict[str, Any], reported: str | None, models: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    checked = config(models, pools={"monolith": pool}, model={"source": "/on/the/cluster", "name": "x"})
    found = check_cluster(checked).faults
    assert found == [] if reported is None else f"pools.monolith.{reported}" in only(found), found


def test_config_check_looks_at_this_machine_unless_told_not_to_and_serve_before_ray_starts(
    models: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = yaml.safe_load((CONFIGS / "monolith.yaml").read_text())
    args = data["applications"][0]["args"]
    args["model"] = {"source": models["model"], "name": "tiny"}
    args["engine"] |= {"max_model_len": 128, "kv_cache_tokens": 1024}
    args["pools"]["monolith"] = {"num_cpus": 1}
    file = tmp_path / "app.yaml"

    def check(*options: str) -> tuple[int, str]:
        file.write_text(yaml.safe_dump(data))
        run = CliRunner().invoke(main, ["config", "check", str(file), *options])
        assert run.exception is None or isinstance(run.exception, SystemExit), run.output
        return run.exit_code, run.output.replace(f"checking {file}\n", "")

    fine = f"{file}: fine. This machine can serve it.\n"
    assert check() == (0, fine)
    with monkeypatch.context() as machine:
        machine.setattr(Machine, "here", lambda: Machine(2, 8 * GIB, (GIB,)))
        code, output = check()
        assert code == 0 and "hint: applications[0].args.pools.monolith.num_gpus is 0" in output
    args["model"]["chat_template"] = "smollm2-tools"  # ChatML, with a system prompt of another model
    code, output = check()
    assert code == 0 and output.endswith(fine)
    assert output.startswith("hint: model.chat_template: smollm2-tools replaces the template of the model's")
    own = shutil.copytree(models["model"], tmp_path / "own")
    args["model"] = {"source": str(own), "name": "tiny"}
    settings = json.loads((own / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    code, output = check()
    assert code == 0 and output.startswith("hint: ") and "has no chat template: requests to /v1/chat" in output
    (own / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes()[:-9])
    code, output = check()
    assert code == 1 and "it was cut off; download it again" in output and "fine" not in output
    for name in ("generation_config.json", "model.safetensors"):
        (own / name).unlink()
        (own / name).symlink_to("/gone")
        assert f"{own / name} is a link to /gone, which is not there; fetch the model again." in check()[1]
    args["model"]["source"] = str(tmp_path / "missing")
    code, output = check()
    assert code == 1 and f"Error: {file}: applications[0].args.model.source: There is no folder" in output
    assert check("--file-only") == (0, f"{file}: fine\n")
    assert check("--file-only", "--address", "auto")[0] == 2
    args["model"]["source"] = models["model"]
    args["pools"]["monolith"] = {"num_gpus": 99}
    check()
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr("deploy.run.cluster.free_port", lambda http, port: port)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = CliRunner().invoke(main, ["serve", str(file)])
    assert run.exit_code == 1 and "args.pools.monolith.num_gpus: the pools ask for 99 GPUs" in run.output
