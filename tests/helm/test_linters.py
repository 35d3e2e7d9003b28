"""hadolint, shellcheck and yamllint over what is deployed; each exception is explained where it is made."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dashboards.build import server_files
from serve_app.config.files import load_config
from tools.chart import ROOT

DOCKER = ROOT / "deploy" / "docker"


def tool(name: str) -> str:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found, f"{name} is missing; make setup installs it"
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hadolint() -> None:
    run(tool("hadolint"), str(DOCKER / "Dockerfile"))


def test_shellcheck() -> None:
    scripts = [path for path in (ROOT / ".ci").iterdir() if path.read_bytes().startswith(b"#!")]
    assert scripts
    run(tool("shellcheck"), *map(str, scripts))


def test_yamllint() -> None:
    run(tool("yamllint"), "--strict", "deploy", "helm", ".yamllint.yaml")


def test_compose_mounts_files_that_are_there_and_keeps_to_this_machine() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert services.keys() == {"truespec", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            built = source.partition("../../build/dashboards")[2].lstrip("/")
            is_there = (DOCKER / source).exists() or built in {"", *server_files()}
            assert not source.startswith(".") or is_there, f"{source} is not there"
        if "build" not in service:
            assert not service["image"].endswith(":latest") and ":" in service["image"]
    assert load_config(DOCKER / "truespec.yaml").http_options.port == 8000


def test_compose_scrapes_with_the_job_name_and_data_source_of_the_dashboards() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["job_name"] == "truespec"
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "truespec.yaml").read_text())["providers"]
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert any(mount.split(":")[1] == provider["options"]["path"] for mount in services["grafana"]["volumes"])


def test_the_image_is_built_from_what_the_context_holds() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and {"speculative", "serve_app", "dashboards", "deploy"} <= kept
    copied = {
        source
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert {source if source in kept else source.split("/")[0] for source in copied} == kept
    assert all((ROOT / source).exists() for source in copied)


def installed_packages() -> dict[str, set[str]]:
    """Stage of the Dockerfile -> the Debian packages in it, those of the stages it begins with included."""
    found: dict[str, set[str]] = {}
    stage = ""
    for line in (DOCKER / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:1] == ["FROM"]:
            _, parent, _, stage = words
            parent = parent.replace("${PYTHON_IMAGE}", "python")
            found[stage] = set(found.get(parent, ()))
        for command in line.removeprefix("RUN").split("&&") if words[:1] == ["RUN"] else ():
            if command.split()[:2] == ["apt-get", "install"]:
                found[stage] |= {word for word in command.split()[2:] if not word.startswith("-")}
    return found


@pytest.mark.parametrize("image", ["cpu", "gpu", "vllm"])
def test_an_image_can_compile_the_kernels_it_runs(image: str) -> None:
    # kernels.py compiles C++ in both, Triton C against the headers of the C library, which gcc alone does not bring.
    assert installed_packages()[image] >= {"g++", "libc6-dev"}


def test_the_images_install_what_the_project_names_and_only_the_gpus_has_nixl(tmp_path: Path) -> None:
    (program,) = re.findall(r"^RUN python -c '([^']+)'", (DOCKER / "Dockerfile").read_text(), re.M)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("\\\n", "")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert done.stdout.splitlines() == [*project["dependencies"], *extras["tracing"]], done.stderr
    assert (tmp_path / "requirements-gpu.txt").read_text().splitlines() == extras["nixl"]
    text = (DOCKER / "Dockerfile").read_text()
    found = {
        stage: text.partition(f"AS dependencies-{stage}\n")[2].partition("\nFROM")[0]
        for stage in ("cpu", "gpu", "vllm")
    }
    assert [stage for stage in found if "-r requirements-gpu.txt" in found[stage]] == ["gpu"]
    assert [stage for stage in found if '["vllm"]' in found[stage]] == ["vllm"]
    for stage, lock in (("cpu", "gpu"), ("gpu", "gpu"), ("vllm", "vllm")):
        (install,) = re.findall(r"pip install .*-r requirements\.txt", found[stage])
        assert f"-c {lock}.txt" in install and "index-url" not in install, (
            "of two indexes either could give any package"
        )


def pinned(name: str) -> dict[str, str]:
    """Package -> version of a file that pins what an image installs."""
    lines = (DOCKER / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_images_base_is_a_digest_of_the_python_that_the_locks_are_for() -> None:
    (image,) = re.findall(r"^FROM (python:\S+) AS python$", (DOCKER / "Dockerfile").read_text(), re.M)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", image)
    assert "--python-version 3.11 " in (ROOT / "Makefile").read_text()


def test_whatever_an_image_installs_is_pinned() -> None:
    """Followed through the packages that are installed here; what is not there is looked for by its name alone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    direct = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] + extras["tracing"]
    gpu, vllm = pinned("gpu"), pinned("vllm")
    waiting, seen = [Requirement(line) for line in direct + extras["nixl"]], set[tuple[str, str]]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            assert name in gpu, f"{wanted} is not in deploy/docker/gpu.txt; run make locks"
            assert gpu[name] in wanted.specifier, f"{wanted}, but {gpu[name]} is pinned; run make locks"
            try:
                needs = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
            except importlib.metadata.PackageNotFoundError:
                continue
            waiting += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    assert len(seen) > 60
    for line in direct + extras["nixl"] + extras["vllm"]:
        assert vllm[canonicalize_name(Requirement(line).name)] in Requirement(line).specifier
    ours = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: version for name, version in gpu.items() if ours.get(name, version) != version} == {}
    assert vllm["ray"] == gpu["ray"] == ours["ray"], "handoffs and jobs pass between all images"
