"""Kubernetes' own schemas of its objects, closed to fields that it does not know."""

import functools
import re
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

# The oldest and the newest that the chart is for, and one between them.
VERSIONS = ("1.29.0", "1.33.0", "1.37.0")


def check(objects: Sequence[dict[str, Any]], versions: Sequence[str] = VERSIONS) -> None:
    """Fail with all that is wrong with objects, by object, version and field. Raises FileNotFoundError: a version has
    no such kind."""
    faults = [
        f"{found['kind']} {found['metadata']['name']} in Kubernetes {version}: {fault.json_path}: {fault.message}"
        for version in versions
        for found in objects
        for fault in _validator(found["kind"], found["apiVersion"], version).iter_errors(found)
    ]
    assert not faults, "\n".join(faults)


def pod(template: dict[str, Any], name: str) -> dict[str, Any]:
    """A pod as it is made of a template."""
    return {**template, "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template.get("metadata", {})}}


def assert_restricted(pod: dict[str, Any]) -> None:
    """Fail unless a pod meets the restricted security standard, has limits, and mounts each of its volumes."""
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> Draft202012Validator:
    """Validator of a kind. kubernetes-validate builds one for each object, and reads 2 MB of definitions for it."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{_folder(version)}/{kind.lower()}-{group}.json", version)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    contents = schema_contents(f"{_folder(version)}/_definitions.json", version)
    return (Resource.from_contents(contents) @ Registry()).crawl()


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}-local-strict"
