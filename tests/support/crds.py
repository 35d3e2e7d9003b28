"""JSON schemas of custom resources: from the CRDs in the folder TRUESPEC_CRDS, and a strict part of our own.

The part in custom_resources.yaml knows only what the chart writes; pods within are checked as core objects in any case.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

OURS = Path(__file__).parent / "custom_resources.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # these files are long
INT_OR_STRING = {"type": ["integer", "string"]}


def folder() -> Path | None:
    """Where real CRDs lie."""
    place = os.environ.get("TRUESPEC_CRDS")
    return Path(place) if place else None


@functools.cache
def real_schemas() -> dict[str, Any]:
    """A closed schema for each kind of the real CRDs; empty where there are none."""
    place = folder()
    return dict(_schemas(place)) if place else {}


def our_schemas() -> dict[str, Any]:
    """The small schemas of our own."""
    return yaml.safe_load(OURS.read_text(encoding="utf-8"))


def errors(schema: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is wrong with an object, one line each."""
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(found)]


def _schemas(place: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(place.glob("*.yaml")):
        for crd in yaml.load_all(path.read_text(encoding="utf-8"), Loader=LOADER):
            names = {version["name"]: version for version in crd["spec"]["versions"]}
            served = names.get("v1") or next(iter(names.values()))
            schema = _closed(served["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            yield crd["spec"]["names"]["kind"], schema


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON schema: closed where Kubernetes prunes, null and int-or-string as there."""
    if node.get("x-kubernetes-int-or-string"):
        return dict(INT_OR_STRING)
    kept = {key: value for key, value in node.items() if not key.startswith("x-") and key not in ("nullable", "format")}
    for key in ("anyOf", "oneOf", "allOf"):
        if key in kept:
            kept[key] = [_closed(part) for part in kept[key]]
    if "items" in kept:
        kept["items"] = _closed(kept["items"])
    if isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = _closed(kept["additionalProperties"])
    if "properties" in kept:
        kept["properties"] = {name: _closed(part) for name, part in kept["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    if node.get("nullable"):
        kept["type"] = [kept["type"], "null"]
    return kept
