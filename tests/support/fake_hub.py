"""A Hugging Face hub with one repository, on this machine: as much of it as a download takes."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.fake_http import QuietHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Its URL, its one repository, and how often each file of it was downloaded."""

    repository: str
    files: dict[str, bytes]
    url: str = ""
    downloads: Counter[str] = field(default_factory=Counter)

    def environment(self, cache: Path) -> dict[str, str]:
        """Of a process that uses this hub, and keeps what it downloads there."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


@contextmanager
def fake_hub(repository: str, folder: Path) -> Iterator[FakeHub]:
    """Serve a folder as a repository (org/name) until the block ends."""
    files = (path for path in folder.rglob("*") if path.is_file())
    hub = FakeHub(repository, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    with serving(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


class _Handler(QuietHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        if path.startswith(f"/api/models/{hub.repository}/tree/"):
            entries = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in hub.files.items()]
            self.say(200, json.dumps(entries).encode())
        elif path.startswith(f"/api/models/{hub.repository}"):
            self.say(200, json.dumps({"id": hub.repository, "sha": COMMIT, "siblings": []}).encode())
        else:
            self._file(path)

    def do_HEAD(self) -> None:
        self._file(urlsplit(self.path).path)

    def _file(self, path: str) -> None:
        name = path.removeprefix(f"/{self.hub.repository}/resolve/{COMMIT}/")
        if name not in self.hub.files:
            self.say(404, b"{}")
            return
        content = self.hub.files[name]
        self.hub.downloads[name] += self.command == "GET"
        self.say(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT})


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
