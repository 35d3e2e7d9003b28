"""Upload the dashboards to a Grafana server: folder and pages by uid, as often as one likes.

What is already there and identical is skipped. A page that is saved by others between our read and our write is not
overwritten unless requested: Grafana compares the version that was read (412).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

FOLDER_UID = "truespec"
FOLDER_TITLE = "truespec"
TIMEOUT_S = 20.0

_CONFLICTS = {
    "version-mismatch": "somebody saved it meanwhile. Push again, or with --overwrite to replace whatever is there.",
    "name-exists": "another dashboard of the folder has its title. Rename or delete that one.",
    "plugin-dashboard": "it belongs to a plugin there. Remove it from the plugin first.",
}

Action = Literal["created", "updated", "unchanged"]


class PushError(Exception):
    """The dashboards could not be uploaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of Grafana, and the token of a service account that may edit there (never printed)."""

    url: str  # may have a path: https://host/grafana
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a folder or a dashboard that was made, or would be."""

    what: str
    action: Action


def push(
    server: Server,
    dashboards: list[dict[str, Any]],
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Callable[[Change], None] = lambda change: None,
) -> list[Change]:
    """Bring a server's dashboards up to date.

    Args:
        server: where they go.
        dashboards: Grafana JSON with uid and title.
        dry_run: only look; nothing is written.
        overwrite: replace a page also when it was saved meanwhile.
        progress: called with each change as it is made.

    Raises:
        PushError: the server cannot be reached, refuses the token, or has something else in the place.
    """
    grafana = _Grafana(server)
    changes: list[Change] = []

    def bring(what: str, there: bool, is_current: bool, method: str, path: str, body: dict[str, Any]) -> None:
        action: Action = "unchanged" if is_current else "updated" if there else "created"
        if not is_current and not dry_run:
            grafana.call(method, path, f"writing {what}", body)
        changes.append(Change(what, action))
        progress(changes[-1])

    with grafana.client:
        if grafana.call("GET", "health", "reading /health") is None:
            raise PushError(f"There is no Grafana at {server.url} (404). Is the path right?")
        own = f"folders/{FOLDER_UID}"
        folder = grafana.call("GET", own, f"reading {FOLDER_UID}")
        renamed = {"title": FOLDER_TITLE, "version": (folder or {}).get("version")}
        way = (
            ("POST", "folders", {"title": FOLDER_TITLE, "uid": FOLDER_UID}) if folder is None else ("PUT", own, renamed)
        )
        is_current = folder is not None and folder["title"] == FOLDER_TITLE
        bring(f"folder {FOLDER_TITLE}", folder is not None, is_current, *way)
        for dashboard in dashboards:
            there = grafana.call("GET", f"dashboards/uid/{dashboard['uid']}", f"reading {dashboard['uid']}")
            body = {
                "dashboard": dashboard | {"id": None, "version": there["dashboard"]["version"] if there else 0},
                "folderUid": FOLDER_UID,
                "overwrite": overwrite,
                "message": "truespec push",
            }
            in_place = there is not None and there["meta"].get("folderUid") == FOLDER_UID
            is_current = in_place and there is not None and _holds(there["dashboard"], dashboard)
            bring(dashboard["title"], there is not None, is_current, "POST", "dashboards/db", body)
    return changes


def _holds(there: Any, ours: Any) -> bool:
    """Return whether `there` has all that is in `ours`; a server adds fields of its own, but no elements to a list."""
    if isinstance(ours, dict) and isinstance(there, dict):
        return all(key in there and _holds(there[key], value) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(there, list):
        return len(ours) == len(there) and all(map(_holds, there, ours))
    return bool(there == ours)


class _Grafana:
    """A server's HTTP API."""

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise PushError(f"{server.url!r} is not the URL of a server; give http(s)://HOST[:PORT][/PATH].")
        if parts.username or parts.password:
            raise PushError("The URL holds a password; give a service account's token instead (GRAFANA_TOKEN).")
        if not server.token or not server.token.isascii() or any(letter.isspace() for letter in server.token):
            raise PushError("The token is empty or has spaces or line breaks; give a service account's token as it is.")
        self._url = server.url
        self.client = httpx.Client(
            base_url=f"{server.url.rstrip('/')}/api/",
            headers={"authorization": f"Bearer {server.token}"},
            timeout=TIMEOUT_S,
            follow_redirects=True,
        )

    def call(self, method: str, path: str, doing: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return what Grafana answers; None where nothing is there to be read. Raises PushError."""
        try:
            response = self.client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise PushError(f"While {doing}: {self._url} cannot be reached ({type(error).__name__}).") from error
        if method == "GET" and response.status_code == 404:
            return None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_error:
            raise PushError(f"While {doing}: {self._explained(response.status_code, answer)}")
        if not isinstance(answer, dict):
            raise PushError(f"While {doing}: {self._url} does not answer as Grafana does. Is the path right?")
        return answer

    def _explained(self, status: int, answer: Any) -> str:
        answer = answer if isinstance(answer, dict) else {}
        said = str(answer.get("message") or "no reason given")
        match status:
            case 401:
                return "Grafana does not know the token (401). Make a service account's token, and set GRAFANA_TOKEN."
            case 403:
                return f"the token may not do that (403: {said}). Give its service account the role Editor."
            case 404:
                return f"Grafana says that it is not there (404: {said}). Was the folder deleted meanwhile? Push again."
            case 409 | 412:
                fix = _CONFLICTS.get(str(answer.get("status")), "see what is there under this uid or title.")
                return f"conflict ({status}: {said}): {fix}"
        return f"{self._url} answered {status}: {said}."
