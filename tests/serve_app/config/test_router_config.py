"""Which deployments get a router of ours: not the ingress where HAProxy is in front, as Serve refuses that."""

from typing import Any

import pytest

from serve_app.app import build_app


def routed(**args: Any) -> set[str]:
    """Names of the deployments with a router of ours."""
    waiting, found = [build_app({"model": {"source": "smollm2-135m"}, **args})._bound_deployment], set()
    while waiting:
        deployment = waiting.pop()
        if "serve_app" in str(deployment._deployment_config.request_router_config.request_router_class):
            found.add(deployment.name)
        waiting += [part._bound_deployment for part in deployment.init_args if hasattr(part, "_bound_deployment")]
    return found


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
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", haproxy)
    assert routed(**args) == names
