"""Cutting a release: one version everywhere, and the changelog's section."""

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import release
from tools.release import ROOT, ReleaseError, check, cut, main, notes, version
from tools.site import github_slug

NEWS = "### Added\n\n- Something.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Of what states a version, between two releases."""
    for name in ("helm", "deploy/configs", "deploy/docker"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "docs/deployment.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    chart = tmp_path / "helm" / "truespec" / "Chart.yaml"
    chart.write_text(re.sub(r"^version: [\d.]+(?= |$)", r"\g<0>-dev.3", chart.read_text(), flags=re.M))
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n{NEWS}\n## [0.0.1] - 2020-01-02\n\n- Old.\n"
    )
    return tmp_path


def test_all_that_states_a_version_states_the_same() -> None:
    assert CliRunner().invoke(main, ["check"]).output == f"{version()}\n"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("helm/truespec/Chart.yaml", "appVersion: {}", "appVersion: 7.7.7"),
        ("helm/truespec/ci/cpu-demo-values.yaml", "tag: {}-cpu", "tag: 7.7.7-cpu"),
        ("deploy/configs/jobs/batch.yaml", "truespec:{}", "truespec:7.7.7"),
        ("deploy/docker/compose.yaml", "truespec:{}-cpu", "truespec:7.7.7-cpu"),
    ],
)
def test_what_states_another_version_is_named(file: str, old: str, new: str, tree: Path) -> None:
    path = tree / file
    text = path.read_text()
    assert old.format(version()) in text
    path.write_text(text.replace(old.format(version()), new))
    with pytest.raises(ReleaseError, match=rf"^{file}:\d+: 7\.7\.7, but pyproject.toml has {version()}$"):
        check(root=tree)


def test_a_release_is_cut_and_only_then_can_be_tagged(tree: Path) -> None:
    with pytest.raises(
        ReleaseError, match=r"Chart\.yaml: version is .*-dev\.\d+, but .*; cut the release before its tag"
    ):
        check(f"v{version()}", tree)
    assert {"CHANGELOG.md", "pyproject.toml", "helm/truespec/Chart.yaml"} <= set(cut("9.8.7", tree))
    assert check("v9.8.7", tree) == version(tree) == "9.8.7"
    assert notes("9.8.7", tree) == NEWS and notes("0.0.1", tree) == "- Old.\n"
    for tag in ("9.8.7", "v9.8.6", "v9.8.7-rc1"):
        with pytest.raises(ReleaseError, match=r"tagged v9\.8\.7"):
            check(tag, tree)
    with pytest.raises(ReleaseError, match=r"has a section of 9\.8\.7 already"):
        cut("9.8.7", tree)
    with pytest.raises(ReleaseError, match="nothing under"):
        cut("9.8.8", tree)
    with pytest.raises(ReleaseError, match="three numbers"):
        cut("9.9", tree)


def test_a_fault_is_one_line_without_a_traceback(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    monkeypatch.setattr(release.check, "__defaults__", (None, tree))
    said = CliRunner().invoke(main, ["check", "v0.0.0"])
    assert said.exit_code == 1 and said.output.startswith("Error: The tag is v0.0.0")


def test_headings_have_the_anchors_that_github_makes() -> None:
    assert github_slug("A `b` & C: d_e", "-") == "a-b--c-d_e"
