"""`truespec config show` and `config values`."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from deploy.cli.console import CONFIGS
from deploy.cli.main import main
from deploy.run.written_out import effective_config
from serve_app.backends.vllm_parts.settings import SIZES
from serve_app.config.app_config import AppConfig
from serve_app.config.files import load_config
from tools.chart import ROOT
from tools.reference import configuration_reference


@pytest.mark.parametrize("file", [*CONFIGS.glob("*.yaml"), ROOT / "deploy" / "docker" / "truespec.yaml"], ids=str)
def test_what_is_shown_is_a_configuration_of_the_same_meaning(file: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["config", "show", str(file)])
    assert shown.exit_code == 0, shown.output
    again = tmp_path / "shown.yaml"
    again.write_text(shown.output)
    ours, theirs = load_config(file).application, load_config(again).application
    assert effective_config(load_config(again)) == shown.output
    assert theirs.args.model.served_name == ours.args.model.served_name
    assert theirs.args.engine_config(theirs.args.pool_names[0]) == ours.args.engine_config(ours.args.pool_names[0])
    named = yaml.safe_load(shown.output)["applications"][0]["args"]
    written = {line.strip("# -").partition(":")[0] for line in shown.output.splitlines()}
    rows = set(re.findall(r"^\| `(\w+)` \|", configuration_reference(), re.M))
    for section in (AppConfig, *(AppConfig.model_fields[name].annotation for name in ("engine", "drafter", "limits"))):
        assert section.model_fields.keys() <= rows & written, "each setting in the page, and set or commented out"
    left_open = {"max_model_len", "cuda_graphs"}
    if file.stem == "own":  # as large as the machine allows
        left_open.add("kv_cache_tokens")
    if ours.args.engine.kind == "vllm":
        left_open |= SIZES
        pool = ours.args.pool_names[0]
        assert theirs.args.vllm_settings(pool) == ours.args.vllm_settings(pool)
    assert same_service(file, again)
    assert named["engine"].keys() | left_open == AppConfig.model_fields["engine"].annotation.model_fields.keys()


def same_service(one: Path, other: Path) -> bool:
    """Whether both run the same pools and the same router, and all else that has no name of its own."""
    ours, theirs = (load_config(file).application.effective_args for file in (one, other))
    pools = [[args.pool(name) for name in args.pool_names] for args in (ours, theirs)]
    rest = [args.model_dump(exclude={"model", "pools"}) for args in (ours, theirs)]
    return pools[0] == pools[1] and ours.router == theirs.router and rest[0] == rest[1]


@pytest.mark.parametrize("router", [{"replicas": 3, "num_cpus": 0.5, "label_selector": {"zone": "a"}}, {}, None])
@pytest.mark.parametrize("resume", [True, False])
def test_the_router_is_shown(router: dict[str, object] | None, resume: bool, tmp_path: Path) -> None:
    args = {"model": {"source": "x"}, "recovery": {"resume": resume}, "pools": {"decode": {"replicas": 2}}}
    if router is not None:
        args["pools"] |= {"router": router}
    file, again = tmp_path / "app.yaml", tmp_path / "shown.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": args}]}))
    again.write_text(effective_config(load_config(file)))
    assert same_service(file, again)


def test_overrides_are_folded_into_the_pools(tmp_path: Path) -> None:
    data = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
    data["applications"][0]["deployments"] = [{"name": "DecodeServer", "autoscaling_config": {"max_replicas": 3}}]
    file = tmp_path / "app.yaml"
    file.write_text(yaml.safe_dump(data))
    (application,) = yaml.safe_load(effective_config(load_config(file)))["applications"]
    assert "deployments" not in application
    assert application["args"]["pools"]["decode"]["autoscaling"]["max_replicas"] == 3
    assert "replicas" not in application["args"]["pools"]["decode"]


@pytest.mark.parametrize("name", ["monolith", "resilient", "vllm"])
def test_values_of_the_chart_have_all_settings_of_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    text = (CONFIGS / f"{name}.yaml").read_text().replace("port: 8000", "port: 8001")
    file.write_text(text.replace("num_cpus: 1", "num_cpus: 1\n          num_gpus: 1") if name == "vllm" else text)
    values = yaml.safe_load(CliRunner().invoke(main, ["config", "values", str(file)]).output)
    ours = load_config(file).application.args
    assert (values["modelCache"], values["service"]) == ({"fetch": ["smollm2-135m"]}, {"port": 8001})
    engine = values["config"]["engine"] | ({"kind": "vllm"} if "vllm" in values else {})
    theirs = AppConfig.model_validate(values["config"] | {"engine": engine})
    assert theirs.model_dump(exclude={"pools"}) == ours.model_dump(exclude={"pools"})
    replicas = {name: pool["replicas"] for name, pool in values["pools"].items()}
    assert replicas == {name: ours.pool(name).replicas for name in ours.pool_names}


RANKS = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"engine": {"kind": "vllm"}, "vllm": {"engine_args": RANKS}, "pools": {"monolith": {"num_gpus": 2}}},
            "vllm.engine_args.distributed_executor_backend cannot become a value of the chart.*numOfHosts",
        ),
        (
            {"engine": {"kind": "vllm"}, "pools": {"monolith": {"num_gpus": 0}}},
            "pools.monolith.num_gpus is 0, and vLLM on CPUs has no form in the chart.*set num_gpus to 1",
        ),
        ({"model": {"source": "./mine"}}, "model.source is ./mine, a folder of this machine.*give a hub id"),
        ({"drafter": {"kind": "eagle3", "model": "~/head"}}, "drafter.model is ~/head, a folder of this machine"),
        ({"pools": {"router": {"replicas": 2}}, "recovery": {"resume": True}}, "pools.router cannot become a value"),
        ({"pools": {"monolith": {"label_selector": {"zone": "a"}}}}, "pools.monolith.label_selector cannot become a v"),
        ({"pools": {"monolith": {"autoscaling": {"max_replicas": 2}}}}, "pools.monolith.autoscaling cannot become a v"),
        ({"pools": {"router": {}}}, "pools.router cannot become a value.*recovery.resume"),
        ({"pools": {"router": {}}, "recovery": {"resume": True}}, None),
    ],
)
def test_what_the_chart_would_not_serve_is_not_printed_as_values(
    changed: dict[str, object], says: str | None, tmp_path: Path
) -> None:
    file, args = tmp_path / "app.yaml", {"model": {"source": "x"}, "topology": "monolith"} | changed
    file.write_text(yaml.safe_dump({"applications": [{"args": args}]}))
    printed = CliRunner().invoke(main, ["config", "values", str(file)])
    assert printed.exit_code == (says is not None)
    if says is not None:
        assert re.search(says, " ".join(printed.output.split()))
