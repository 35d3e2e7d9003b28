"""deploy/configs/jobs/batch.yaml: a RayJob that fits KubeRay's definition, runs safely, and submits our command."""

from pathlib import Path
from typing import Any

import yaml

from serve_app.app import build_app
from serve_app.config.files import load_config
from tests.support import crds, kubernetes
from tests.support.command_lines import fault, in_shell
from tools.chart import CHART, ROOT

FOLDER = ROOT / "deploy" / "configs" / "jobs"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "batch.yaml").read_text(encoding="utf-8")))
(JOB,) = (found for found in OBJECTS if found["kind"] == "RayJob")
CLUSTER = JOB["spec"]["rayClusterSpec"]
PODS = {"submitter": JOB["spec"]["submitterPodTemplate"], "head": CLUSTER["headGroupSpec"]["template"]}


def test_the_entrypoint_is_a_command_of_ours() -> None:
    assert [path.stem for path in FOLDER.glob("*.yaml")] == ["batch"]
    (words,) = in_shell(JOB["spec"]["entrypoint"])
    assert words[0] == "batch" and fault(words) is None


def test_it_is_valid_for_kubernetes_and_kuberay_and_restricted() -> None:
    core = [found for found in OBJECTS if found["kind"] != "RayJob"]
    kubernetes.check(core + [kubernetes.pod(pod, part) for part, pod in PODS.items()])
    assert not crds.errors(JOB)
    for pod in PODS.values():
        kubernetes.assert_restricted(pod)


def test_versions_are_the_charts_and_the_gpu_has_an_image_for_it() -> None:
    values, chart = (
        yaml.safe_load((CHART / name).read_text(encoding="utf-8")) for name in ("values.yaml", "Chart.yaml")
    )
    assert CLUSTER["rayVersion"] == values["ray"]["version"]
    images = {pod["spec"]["containers"][0]["image"] for pod in PODS.values()}
    assert images == {f"truespec:{chart['appVersion']}"}, "and none for CPUs"


def test_the_application_is_one_that_is_served_and_has_room(tmp_path: Path) -> None:
    (config_map,) = (found for found in OBJECTS if found["kind"] == "ConfigMap")
    file = tmp_path / "application.yaml"
    file.write_text(config_map["data"]["application.yaml"])
    args = load_config(file).application.args
    build_app(args.model_dump(exclude_unset=True))
    head = PODS["head"]["spec"]
    limits = head["containers"][0]["resources"]["limits"]
    assert args.pools.monolith is not None
    assert args.pools.monolith.num_gpus <= int(limits["nvidia.com/gpu"])
    assert args.pools.monolith.num_cpus < int(limits["cpu"]), "the job itself and Ray want some"
    (mount,) = (volume for volume in head["volumes"] if "configMap" in volume)
    assert mount["configMap"]["name"] == config_map["metadata"]["name"]
