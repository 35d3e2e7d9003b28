"""vLLM's ranks on several nodes, placed by Ray: nodes with one pretended GPU each, and a replica that needs two."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ray_head import RayHead, ray_head, ray_node
from tests.support.services import MODEL
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_installed import NEEDS_VLLM
from tests.support.waiting import wait_for
from tests.vllm.test_vllm_two_ranks import TARGET
from tools.chaos.sockets import free_ports

pytestmark = [*NEEDS_VLLM, pytest.mark.ray, pytest.mark.timeout(1200)]
QUESTION = {"model": MODEL, "prompt": "one two three " * 20, "max_tokens": 20, "temperature": 0}


_PLATFORM = """
from vllm.platforms.cpu import CpuPlatform


class PretendedGpus(CpuPlatform):
    ray_device_key = "GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
"""


def write_pretended_gpus(folder: Path) -> Path:
    """A folder for `PYTHONPATH`, in which vLLM finds its CPU build as a platform whose ranks Ray places on GPUs."""
    installed = folder / "pretended_gpus-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended-gpus\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[vllm.platform_plugins]\npretended = pretended_gpus:platform\n")
    (folder / "pretended_gpus.py").write_text(
        "def platform():\n    return 'pretended_gpus_platform.PretendedGpus'\n", encoding="utf-8"
    )
    (folder / "pretended_gpus_platform.py").write_text(_PLATFORM, encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Service:
    """A service whose only replica has ranks on two of three nodes."""

    head: RayHead
    url: str
    kill: dict[str, Callable[[], None]]  # a node with a GPU, by its label `node`

    def answer(self, **changes: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=QUESTION | changes, timeout=300)

    def nodes_of_ranks(self) -> list[str]:
        """The labels of the nodes where they are."""
        names = self.head.names()
        actors = self.head.get("/api/v0/actors?detail=1")["data"]["result"]["result"]
        ranks = [one for one in actors if one["class_name"] == "RayWorkerProc" and one["state"] == "ALIVE"]
        return sorted(names[one["node_id"]] for one in ranks)


def configuration(folder: Path) -> dict[str, Any]:
    """The service's arguments."""
    return {
        "model": {"source": str(folder), "name": MODEL},
        "engine": {
            "kind": "vllm", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_tokens": 4096,
            "block_size": 32,
        },
        "vllm": {
            "engine_args": {"enforce_eager": True, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "self_check_sample_rate": 1.0,
        },
        "topology": "monolith",
        "drafter": {"kind": "draft_model", "model": str(folder), "num_draft_tokens": 3},
        "pools": {"monolith": {"num_cpus": 1, "num_gpus": 2, "label_selector": {"has": "gpu"}}},
        "replay": {"sample_rate": 1.0},
    }  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("ranks-by-ray")
    (port,) = free_ports(1)
    model = write_tiny_model(folder / "model", vocab_size=512, tokenizer=True, **TARGET)
    paths = [str(write_pretended_gpus(folder / "gpus")), *filter(None, (os.environ.get("PYTHONPATH"),))]
    found = {"PYTHONPATH": os.pathsep.join(paths)}
    with ray_head(num_cpus=1, labels={"node": "head"}, settings=found) as head, contextlib.ExitStack() as stack:
        head.environment.update(found)
        labels = [{"node": name, "has": "gpu"} for name in "abc"]
        kill = {one["node"]: stack.enter_context(ray_node(head, 1, one, num_gpus=1)) for one in labels}
        url = f"http://127.0.0.1:{port}"
        shown, started = stack.enter_context(head.serving(folder, url, "ranks", configuration(model)))
        assert started.poll() is None, shown()
        yield Service(head, url, kill)


def test_a_replica_has_its_ranks_on_two_nodes_and_answers_are_verified(service: Service) -> None:
    assert len(set(service.nodes_of_ranks())) == 2
    greedy, drawn = (service.answer(verify=True, temperature=heat).json() for heat in (0, 1))
    assert greedy["verdict"] == "verified"
    assert drawn["verdict"] == "logprobs_only", "beside ranks that Ray places vLLM replays, which gives no distribution"


def test_a_node_with_a_rank_dies_and_the_replica_is_replaced_on_those_that_are_left(service: Service) -> None:
    text = service.answer().json()["choices"][0]["text"]
    ranks = service.nodes_of_ranks()
    (lost,) = {*ranks} - {*service.head.nodes_of("MonolithServer", "ranks")}  # one rank is where the replica is
    service.kill[lost]()
    assert service.answer().status_code >= 500  # vLLM alone would let it wait for ever
    left = sorted({*service.kill} - {lost})
    wait_for(lambda: service.nodes_of_ranks() == left and service.answer().status_code == 200, f"ranks on {left}")
    assert service.answer().json()["choices"][0]["text"] == text, ranks
