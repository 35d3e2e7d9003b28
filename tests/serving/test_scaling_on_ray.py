"""A decode pool that grows under load and shrinks after it, with every stream kept."""

import concurrent.futures
import threading
from pathlib import Path

import pytest
from ray import serve

from tests.support.services import MODEL, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

POOLS = {
    "decode": {
        "autoscaling": {
            "max_replicas": 2, "target_running_share": 0.25, "upscale_delay_s": 1.0, "downscale_delay_s": 5.0,
            "look_back_period_s": 4.0,
        }
    }
}  # fmt: skip


def num_running(app: str) -> int:
    return int(serve.status().applications[app].deployments["DecodeServer"].replica_states.get("RUNNING", 0))


def test_one_two_one_under_load(ray_port: int, tiny_folder: Path) -> None:
    with deployed(ray_port, "scaled", app_args(tiny_folder, "disaggregated", pools=POOLS)) as service:
        assert num_running("scaled") == 1
        enough = threading.Event()
        body = {"model": MODEL, "prompt": "go on", "max_tokens": 300, "stream": True, "ignore_eos": True}

        def streams() -> int:
            """Stream one answer after the other; how many came to their end."""
            count = 0
            while not enough.is_set() or count == 0:
                with service.http() as http, http.stream("POST", "/v1/completions", json=body) as reply:
                    lines = [line for line in reply.iter_lines() if line]
                    assert reply.status_code == 200
                assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2], lines[-2:]
                count += 1
            return count

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            clients = [pool.submit(streams) for _ in range(10)]
            wait_for(lambda: num_running("scaled") == 2, "a second replica", timeout_s=180)
            # It goes again while a few long streams run on both: none of them may break off.
            kept = [pool.submit(streams) for _ in range(2)]
            enough.set()
            assert sum(client.result(timeout=180) for client in [*clients, *kept]) >= 12
        wait_for(lambda: num_running("scaled") == 1, "the second replica's going", timeout_s=180)
        assert service.completion(prompt="still here", max_tokens=2)["usage"]["completion_tokens"] <= 2
