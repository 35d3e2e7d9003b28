"""A fake Grafana for tests: the folder and dashboard endpoints of its HTTP API, with its status codes and versions."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_http import QuietHandler, serving

TOKEN = "glsa_a-secret-that-nobody-may-see"
PREFIX = "/grafana"


class Refused(Exception):
    """An answer other than 200: status code, message, and Grafana's own word for it."""


@dataclass
class FakeGrafana:
    """What the server keeps. `before_write` runs before each write, as another user would."""

    url: str = ""
    role: str = "Editor"
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)  # uid -> {"dashboard", "folder"}
    calls: list[str] = field(default_factory=list)
    before_write: Callable[[], None] = lambda: None
    body_of_everything: str | None = None

    @property
    def writes(self) -> list[str]:
        return [call for call in self.calls if not call.startswith("GET")]

    def answer(self, method: str, path: str, token: str, body: Any) -> Any:
        self.calls.append(f"{method} {path}")
        if path == "/health":
            return {"database": "ok", "version": "13.2.3"}
        if token != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid API key")
        if method != "GET":
            if self.role != "Editor":
                raise Refused(403, "You'll need additional permissions to perform this action.")
            self.before_write()
        match method, path.strip("/").split("/"):
            case "GET" | "PUT", ["folders", uid]:
                folder = self._get(self.folders, uid, "folder not found")
                if method == "PUT":
                    if body.get("version") != folder["version"]:
                        raise Refused(412, "the folder has been changed by someone else", "version-mismatch")
                    folder |= {"title": body["title"], "version": folder["version"] + 1}
                return folder
            case "POST", ["folders"]:
                if any(folder["title"] == body["title"] for folder in self.folders.values()):
                    raise Refused(409, "a folder with that name already exists")
                return self.folders.setdefault(body["uid"], body | {"version": 1})
            case "GET", ["dashboards", "uid", uid]:
                entry = self._get(self.dashboards, uid, "Dashboard not found")
                meta = {"folderUid": entry["folder"], "version": entry["dashboard"]["version"]}
                return {"meta": meta, "dashboard": entry["dashboard"]}
            case "POST", ["dashboards", "db"]:
                return self.save(body)
        raise Refused(404, "Not found")

    @staticmethod
    def _get(kept: dict[str, Any], uid: str, message: str) -> Any:
        if uid not in kept:
            raise Refused(404, message)
        return kept[uid]

    def save(self, body: Any) -> Any:
        """POST /api/dashboards/db: the version must be the one that is kept, or `overwrite` be set."""
        new, uid = dict(body["dashboard"]), body["dashboard"]["uid"]
        folder, overwrite = body.get("folderUid", ""), body.get("overwrite", False)
        self._get(self.folders, folder, "folder not found")
        there = self.dashboards.get(uid)
        if there is not None and not overwrite and new.get("version") != there["dashboard"]["version"]:
            raise Refused(412, "The dashboard has been changed by someone else", "version-mismatch")
        others = [other for name, other in self.dashboards.items() if name != uid and other["folder"] == folder]
        if any(other["dashboard"]["title"] == new["title"] for other in others) and not overwrite:
            raise Refused(412, "A dashboard with the same name in the folder already exists", "name-exists")
        version = 1 if there is None else there["dashboard"]["version"] + 1
        # A server sets what is its own and fills in what was left out.
        own = {"id": len(self.dashboards) + 1, "version": version}
        self.dashboards[uid] = {"dashboard": {"preload": False} | new | own, "folder": folder}
        return {"status": "success", "uid": uid, "version": version}


@contextlib.contextmanager
def running_grafana() -> Iterator[FakeGrafana]:
    """A fake on a free port of this machine."""
    fake = FakeGrafana()

    class Handler(QuietHandler):
        def _serve(self) -> None:
            sent = self.sent()
            body = json.loads(sent) if sent else None
            root, token = f"{PREFIX}/api", self.headers.get("authorization", "")
            if fake.body_of_everything is not None:
                self.say(200, fake.body_of_everything.encode())
            elif not self.path.startswith(root):
                self.say(404, b"<html>404 page not found; leave a message</html>")
            else:
                try:
                    self.say(200, json.dumps(fake.answer(self.command, self.path[len(root) :], token, body)).encode())
                except Refused as refusal:
                    code, *said = refusal.args
                    self.say(code, json.dumps(dict(zip(("message", "status"), said, strict=False))).encode())

        do_GET = do_POST = do_PUT = _serve

    with serving(Handler) as url:
        fake.url = f"{url}{PREFIX}"
        yield fake
