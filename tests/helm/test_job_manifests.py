"""deploy/configs/jobs: RayJobs that fit KubeRay's definition, run safely, and submit commands that exist."""

import json
import shlex
from typing import Any

import pytest
import yaml

from serve_app.app import build_app
from serve_app.config.files import load_config
from tests.support import crds, kubernetes
from tests.support.command_lines import fault, in_shell
from tools.chart import ROOT

FOLDER = ROOT / "deploy" / "configs" / "jobs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
Object = dict[str, Any]


def objects(name: str) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def job(name: str) -> Object:
    (found,) = (one for one in objects(name) if one["kind"] == "RayJob")
    return found


def pods(name: str) -> dict[str, Object]:
    spec = job(name)["spec"]
    return {"submitter": spec["submitterPodTemplate"], "head": spec["rayClusterSpec"]["headGroupSpec"]["template"]}


def test_there_is_one_for_each_verb_of_the_image_that_runs_long() -> None:
    assert NAMES == ["batch"]
    for name in NAMES:
        assert shlex.split(job(name)["spec"]["entrypoint"])[:2] == ["truespec", name]


@pytest.mark.parametrize("name", NAMES)
def test_the_entrypoint_is_a_command_of_ours(name: str) -> None:
    commands = list(in_shell(job(name)["spec"]["entrypoint"]))
    assert commands and all(fault(words) is None for words in commands)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_the_custom_resources_definition(name: str) -> None:
    for schemas in (crds.our_schemas(), crds.real_schemas()):
        if "RayJob" in schemas:
            assert not crds.errors(schemas["RayJob"], job(name))
            wrong = json.loads(json.dumps(job(name)))
            wrong["spec"]["rayClusterSpec"]["headGroupSpec"]["replicaz"] = 1
            assert crds.errors(schemas["RayJob"], wrong), "the schema finds faults"


@pytest.mark.parametrize("name", NAMES)
def test_pods_and_core_objects_are_valid_kubernetes(name: str) -> None:
    core = [found for found in objects(name) if found["kind"] != "RayJob"]
    core += [kubernetes.pod(pod, part) for part, pod in pods(name).items()]
    kubernetes.check(core)


@pytest.mark.parametrize("name", NAMES)
def test_pods_meet_the_restricted_security_standard_and_mount_what_they_have(name: str) -> None:
    for pod in pods(name).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_the_charts(name: str) -> None:
    values = yaml.safe_load((ROOT / "helm" / "truespec" / "values.yaml").read_text(encoding="utf-8"))
    chart = yaml.safe_load((ROOT / "helm" / "truespec" / "Chart.yaml").read_text(encoding="utf-8"))
    assert job(name)["spec"]["rayClusterSpec"]["rayVersion"] == values["ray"]["version"]
    for pod in pods(name).values():
        (container,) = pod["spec"]["containers"]
        assert container["image"].removesuffix("-cpu") == f"truespec:{chart['appVersion']}"
        assert container["image"].endswith("-cpu") != ("nvidia.com/gpu" in limits(name))


def limits(name: str) -> dict[str, str]:
    return pods(name)["head"]["spec"]["containers"][0]["resources"]["limits"]


def test_the_batchs_application_is_one_that_is_served(tmp_path: Any) -> None:
    (config_map,) = (one for one in objects("batch") if one["kind"] == "ConfigMap")
    file = tmp_path / "application.yaml"
    file.write_text(config_map["data"]["application.yaml"])
    args = load_config(file).application.args
    build_app(args.model_dump(exclude_unset=True))
    head = limits("batch")
    assert args.pools.monolith is not None
    assert args.pools.monolith.num_gpus <= int(head["nvidia.com/gpu"])
    assert args.pools.monolith.num_cpus < int(head["cpu"]), "the job itself and Ray want some"
    (mount,) = (volume for volume in pods("batch")["head"]["spec"]["volumes"] if "configMap" in volume)
    assert mount["configMap"]["name"] == config_map["metadata"]["name"]
