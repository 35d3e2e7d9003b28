"""Keys on a running service: made, revoked and spoilt without a restart; and a cluster with a token."""

import subprocess
import sysconfig
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.http.access.access import Scope
from serve_app.http.access.keys import create_key, revoke_key
from tests.support.ray_head import ray_head
from tests.support.services import app_args, deployed, metric_total
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]


def test_keys_open_a_service_and_change_without_a_restart(ray_port: int, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    alice = create_key(path, "alice", [Scope.USER])
    operator = create_key(path, "operator", [Scope.USER, Scope.ADMIN])
    args = app_args(tiny_folder, "monolith", access={"keys_file": str(path), "open_metrics": False})
    with deployed(ray_port, "keyed", args) as service:

        def code(key: str) -> int:
            return httpx.get(f"{service.base_url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert (code("nobody"), code(alice), code(operator)) == (401, 200, 200)
        headers = {"authorization": f"Bearer {operator}"}
        reported = httpx.get(f"{service.base_url}/metrics", headers=headers).text
        assert alice not in reported and operator not in reported

        carol = create_key(path, "carol", [Scope.USER])
        wait_for(lambda: code(carol) == 200, "the new key is known")
        revoke_key(path, "alice")
        wait_for(lambda: code(alice) == 401, "the revoked key is refused")
        path.write_text("keys: [")
        wait_for(
            lambda: metric_total(httpx.get(f"{service.base_url}/metrics", headers=headers).text, "keys_stale") == 1,
            "the broken file is read",
        )
        assert code(carol) == 200, "a file that is wrong changes nothing"


def test_a_cluster_refuses_a_service_with_another_token(tiny_folder: Path, tmp_path: Path) -> None:
    """With its own token it serves: see test_two_nodes_on_ray.py."""
    file = tmp_path / "app.yaml"
    args = app_args(tiny_folder, "monolith")
    application = {"name": "own", "route_prefix": "/", "import_path": "serve_app.app:build_app", "args": args}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    with ray_head(num_cpus=4) as head:
        command = [f"{sysconfig.get_path('scripts')}/truespec", "serve", str(file), "--address", head.address]
        wrong = head.environment | {"RAY_AUTH_TOKEN": "another-token-0123456789"}
        refused = subprocess.run(command, env=wrong, capture_output=True, text=True, timeout=300, check=False)
        assert refused.returncode != 0
        assert "token" in (refused.stdout + refused.stderr).lower()
