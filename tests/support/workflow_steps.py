"""Runs the shell steps of a GitHub workflow in a copy of the project, as a runner would."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.project_files import ROOT, project_files
from tools.release import cut

SOURCE = "https://github.test/Some-Body/truespec"
WORKFLOWS = ROOT / ".github" / "workflows"
_GIT = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "init.defaultBranch=main"]


def workflow(name: str) -> dict[str, Any]:
    """What a file of workflows says."""
    found: dict[str, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))
    return found


def checkout(folder: Path) -> Path:
    """A copy of the project, as git would check it out, in a repository of its own."""
    for name in project_files():
        source, to = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to, follow_symlinks=False)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*_GIT, *words], cwd=folder, check=True)
    return folder


class Runner:
    """Runs named steps of jobs.

    Args:
        tree: the checkout.
        values: of expressions, by their text.
        environment: that GitHub sets.
    """

    def __init__(self, tree: Path, values: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.tree = tree
        self._values = values
        self._environment = environment

    def run(self, file: str, job: str, step: str) -> dict[str, str]:
        """Run a step; returns its outputs."""
        described = workflow(file)
        (found,) = [one for one in described["jobs"][job]["steps"] if one.get("name") == step]
        declared = described["jobs"][job].get("env", {}) | found.get("env", {})
        output = self.tree.parent / "output"
        output.write_text("")
        scripts = sysconfig.get_path("scripts")
        environment = {
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": "",
            "NO_MKDOCS_2_WARNING": "1",
            "GITHUB_OUTPUT": str(output),
            **self._environment,
            **{name: self._filled(str(text)) for name, text in declared.items()},
        }
        assert "${{" not in found["run"], "an expression in a script is a way to inject shell code"
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"]]
        done = subprocess.run(shell, cwd=self.tree, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{file}.yml, {job}, {step}:\n{done.stdout}{done.stderr}"
        return dict(line.split("=", 1) for line in output.read_text().splitlines())

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda found: self._values[found[1]], text)


def of_a_release(folder: Path) -> Runner:
    """In a checkout of a release that was just cut: 9.8.7."""
    tree = checkout(folder / "tree")
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## [Unreleased]\n", "## [Unreleased]\n\n- News.\n", 1))
    cut("9.8.7", tree)
    subprocess.run([*_GIT, "commit", "-qam", "Release"], cwd=tree, check=True)
    values = {
        "needs.version.outputs.registry": "ghcr.io/some-body",
        "needs.version.outputs.version": "9.8.7",
        "github.server_url": "https://github.test",
        "github.repository": "Some-Body/truespec",
        "github.ref_name": "v9.8.7",
        "inputs.version": "9.8",
    }
    environment = {
        "GITHUB_REF_NAME": "v9.8.7",
        "GITHUB_REPOSITORY": "Some-Body/truespec",
        "GITHUB_REPOSITORY_OWNER": "Some-Body",
        "GITHUB_SERVER_URL": "https://github.test",
    }
    return Runner(tree, values, environment)
