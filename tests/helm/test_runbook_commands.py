"""What the runbooks have one type into kubectl and helm, on an installed release and a stand-in for the API server."""

import json
import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.chart import MINIMAL, merged
from tests.support.fake_api_server import running_api_server
from tests.support.runbook_shell import commands, run, with_kubectl
from tools.chart import CHART, run_helm

pytestmark = pytest.mark.slow

SMALL = {"monitoring": {"dashboards": {"enabled": False}}, "configCheck": {"enabled": False}}
SHOWN = {
    "get pods": "head-pod",
    "history": "superseded",
    "describe rayservice": "demo-truespec",
    "get podmonitor": "podmonitor.monitoring.coreos.com/demo-truespec",
    "get secret": "secret/",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Of a shell that finds helm, and a release with two revisions and a head pod."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with running_api_server(tmp_path_factory.mktemp("api")) as (api, kubeconfig):
        for replicas in (1, 2):
            values = json.dumps(merged(MINIMAL, SMALL, {"worker": {"replicas": replicas}}))
            place = ["--namespace", "demo", "--kubeconfig", str(kubeconfig)]
            options = ["--install", "--disable-openapi-validation", "-f", "-", *place]
            run_helm("upgrade", "demo", str(CHART), *options, stdin=values)
        labels = {"app.kubernetes.io/instance": "demo", "ray.io/node-type": "head"}
        api.objects["/api/v1/namespaces/demo/pods/head-pod"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "head-pod", "namespace": "demo", "labels": labels},
            "spec": {"containers": []},
        }
        path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
        yield os.environ | {"KUBECONFIG": str(kubeconfig), "PATH": path}


def test_commands_for_the_head_reach_both_clusters_of_an_upgrade(tmp_path: Path) -> None:
    pods = r"pod/old-head\npod/new-head\n"
    script = f"""#!/bin/bash
case "$*" in *" get pods "*) printf '{pods}' ;; *exec*) echo "$4" ;; esac
"""
    environment = with_kubectl(tmp_path, script)
    assert run("in_head serve status", None, {}, environment).split() == ["pod/old-head", "pod/new-head"]


@pytest.mark.parametrize("command", commands("kubectl", "helm"))
def test_the_commands_for_kubectl_and_helm_find_the_release(command: str, environment: Mapping[str, str]) -> None:
    shown = run(command, None, {"NAMESPACE": "demo", "RELEASE": "demo"}, environment)
    (expected,) = [text for verb, text in SHOWN.items() if verb in command]
    assert expected in shown
