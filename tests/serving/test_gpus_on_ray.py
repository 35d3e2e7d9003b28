"""Replicas and other actors see the GPUs that Ray gave them, on a Ray whose node has two by name."""

from pathlib import Path

import pytest
import ray

from serve_app import app
from serve_app.config.files import parse_args
from tests.support.gpu_probe import GpuProbe
from tests.support.services import ENGINE, app_args

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("ray_port")
def test_an_engine_takes_a_gpu_that_its_replica_was_given_and_no_other(tiny_folder: Path) -> None:
    for num_gpus, seen in ((0, [""]), (1, ["0", "1"]), (0.5, ["0", "1"]), (2, ["0,1", "1,0"])):
        args = app_args(tiny_folder, "monolith", pools={"monolith": {"num_gpus": num_gpus}})
        args["engine"] = ENGINE | {"device": "auto"}
        options = app._options(parse_args(args), "monolith")["ray_actor_options"]
        probe = ray.remote(GpuProbe).options(**options).remote()
        own, its_childs = ray.get(probe.visible.remote())
        assert own == its_childs and own in seen
        pretended, here = ray.get(probe.device.remote(args))
        assert pretended == ("cuda" if num_gpus else "cpu")
        assert "num_gpus of its pool set to 0" in here if num_gpus else here == "cpu"
        assert ray.get(probe.of_child.remote(0)) == ["", ""]
        if num_gpus < 2:
            assert ray.get(probe.of_child.remote(0.5))[0] in ("0", "1"), "one that asks for a GPU sees it"
        ray.kill(probe)
