"""Numbers of replicas, in the pools or as overrides of deployments, which Ray Serve changes without a restart; and
which deployments get a router of ours."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig

from serve_app.app import build_app
from serve_app.config import app_config, scaling, serve_file
from serve_app.config.app_config import RouterSection
from serve_app.config.files import load_config, parse_args
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError

AUTO = {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 3.0}  # in Ray Serve's words
BY_REQUESTS = {**AUTO, "policy": "requests"}
LOAD_POLICY = "serve_app.cluster.autoscaling:LoadPolicy"
BY_LOAD = {"max_replicas": 4, "target_kv_usage": 0.5, "downscale_delay_s": 30.0}


TARGETS = "applications[0].deployments[0].autoscaling_config.policy.policy_kwargs"


def by_load(name: str = "DecodeServer", **targets: float) -> dict[str, Any]:
    """An override in Ray Serve's words."""
    policy = {"policy_function": LOAD_POLICY, "policy_kwargs": {"targets": targets}}
    return {"name": name, "autoscaling_config": {"max_replicas": 4, "policy": policy}}


def written(tmp_path: Path, *deployments: dict[str, Any], **args: Any) -> Path:
    application = {"args": {"model": {"source": "x"}, **args}, "deployments": list(deployments)}
    file = tmp_path / "app.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    return file


def deployments(**args: Any) -> dict[str, Any]:
    """The ingress, what it is bound to, and so on, by name."""
    waiting, found = [build_app({"model": {"source": "smollm2-135m"}, **args})._bound_deployment], {}
    while waiting:
        deployment = waiting.pop()
        found[deployment.name] = deployment
        waiting += [part._bound_deployment for part in deployment.init_args if hasattr(part, "_bound_deployment")]
    return found


def test_autoscaling_and_labels_reach_ray_serve() -> None:
    pools = {"decode": {"autoscaling": BY_REQUESTS, "label_selector": {"pool": "decode"}}, "prefill": {"replicas": 3}}
    found = deployments(pools=pools)
    decode, prefill = found["DecodeServer"], found["PrefillServer"]
    scale = decode._deployment_config.autoscaling_config
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (2, 5, 3.0)
    assert decode.ray_actor_options["label_selector"] == {"pool": "decode"}
    assert (prefill._deployment_config.autoscaling_config, prefill.num_replicas) == (None, 3)


def test_our_policy_and_its_targets_reach_ray_serve() -> None:
    pools = {"decode": {"autoscaling": BY_LOAD}, "prefill": {"autoscaling": {"max_replicas": 3}}}
    found = deployments(pools=pools)
    decode, prefill = (found[name]._deployment_config.autoscaling_config for name in ("DecodeServer", "PrefillServer"))
    assert decode.policy.policy_function == prefill.policy.policy_function == LOAD_POLICY
    assert decode.policy.get_policy().__name__ == "LoadPolicy"
    assert decode.policy.policy_kwargs["targets"] == {"kv_usage": 0.5, "running_share": 0.8}
    assert prefill.policy.policy_kwargs["targets"] == {"backlog_s": 2.0}
    assert (decode.min_replicas, decode.max_replicas, decode.downscale_delay_s) == (1, 4, 30)


def test_an_override_may_name_our_policy(tmp_path: Path) -> None:
    override = by_load("PrefillServer", backlog_s=3)
    scale = load_config(written(tmp_path, override)).application.effective_args.pool("prefill").autoscaling
    assert scale is not None and (scale.policy, scale.target_backlog_s, scale.max_replicas) == ("load", 3.0, 4)
    AutoscalingConfig(**override["autoscaling_config"])


def test_overrides_replace_the_pools_numbers_and_nothing_else(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"name": "PrefillServer", "num_replicas": 3},
        {"name": "DecodeServer", "autoscaling_config": AUTO},
        pools={"decode": {"replicas": 2, "num_cpus": 4}},
    )
    config = load_config(file).application.effective_args
    assert (config.pool("prefill").replicas, config.pool("prefill").num_cpus) == (3, 1)
    assert config.pool("decode").autoscaling is not None
    assert (config.pool("decode").most_replicas, config.pool("decode").num_cpus) == (5, 4)
    assert load_config(file).application.args.pool("decode").replicas == 2


@pytest.mark.parametrize(
    ("deployments", "message"),
    [
        ([{"name": "MonolithServer", "num_replicas": 1}], "deployments[0].name: is MonolithServer, but topology"),
        ([{"name": "DecodeServer"}], "deployments[0].num_replicas: or autoscaling_config must be set, and not both"),
        ([{"name": "DecodeServer", "num_replicas": 1, "autoscaling_config": AUTO}], "must be set, and not both"),
        ([{"name": "DecodeServer", "num_replicas": 1}] * 2, "deployments[0].name: is DecodeServer twice; merge them"),
        ([by_load(latency=1)], f"{TARGETS}: must be targets: above 0, of backlog_s, kv_usage, running_s"),
        ([by_load(kv_usage=float("nan"))], f"{TARGETS}: must be targets: above 0"),
        ([by_load(kv_usage=5)], f"{TARGETS}.targets.kv_usage: must be at most 1, got 5.0."),
    ],
)
def test_wrong_overrides_are_reported_with_the_fix(
    tmp_path: Path, deployments: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path, *deployments))
    assert message in str(refused.value)


def test_without_recovery_settings_there_is_no_router() -> None:
    assert parse_args({"model": {"source": "x"}}).router is None
    assert next(iter(deployments())) == "DecodeServer"
    assert next(iter(deployments(topology="monolith"))) == "MonolithServer"


@pytest.mark.parametrize(
    ("args", "topology", "name"),
    [
        ({"recovery": {"resume": True}}, "disaggregated", "DecodeServer"),
        ({"pools": {"router": {"replicas": 2}}}, "monolith", "MonolithServer"),
    ],
    ids=str,
)
def test_either_setting_puts_a_router_before_the_pool_that_decodes(
    args: dict[str, Any], topology: str, name: str
) -> None:
    router = parse_args({"model": {"source": "x"}, "topology": topology, **args}).router
    assert router == (RouterSection(replicas=2) if "pools" in args else RouterSection())
    found = deployments(topology=topology, **args)
    assert next(iter(found)) == "StreamRouter"
    assert found[name].func_or_class.__name__.endswith("DecodeWorker")
    assert "Controller" in found


@pytest.mark.parametrize(
    ("haproxy", "args", "names"),
    [
        ("0", {}, {"PrefillServer", "DecodeServer"}),
        ("1", {}, {"PrefillServer"}),
        ("1", {"pools": {"router": {}}}, {"PrefillServer", "DecodeServer"}),
        ("0", {"topology": "monolith"}, {"MonolithServer"}),
        ("1", {"topology": "monolith"}, set()),
        ("0", {"routing": {"prefill": "serve", "decode": "serve"}}, set()),
    ],
)
def test_an_ingress_behind_haproxy_has_no_router_of_ours(
    monkeypatch: pytest.MonkeyPatch, haproxy: str, args: dict[str, Any], names: set[str]
) -> None:
    """Serve refuses that."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", haproxy)
    routers = {
        name: str(one._deployment_config.request_router_config.request_router_class)
        for name, one in deployments(**args).items()
    }
    assert {name for name, router in routers.items() if "serve_app" in router} == names


def test_every_field_says_what_it_is() -> None:
    sections = [
        value
        for module in (app_config, scaling, serve_file)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.__name__
    ]
    assert ServeFile in sections
    bare = [f"{s.__name__}.{name}" for s in sections for name, field in s.model_fields.items() if not field.description]
    assert not bare, "write a docstring below each field: the reference and the chart are made from them"
