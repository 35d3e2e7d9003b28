"""The files of a release: all that the packages read is in the wheel, and it works where there is no checkout."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.processes import until_interrupted
from tests.support.project_files import ROOT, project_files
from tests.support.waiting import wait_for
from tests.support.workflow_steps import SOURCE, of_a_release, workflow
from tools.chaos.sockets import free_ports
from tools.chart import run_helm

pytestmark = pytest.mark.slow

PACKAGES = ("speculative", "serve_app", "dashboards", "deploy")
_IN_A_CHECKOUT = ("deploy/configs/jobs/", "deploy/docker/")  # of clusters and images
_OPTIONAL = (  # beginnings of the names of modules that want what an extra installs
    "serve_app.backends.vllm_",
    "dashboards.push",
)
_NEVER = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(%r))  # what importing and looking for them takes as missing
"""
_IMPORT_ALL = """
for package in %r:
    found = importlib.import_module(package)
    assert found.__file__.startswith(%r), found.__file__
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        if not module.name.startswith(%r):
            importlib.import_module(module.name)
"""
_RUN = """
from deploy.cli.main import main
main(%r)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a release has, made from its commit."""
    runner = of_a_release(tmp_path_factory.mktemp("release"))
    runner.run("release", "build", "Make all files of the release")
    return runner.tree / "dist"


@pytest.fixture(scope="module")
def wheel(files: Path) -> Path:
    """Beside it lies the source archive."""
    (found,) = (files / "python").glob("*.whl")
    return found


def test_all_files_are_listed_with_their_digests(files: Path) -> None:
    listed = dict(line.split("  ")[::-1] for line in (files / "SHA256SUMS").read_text().splitlines())
    made = ["chart/truespec-9.8.7.tgz", "images/truespec-9.8.7-context.tar.gz"]
    assert [*listed] == [*made, "python/truespec-9.8.7-py3-none-any.whl", "python/truespec-9.8.7.tar.gz"]
    assert all(hashlib.sha256((files / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())


def test_the_images_context_has_what_they_copy(files: Path) -> None:
    with tarfile.open(files / "images" / "truespec-9.8.7-context.tar.gz") as archive:
        dockerfile, names = archive.extractfile("deploy/docker/Dockerfile"), archive.getnames()
        assert dockerfile is not None
        copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read().decode(), re.M)
    assert {"speculative", "docs/runbooks.md"} <= {one for line in copied for one in line.split()} <= {*names}


def test_the_chart_is_packaged_with_the_images_that_are_published(files: Path) -> None:
    with tarfile.open(files / "chart" / "truespec-9.8.7.tgz") as archive:
        inside: dict[str, Any] = {
            name: yaml.safe_load(archive.extractfile(f"truespec/{name}") or b"")
            for name in ("Chart.yaml", "values.yaml")
        }
        names = set(archive.getnames())
    chart = inside["Chart.yaml"]
    assert {"truespec/LICENSE", "truespec/values.schema.json", "truespec/dashboards/rules/truespec.json"} <= names
    assert inside["values.yaml"]["image"]["repository"] == "ghcr.io/some-body/truespec"
    rule = inside["values.yaml"]["monitoring"]["prometheusRule"]
    assert rule["runbookUrl"] == f"{SOURCE}/blob/v9.8.7/docs/runbooks.md"
    assert (chart["version"], chart["appVersion"], chart["home"]) == ("9.8.7", "9.8.7", SOURCE)
    images = {one["image"] for one in yaml.safe_load(chart["annotations"]["artifacthub.io/images"])}
    jobs = workflow("images")["jobs"]
    tagged = {one["target"]: one["suffix"] for one in jobs["publish"]["strategy"]["matrix"]["include"]}
    suffixes = set(tagged.values())
    for job in ("build", "push"):
        assert jobs[job]["strategy"]["matrix"] == {"target": list(tagged), "arch": ["amd64", "arm64"]}
    assert images == {f"ghcr.io/some-body/truespec:9.8.7{suffix}" for suffix in suffixes}


def test_every_file_of_the_packages_is_in_it_and_nothing_else(wheel: Path) -> None:
    of_packages = {name for name in project_files(*PACKAGES) if not name.startswith(_IN_A_CHECKOUT)}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == of_packages
        assert archive.getinfo("speculative/kernels/products.cpp").file_size > 10_000
    (source,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert of_packages | {"pyproject.toml", "README.md", "LICENSE"} <= inside


def test_its_description_leads_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    text = str(metadata.get_payload())
    assert f"{SOURCE}/blob/v9.8.7/" in text
    assert "](docs/" not in text and "](CONTRIBUTING" not in text
    assert metadata["Version"] == "9.8.7" and metadata["License-Expression"] == "Apache-2.0"


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(unpacked: Path, code: str, folder: Path) -> str:
    """What code prints that finds the unpacked wheel and no package for development."""
    never = {"accelerate", "build", "grafana_api", "hypothesis", "matplotlib", "mkdocs", "mypy", "openai"}
    never |= {"playwright", "pytest", "schemathesis", "yamllint", "tests"}
    done = subprocess.run(
        [sys.executable, "-c", _NEVER % never + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_module_is_imported_from_it_without_packages_for_development(unpacked: Path, tmp_path: Path) -> None:
    python(unpacked, _IMPORT_ALL % (PACKAGES, str(unpacked), _OPTIONAL), tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "model's answers are its own"),
        (["config", "check", "--file-only", "demo"], "configs/demo.yaml: fine"),
        (["model", "list"], "smollm2-135m"),
        (["dashboards", "build", "--out", "made"], "written: made/overview.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_works_outside_of_a_checkout(words: list[str], said: str, unpacked: Path, tmp_path: Path) -> None:
    assert said in python(unpacked, _RUN % (words,), tmp_path)


def test_a_configuration_becomes_values_of_the_packed_chart(files: Path, unpacked: Path, tmp_path: Path) -> None:
    values = python(unpacked, _RUN % (["config", "values", "demo"],), tmp_path)
    made = run_helm("template", "truespec", str(files / "chart" / "truespec-9.8.7.tgz"), "-f", "-", stdin=values)
    (service,) = [one for one in yaml.safe_load_all(made) if one and one["kind"] == "RayService"]
    assert "image: ghcr.io/some-body/truespec:9.8.7" in yaml.safe_dump(service)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Makes commands of a new environment that has the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    constraints = ["-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    for name in ("torch", wheel):
        subprocess.run([folder / "bin" / "pip", "install", *constraints, name], env=CLEAN, check=True)
    return lambda *words: [f"{folder}/bin/truespec", *map(str, words)]


CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_the_demo_runs_from_the_wheel_in_an_empty_environment(
    installed: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert "This machine can serve it" in run(installed("config", "check", "demo"), tmp_path)
    (port,) = free_ports(1)
    run(installed("demo", "--port", port, "--json", "demo.json"), tmp_path)
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["verdicts"]["verified"] > 0 and figures["verdicts"]["suspect"] == 0
    assert (figures["fault"]["state"], figures["fault"]["verdicts"]) == ("found", ["verified"] * 2)
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json"}, "nothing else is written"


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_service_with_keys_is_served_proved_and_watched_from_the_wheel(
    installed: Callable[..., list[str]], tmp_path: Path
) -> None:
    served, watched, referee = free_ports(3)
    key = run(installed("keys", "create", "--file", "keys.json", "--id", "me"), tmp_path).split()[-1]
    config = yaml.safe_load(run(installed("config", "show", "demo"), tmp_path))
    config["http_options"]["port"] = served
    config["applications"][0]["args"]["access"] = {"keys_file": str(tmp_path / "keys.json")}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    asked: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Why?"}]}
    asked |= {"max_tokens": 16, "logprobs": True, "receipt": True, "reproducible": True}
    urls = [f"http://127.0.0.1:{port}" for port in (served, watched, referee)]
    ports = ("--port", watched, "--referee-port", referee)
    watch = installed("watch", "proxy", urls[0], "--model", "smollm2-135m", "--share", 1, *ports)
    limits: dict[str, Any] = {"cwd": tmp_path, "starts_within_s": 600, "ends_within_s": 60}
    serve, serve_log, watch_log = installed("serve", "my.yaml"), tmp_path / "serve.log", tmp_path / "watch.log"
    with (
        until_interrupted(serve, serve_log, "Serving ", CLEAN, **limits) as (serve_says, server),
        until_interrupted(watch, watch_log, "Ready: ", CLEAN, **limits) as (watch_says, proxy),
        httpx.Client(timeout=300) as client,
    ):
        assert server.poll() is None, serve_says()
        assert proxy.poll() is None, watch_says()
        assert client.post(f"{urls[0]}/v1/chat/completions", json=asked).status_code == 401
        client.headers["authorization"] = f"Bearer {key}"
        reply = client.post(f"{urls[1]}/v1/chat/completions", json=asked).raise_for_status().json()
        (tmp_path / "reply.json").write_text(json.dumps(reply))
        assert run(installed("verify", "reply.json", "--model", "smollm2-135m"), tmp_path).rstrip().endswith("VERIFIED")
        wait_for(lambda: client.get(f"{urls[2]}/report.json").json()["answers"]["verdicts"].get("verified"), "verdict")
