"""The workflows: they lint, ask for no more than they need, and their shell steps do what they say in a checkout."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.workflow_steps import SOURCE, WORKFLOWS, Runner, of_a_release, workflow

pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.yml"))
_WRITES = {  # job -> what it may do beside reading the checkout
    ("images", "push"): {"packages"},
    ("images", "publish"): {"packages", "id-token", "attestations"},
    ("release", "images"): {"packages", "id-token", "attestations"},
    ("release", "chart"): {"packages", "id-token", "attestations"},
    ("release", "pypi"): {"id-token"},
    ("release", "docs"): {"contents"},
    ("release", "notes"): {"contents"},
    ("docs", "publish"): {"contents"},
}


def actionlint(*files: Path) -> subprocess.CompletedProcess[str]:
    scripts = sysconfig.get_path("scripts")
    command = [f"{scripts}/actionlint", "-no-color", "-shellcheck", f"{scripts}/shellcheck", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_they_lint() -> None:
    done = actionlint(*WORKFLOWS.glob("*.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_to_a_commit_with_its_version_beside_it(name: str) -> None:
    text = (WORKFLOWS / f"{name}.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("name", NAMES)
def test_a_job_may_do_what_it_needs_and_no_more(name: str) -> None:
    described = workflow(name)
    assert described["permissions"] == {} and "concurrency" in described
    for job, settings in described["jobs"].items():
        writes = {scope for scope, level in settings["permissions"].items() if level == "write"}
        assert writes == _WRITES.get((name, job), set()), f"{name}.yml, {job}"
        assert "uses" in settings or settings["timeout-minutes"] <= 120


def test_nothing_is_published_before_versions_and_checks() -> None:
    jobs = workflow("release")["jobs"]

    def before(job: str) -> set[str]:
        needs = jobs[job].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(one) for one in direct))

    for job, settings in jobs.items():
        if "write" in settings["permissions"].values():
            assert {"version", "checks"} <= before(job), job


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return of_a_release(tmp_path_factory.mktemp("release"))


def test_the_version_is_compared_with_the_tag(runner: Runner) -> None:
    outputs = runner.run("release", "version", "Compare the versions with the tag")
    assert outputs == {"version": "9.8.7", "series": "9.8", "registry": "ghcr.io/some-body"}


def test_the_notes_are_the_changelogs(runner: Runner) -> None:
    runner.run("release", "notes", "Write the notes")
    assert (runner.tree / "notes.md").read_text().startswith("- News.\n")


def test_the_documentation_is_built_strictly_and_kept_by_version(runner: Runner) -> None:
    runner.run("docs", "publish", "Build, strictly")
    page = (runner.tree / "build" / "site" / "jobs" / "index.html").read_text()
    assert f'href="{SOURCE}/blob/v9.8.7/deploy/configs/jobs/batch.yaml"' in page and 'href="../detection/"' in page
    runner.run("docs", "publish", "Commit as a version")
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "gh-pages"], cwd=runner.tree, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"9.8", "latest", "index.html", "versions.json"} <= set(listed)
