"""The settings of recovery, and what they put in front of the replicas that decode."""

from typing import Any

import pytest

from serve_app.app import build_app
from serve_app.config.app_config import AppConfig, RouterSection
from serve_app.config.files import parse_args
from speculative.errors import ConfigError


def config(**args: Any) -> AppConfig:
    return parse_args({"model": {"source": "smollm2-135m"}, **args})


def deployments(**args: Any) -> dict[str, str]:
    """Name and class of the ingress and of what it is bound to."""
    ingress = build_app({"model": {"source": "smollm2-135m"}, **args})._bound_deployment
    bound = [one._bound_deployment for one in ingress.init_args if hasattr(one, "_bound_deployment")]
    return {one.name: one.func_or_class.__name__ for one in (ingress, *bound)}


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
    assert found[name].endswith("DecodeWorker")
    assert "Controller" in found


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"recovery": {"prefill_timeout_s": 0.0}}, "recovery.prefill_timeout_s"),
        ({"recovery": {"prefill_retries": -1}}, "recovery.prefill_retries"),
        ({"recovery": {"max_resumes": 1000}}, "recovery.max_resumes"),
        ({"recovery": {"resumes": True}}, "did you mean resume?"),
        ({"pools": {"router": {"replicas": 0}}}, "pools.router.replicas"),
        ({"pools": {"router": {"num_gpus": 1.0}}}, "pools.router.num_gpus"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(section: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.").replace("?", r"\?")):
        config(**section)
