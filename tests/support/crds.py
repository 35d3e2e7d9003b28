"""JSON schemas of custom resources: a strict part of the CRDs, which knows only what we write.

Pods within are checked as core objects in any case.
"""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SCHEMAS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text(encoding="utf-8"))


def errors(found: dict[str, Any]) -> list[str]:
    """What is wrong with an object, one line each."""
    validator = Draft7Validator(SCHEMAS[found["kind"]])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]
