"""What the chart's tests share: helm runs and the objects of a render."""

import json
from pathlib import Path
from typing import Any

import yaml

from deploy.chart import CHART, EXAMPLES, run_helm

Object = dict[str, Any]
EXAMPLE_NAMES = sorted(path.name.removesuffix("-values.yaml") for path in EXAMPLES.glob("*-values.yaml"))
MONITORING = ("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule")
MINIMAL = {"config": {"model": {"source": "/models/tiny"}}}


def template(values: dict[str, Any] | Path, *options: str, name: str = "demo") -> list[Object]:
    """The objects that helm renders.

    Raises:
        ChartError: helm refused the values.
    """
    file, text = ("-", json.dumps(values)) if isinstance(values, dict) else (str(values), None)
    made = run_helm("template", name, str(CHART), "--namespace", "demo", "-f", file, *options, stdin=text)
    return [found for found in yaml.safe_load_all(made) if found]


def example(name: str, *options: str) -> list[Object]:
    """The objects of a committed example."""
    return template(EXAMPLES / f"{name}-values.yaml", *options)


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """The pod templates of the RayService, by component, and the smoke test's pod."""
    cluster = one(objects, "RayService")["spec"]["rayClusterConfig"]
    found = {"head": cluster["headGroupSpec"]["template"]}
    found |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return found | {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in of_kind(objects, "Pod")}


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
