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
    """Its URL, and how often each file was downloaded."""

    url: str = ""
    downloads: Counter[str] = field(default_factory=Counter)

    def environment(self, cache: Path) -> dict[str, str]:
        """Of a process that uses this hub, and keeps what it downloads there."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


@contextmanager
def fake_hub(repository: str, folder: Path) -> Iterator[FakeHub]:
    """Serve a folder as a repository (org/name) until the block ends."""
    hub, files = FakeHub(), {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path.startswith(f"/api/models/{repository}/tree/"):
                self._json([{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()])
            elif path.startswith(f"/api/models/{repository}"):
                self._json({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
            else:
                self._file(path)

        def do_HEAD(self) -> None:
            self._file(urlsplit(self.path).path)

        def _file(self, path: str) -> None:
            name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
            if name not in files:
                self.reply(404, b"{}", "application/json")
                return
            hub.downloads[name] += self.command == "GET"
            own = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": COMMIT}
            self.reply(200, files[name], "application/octet-stream", own)

        def _json(self, value: object) -> None:
            self.reply(200, json.dumps(value).encode(), "application/json")

        def reply(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, text in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, text)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with serving(Handler) as url:
        hub.url = url
        yield hub


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
