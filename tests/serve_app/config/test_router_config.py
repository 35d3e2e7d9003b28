"""What stands in front of the replicas that decode, and which deployments get a router of ours."""

from typing import Any

import pytest

from serve_app.app import build_app
from serve_app.config.app_config import AppConfig, RouterSection
from serve_app.config.files import parse_args
from speculative.errors import ConfigError


def config(**args: Any) -> AppConfig:
    return parse_args({"model": {"source": "smollm2-135m"}, **args})


def deployments(**args: Any) -> dict[str, Any]:
    """The ingress, what it is bound to, and so on, by name."""
    waiting, found = [build_app({"model": {"source": "smollm2-135m"}, **args})._bound_deployment], {}
    while waiting:
        deployment = waiting.pop()
        found[deployment.name] = deployment
        waiting += [part._bound_deployment for part in deployment.init_args if hasattr(part, "_bound_deployment")]
    return found


def test_without_recovery_settings_there_is_no_router() -> None:
    assert config().router is None
    assert next(iter(deployments())) == "DecodeServer"
    assert next(iter(deployments(topology="monolith"))) == "MonolithServer"


@pytest.mark.parametrize("args", [{"recovery": {"resume": True}}, {"pools": {"router": {"replicas": 2}}}], ids=str)
@pytest.mark.parametrize(("topology", "name"), [("disaggregated", "DecodeServer"), ("monolith", "MonolithServer")])
def test_either_setting_puts_a_router_before_the_pool_that_decodes(
    args: dict[str, Any], topology: str, name: str
) -> None:
    router = config(topology=topology, **args).router
    assert router == (RouterSection(replicas=2) if "pools" in args else RouterSection())
    found = deployments(topology=topology, **args)
    assert next(iter(found)) == "StreamRouter"
    assert found[name].func_or_class.__name__.endswith("DecodeWorker")
    assert "Controller" in found


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"recovery": {"prefill_timeout_s": 0.0}}, "recovery.prefill_timeout_s"),
        ({"recovery": {"max_resumes": 1000}}, "recovery.max_resumes"),
        ({"recovery": {"resumes": True}}, "did you mean resume?"),
        ({"pools": {"router": {"num_gpus": 1.0}}}, "pools.router.num_gpus"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(section: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**section)
    assert field in str(refused.value)


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
