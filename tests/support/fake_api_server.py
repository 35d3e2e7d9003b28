"""A stand-in for the Kubernetes API server, as much as Helm asks of one: discovery, and objects that are kept.

It validates nothing, runs no controller and merges patches by JSON merge patch; what it knows beyond that is that a
claim's storage class and access modes do not change and that its size does not shrink. Claims are bound, or stay
pending, as `claim_phase` says; a Job has ended as soon as it is made, as `run_job` says.
"""

import base64
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.fake_http import QuietHandler, serving

Object = dict[str, Any]

KINDS = {
    "v1": {
        "secrets": "Secret", "configmaps": "ConfigMap", "persistentvolumeclaims": "PersistentVolumeClaim",
        "serviceaccounts": "ServiceAccount", "pods": "Pod", "events": "Event",
    },
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "ray.io/v1": {"rayservices": "RayService"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"},
}  # fmt: skip


@dataclass
class FakeApiServer:
    """What the server holds, and how it behaves."""

    objects: dict[str, Object] = field(default_factory=dict)  # path -> object
    claim_phase: str = "Bound"
    run_job: Callable[[Object], bool] = lambda job: True  # returns whether the Job succeeded
    version: int = 0
    refusals: int = 0  # how many changes of RayServices it still refuses

    def named(self, resource: str, name: str) -> Object | None:
        """The object of a resource, whatever its namespace."""
        return next((found for path, found in self.objects.items() if path.endswith(f"/{resource}/{name}")), None)

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Object]:
        """Status and body of one request."""
        found = _discovery(path)
        if found is not None:
            return 200, found
        if method == "GET":
            return self._get(path, query)
        if method == "DELETE":
            gone = self.objects.pop(path, None)
            return (200, gone) if gone else _refusal(404, path)
        if "/rayservices" in path and self.refusals > 0:
            self.refusals -= 1
            return _refusal(422, path)
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            return _refusal(409, path) if path in self.objects else (201, self._keep(path, body))
        if path not in self.objects:
            return _refusal(404, path)
        old = self.objects[path]
        new = body if method == "PUT" else _merged(old, body)
        if old["kind"] == "PersistentVolumeClaim":
            fixed, size = _claimed(old)
            if fixed != _claimed(new)[0] or _claimed(new)[1] < size:
                return _refusal(422, path)
        return 200, self._keep(path, new)

    def _get(self, path: str, query: dict[str, list[str]]) -> tuple[int, Object]:
        if path in self.objects:
            return 200, self.objects[path]
        resource = path.rsplit("/", 1)[-1]
        names = next((names for names in KINDS.values() if resource in names), None)
        if names is None:
            return _refusal(404, path)
        wanted = [pair.split("=", 1) for part in query.get("labelSelector", ()) for pair in part.split(",")]
        items = [
            found
            for place, found in self.objects.items()
            if place.startswith(f"{path}/")
            and all(found["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        return 200, {"kind": f"{names[resource]}List", "apiVersion": "v1", "metadata": {}, "items": items}

    def _keep(self, path: str, found: Object) -> Object:
        self.version += 1
        uid = self.objects.get(path, {}).get("metadata", {}).get("uid", str(self.version))
        found["metadata"] |= {"resourceVersion": str(self.version), "uid": uid}
        if found["kind"] == "PersistentVolumeClaim":
            found["status"] = {"phase": self.claim_phase}
        if found["kind"] == "Job":
            condition = "Complete" if self.run_job(found) else "Failed"
            found["status"] = {"conditions": [{"type": condition, "status": "True", "reason": "BackoffLimitExceeded"}]}
        self.objects[path] = found
        return found


def _discovery(path: str) -> Object | None:
    """Lists of groups and kinds, in the old form that every client still reads."""
    if path == _OPENAPI:
        return {}
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for name, number in (version.split("/") for version in KINDS if "/" in version):
            only = {"groupVersion": f"{name}/{number}", "version": number}
            groups.append({"name": name, "versions": [only], "preferredVersion": only})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    names = KINDS.get(path.removeprefix("/apis/").removeprefix("/api/"))
    if names is None:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    kinds = [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for name, kind in names.items()
    ]
    version = path.removeprefix("/apis/").removeprefix("/api/")
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": kinds}


def _merged(old: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396); the directives of a strategic one are left out."""
    if not isinstance(patch, dict):
        return patch
    made = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _merged(made.get(key), value)
    return made


def _claimed(claim: Object) -> tuple[list[Any], int]:
    """The fields of a claim that never change, and its size in gibibytes."""
    spec = claim["spec"]
    size = int(spec["resources"]["requests"]["storage"].removesuffix("Gi"))
    return [spec.get(key) for key in ("accessModes", "storageClassName")], size


_OPENAPI = "/openapi/v2"  # against which Helm validates hooks; in protobuf, where nothing is a document without schemas


# Helm writes its releases as secrets in protobuf; answers may be JSON.
_PROTOBUF = b"k8s\0"


def _secret(sent: bytes) -> Object:
    """A Secret of Kubernetes' protobuf form: an envelope (2: the object) around metadata, data and type (1 to 3)."""
    (raw,) = _fields(sent.removeprefix(_PROTOBUF))[2]
    secret = _fields(raw)
    (metadata,) = map(_fields, secret[1])
    texts = {"name": 1, "namespace": 3, "uid": 5, "resourceVersion": 6}
    entries = {key.decode(): base64.b64encode(value).decode() for key, value in _pairs(secret.get(2, ()))}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {key: metadata[number][0].decode() for key, number in texts.items() if number in metadata}
        | {"labels": {key.decode(): value.decode() for key, value in _pairs(metadata.get(11, ()))}},
        "data": entries,
        "type": secret[3][0].decode(),
    }


def _pairs(entries: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a protobuf map."""
    for entry in map(_fields, entries):
        yield entry[1][0], entry.get(2, [b""])[0]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Number -> values of a protobuf message's fields that have a length; numbers are left out."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key, value = varint(), varint()
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(message[at : at + value])
            at += value
    return found


def _refusal(code: int, path: str) -> tuple[int, Object]:
    reason = {404: "NotFound", 409: "AlreadyExists", 422: "Invalid"}[code]
    return code, {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": f"{path}: {reason}", "reason": reason,
        "code": code,
    }  # fmt: skip


@contextlib.contextmanager
def running_api_server(folder: Path) -> Iterator[tuple[FakeApiServer, Path]]:
    """The server and a kubeconfig in `folder` that leads to it."""
    fake = FakeApiServer()

    class Handler(QuietHandler):
        def _answer(self) -> None:
            url = urlsplit(self.path)
            sent = self.sent()
            if self.command == "DELETE":
                sent = b""  # how to delete
            body = _secret(sent) if sent.startswith(_PROTOBUF) else json.loads(sent or b"{}")
            code, found = fake.answer(self.command, url.path, parse_qs(url.query), body)
            text = b"" if url.path == _OPENAPI else json.dumps(found).encode()
            self.say(code, text, {"content-type": "application/json"})

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    with serving(Handler) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")
        yield fake, folder / "kubeconfig"
