"""The reference of the configuration, from its models: docs/configuration.md, the schema that the chart takes over, the
table of vLLM's flags in docs/from-vllm.md, and that of tolerances in docs/watch.md.

python -m tools.reference [--check]
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.cli.vllm_flags import rows as rows_of_flags
from serve_app.config.app_config import AppConfig
from serve_app.config.serve_file import ServeFile
from serve_app.referee.judge.tolerance import Tolerance
from speculative.weight_formats import PRECISIONS
from tools.markdown import with_section

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "configuration.md"
FLAGS = DOCS / "from-vllm.md"
WATCH = DOCS / "watch.md"

_INTRO = """\
# Configuration

Made by `make generated` from the models in `serve_app/config/app_config.py`; do not edit it.

One YAML file, which is also a Ray Serve config. `truespec config check FILE` reports every fault with its field and the
fix, and whether this machine can serve it (`--file-only`: the file alone); `truespec config show FILE` prints all
settings, with this page's text as comments. Unknown fields are refused, and types are not guessed: `"4"` is no number.
The chart takes the same settings under `config`, all but `pools`.
"""

_ANY = 2**31 - 1


def json_schema(model: type[AppConfig] | type[ServeFile]) -> dict[str, Any]:
    """The model's JSON schema without titles; `$defs` has its sections by class name."""
    schema: dict[str, Any] = _without_titles(model.model_json_schema())
    return schema


def configuration_reference() -> str:
    """The reference as Markdown: a table a section, the file's own fields first."""
    schema = json_schema(ServeFile)
    definitions = schema.pop("$defs")
    parts = [_INTRO, "## The file\n", *_table(schema)]
    for paths, name in _sections(schema, definitions):
        section = definitions[name]
        parts += [f"## {', '.join(f'`{path}`' for path in paths)}\n", section["description"] + "\n"]
        parts += _table(section)
    return "\n".join(parts).rstrip() + "\n"


def _sections(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[tuple[list[str], str]]:
    """Each section below a schema, depth first: the paths of the fields that hold one of the class, and the class."""
    fields_of: dict[str, list[str]] = {}
    for field, value in schema["properties"].items():
        name, suffix = _class_of(value)
        if name:
            fields_of.setdefault(name, []).append(f"{prefix}{field}{suffix}")
    for name, paths in fields_of.items():
        yield paths, name
        yield from _sections(definitions[name], definitions, f"{paths[0]}.")


def _table(schema: dict[str, Any]) -> Iterator[str]:
    yield "| field | type | default | |\n|---|---|---|---|"
    for field, value in schema["properties"].items():
        needed = field in schema.get("required", ())
        default = "**required**" if needed else _default(value)
        yield f"| `{field}` | {_type(value)} | {default} | {' '.join(value['description'].split())} |"
    yield ""


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return "" if default is None or isinstance(default, dict | list) else f"`{_yaml(default)}`"


def _type(value: dict[str, Any]) -> str:
    name, suffix = _class_of(value)
    if name:
        return "list of sections" if suffix else "section"
    choices = [option for option in value.get("anyOf", [value]) if option.get("type") != "null"]
    return " or ".join(_plain_type(choice) for choice in choices)


def _plain_type(value: dict[str, Any]) -> str:
    if "const" in value:
        return f"`{_yaml(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{_yaml(choice)}`" for choice in value["enum"])
    kind = {"object": "map", "array": "list"}.get(value["type"], value["type"])
    if value.get("additionalProperties", {}) == {"type": "string"}:
        kind = "map of strings"
    return f"{kind} {bounds(value)}".strip()


def bounds(value: Mapping[str, Any]) -> str:
    """The bounds of a number, but those that only say how large numbers may be at all."""
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    shown = {sign: f"{value[key]:g}" for key, sign in signs if abs(value.get(key, _ANY)) < _ANY}
    if shown.keys() == {"≥", "≤"}:
        return f"{shown['≥']} to {shown['≤']}"
    return ", ".join(f"{sign} {limit}" for sign, limit in shown.items())


def _class_of(value: dict[str, Any]) -> tuple[str, str]:
    """The section's class that a field holds, and `[]` where it holds a list of them; empty for a plain value."""
    for option in value.get("anyOf", [value]):
        if "$ref" in option:
            return option["$ref"].rsplit("/", 1)[1], ""
        if "$ref" in option.get("items", ()):
            return option["items"]["$ref"].rsplit("/", 1)[1], "[]"
    return "", ""


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_titles(node: Any, *, names: bool = False) -> Any:
    """The schema without pydantic's titles; `names` says that the keys are fields or classes, not keywords."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, names=not names and key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title"
    }


def flags_page() -> str:
    """The page for those who come from vLLM, with the table of its flags."""
    rows = [f"| `{flags.replace(' ', '`, `')}` | {here} |" for flags, here in rows_of_flags().items()]
    table = "\n".join(["| `vllm serve` | here |", "|---|---|", *rows])
    return with_section(FLAGS.read_text(encoding="utf-8"), "reference", "vLLM's flags", table)


def watch_page() -> str:
    """The page on the watch, with the table of what rounding may do, by precision."""
    rows = [
        "| the coarser precision of the two | a logit may move by, nats | TME at most | log odds may shift by, nats, on"
        " average | a term's mean may shift by | one logprob in a thousand may be off by more than, nats |",
        "|---|---|---|---|---|---|",
    ]
    for name in PRECISIONS:
        pair = Tolerance.between_equals(name), Tolerance.against_float32(name)
        cells = [
            ", ".join(f"{figure:g}" for figure in dict.fromkeys(getattr(one, field) for one in pair))
            for field in ("edge_nats", "max_tme", "shift_nats", "distribution", "jump_nats")
        ]
        others = ", and quantizations that are not known" if name == PRECISIONS[-1] else ""
        rows.append(f"| {name}{others} | {' | '.join(cells)} |")
    return with_section(WATCH.read_text(encoding="utf-8"), "reference", "tolerances", "\n".join(rows))


def main() -> int:
    """Write the pages; with `--check` only say which is out of date."""
    old = []
    for page, text in ((PAGE, configuration_reference()), (FLAGS, flags_page()), (WATCH, watch_page())):
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            old.append(page)
            sys.stderr.write(f"{page} is out of date; run `python -m tools.reference`.\n")
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
