"""What the chart's tests share: helm runs and the objects of a render."""

import copy
import functools
import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from dashboards.build import write_for_chart
from deploy.cli.main import main
from tests.support.crds import LOADER
from tools.chart import CHART, EXAMPLES, ROOT, run_helm

Object = dict[str, Any]
EXAMPLE_NAMES = sorted(path.name.removesuffix("-values.yaml") for path in EXAMPLES.glob("*-values.yaml"))
MONITORING = ("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule")
write_for_chart(ROOT)  # `make chart`; no test begins before all files are imported
MINIMAL = {"config": {"model": {"source": "/models/tiny"}}, "image": {"repository": "registry.example.com/truespec"}}


def template(values: dict[str, Any] | Path, *options: str, name: str = "demo", chart: Path = CHART) -> list[Object]:
    """The objects that helm renders, the caller's own to change. Raises ChartError: helm refused the values."""
    text = json.dumps(values) if isinstance(values, dict) else values.read_text(encoding="utf-8")
    rendered = _rendered if chart == CHART else _rendered.__wrapped__
    return copy.deepcopy(rendered(text, options, name, chart))


@functools.cache
def _rendered(values: str, options: tuple[str, ...], name: str, chart: Path) -> list[Object]:
    """A render of the same values is the same but for random passwords, so that helm is started for them once."""
    made = run_helm("template", name, str(chart), "--namespace", "demo", "-f", "-", *options, stdin=values)
    return objects_of(made)


def objects_of(manifests: str) -> list[Object]:
    """The objects of a stream of YAML, without those that are empty."""
    return [found for found in yaml.load_all(manifests, Loader=LOADER) if found]


def example(name: str, *options: str, chart: Path = CHART) -> list[Object]:
    """The objects of a committed example."""
    return template(EXAMPLES / f"{name}-values.yaml", *options, chart=chart)


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def ray_pods(objects: list[Object]) -> dict[str, Object]:
    """The pod templates of the RayService, by component."""
    cluster = one(objects, "RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]} | groups


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """All pods, by component: those of the RayService, of Jobs and Deployments, the smoke test."""
    others = [found["spec"]["template"] for found in objects if found["kind"] in ("Job", "Deployment")]
    others += of_kind(objects, "Pod")
    rays = ray_pods(objects) if of_kind(objects, "RayService") else {}
    return rays | {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in others}


def config_check_command(job: Object, folder: Path) -> list[str]:
    """What the Job's container runs, with its volume in `folder` and nothing else of the pod."""
    pod = job["spec"]["template"]
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    for item in volume["downwardAPI"]["items"]:
        (annotation,) = re.findall(r"^metadata\.annotations\['(.+)'\]$", item["fieldRef"]["fieldPath"])
        (folder / item["path"]).write_text(pod["metadata"]["annotations"][annotation])
    return [word.replace(mount["mountPath"], str(folder)) for word in container["command"]]


def config_check_environment(job: Object) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {"COLUMNS": "80"} | {entry["name"]: entry["value"] for entry in container["env"]}


def run_config_check(job: Object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the Job's command as its container does."""
    program, *arguments = config_check_command(job, folder)
    command = [str(Path(sysconfig.get_path("scripts"), program)), *arguments]
    own = config_check_environment(job)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=own)


def config_check_here(job: Object, folder: Path) -> tuple[int, str]:
    """Exit status and output of the Job's command, without a process of its own, which takes a second to start."""
    program, *arguments = config_check_command(job, folder)
    assert program == "truespec"
    done = CliRunner(env=config_check_environment(job)).invoke(main, arguments)
    return done.exit_code, done.output


def serve_config(objects: list[Object]) -> dict[str, Any]:
    """Ray Serve's config in the RayService."""
    return yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Values laid over one another, maps key by key, as helm does."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result
