"""Upload the dashboards to a Grafana server: folder and pages by uid, as often as one likes.

What is already there and identical is skipped. A page that is saved by others between our read and our write is not
overwritten unless requested: Grafana compares the version that was read (412).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from grafana_api.grafana_api import GrafanaException
from grafana_api.grafana_face import GrafanaFace

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
    grafana.check()
    changes: list[Change] = []

    def reported(what: str, action: Action) -> None:
        changes.append(Change(what, action))
        progress(changes[-1])

    reported(f"folder {FOLDER_TITLE}", _push_folder(grafana, dry_run))
    for dashboard in dashboards:
        reported(dashboard["title"], _push_dashboard(grafana, dashboard, dry_run=dry_run, overwrite=overwrite))
    return changes


def _push_folder(grafana: "_Grafana", dry_run: bool) -> Action:
    there = grafana.folder(FOLDER_UID)
    if there is not None and there["title"] == FOLDER_TITLE:
        return "unchanged"
    if not dry_run:
        grafana.save_folder(there)
    return "created" if there is None else "updated"


def _push_dashboard(grafana: "_Grafana", dashboard: dict[str, Any], *, dry_run: bool, overwrite: bool) -> Action:
    there = grafana.dashboard(dashboard["uid"])
    if there is not None and there["meta"].get("folderUid") == FOLDER_UID and _holds(there["dashboard"], dashboard):
        return "unchanged"
    if not dry_run:
        version = 0 if there is None else there["dashboard"]["version"]
        grafana.save_dashboard(dashboard | {"id": None, "version": version}, overwrite)
    return "created" if there is None else "updated"


def _holds(there: Any, ours: Any) -> bool:
    """Return whether `there` has all that is in `ours`; a server adds fields of its own, but no elements to a list."""
    if isinstance(ours, dict) and isinstance(there, dict):
        return all(key in there and _holds(there[key], value) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(there, list):
        return len(ours) == len(there) and all(map(_holds, there, ours))
    return bool(there == ours)


class _Grafana:
    """The few calls that are needed, over grafana-api, with errors that say what to do."""

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise PushError(f"{server.url!r} is not the URL of a server; give http(s)://HOST[:PORT][/PATH].")
        if parts.username or parts.password:
            raise PushError("The URL holds a password; give a service account's token instead (GRAFANA_TOKEN).")
        if not server.token or not server.token.isascii() or any(letter.isspace() for letter in server.token):
            raise PushError(
                "The token is empty or holds spaces or line breaks; give a service account's token as it is."
            )
        prefix = parts.path.strip("/")
        self._url = server.url.rstrip("/")
        self._face = GrafanaFace(
            server.token,
            host=parts.netloc,
            url_path_prefix=f"{prefix}/" if prefix else "",
            protocol=parts.scheme,
            timeout=TIMEOUT_S,
        )

    def check(self) -> None:
        """Fail unless a Grafana answers there."""
        with self._reported("looking for Grafana"):
            if self._or_none(lambda: self._face.api.GET("/health")) is None:
                raise PushError(f"There is no Grafana at {self._url} (404). Is the path right?")

    def folder(self, uid: str) -> dict[str, Any] | None:
        """The folder, or None."""
        with self._reported(f"reading the folder {uid}"):
            return self._or_none(lambda: self._face.folder.get_folder(uid))

    def save_folder(self, there: dict[str, Any] | None) -> None:
        """Create our folder, or give it our title."""
        with self._reported(f"writing the folder {FOLDER_TITLE}"):
            if there is None:
                self._face.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID)
            else:
                self._face.folder.update_folder(FOLDER_UID, FOLDER_TITLE, version=there.get("version"))

    def dashboard(self, uid: str) -> dict[str, Any] | None:
        """The dashboard with its meta data, or None."""
        with self._reported(f"reading the dashboard {uid}"):
            return self._or_none(lambda: self._face.dashboard.get_dashboard(uid))

    def save_dashboard(self, dashboard: dict[str, Any], overwrite: bool) -> None:
        """Create or update; `dashboard["version"]` is the one that was read."""
        body = {"dashboard": dashboard, "folderUid": FOLDER_UID, "overwrite": overwrite, "message": "truespec push"}
        with self._reported(f"writing {dashboard['title']}"):
            self._face.dashboard.update_dashboard(body)

    @staticmethod
    def _or_none(ask: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            answer = ask()
        except GrafanaException as error:
            if error.status_code == 404:
                return None
            raise
        if not isinstance(answer, dict):
            raise TypeError("Grafana answers with objects.")
        return answer

    @contextmanager
    def _reported(self, doing: str) -> Iterator[None]:
        try:
            yield
        except GrafanaException as error:
            raise PushError(f"While {doing}: {_explained(error, self._url)}") from error
        except (ValueError, TypeError) as error:  # the body is no JSON, or not Grafana's
            raise PushError(f"While {doing}: {self._url} answers not as Grafana does. Is the path right?") from error
        except OSError as error:  # requests' errors are
            raise PushError(f"While {doing}: {self._url} cannot be reached ({type(error).__name__}).") from error


def _explained(error: GrafanaException, url: str) -> str:
    response = error.response if isinstance(error.response, dict) else {}
    said = str(response.get("message") or "no reason given")
    match error.status_code:
        case 401:
            return "Grafana does not know the token (401). Make a service account's token, and set GRAFANA_TOKEN."
        case 403:
            return f"the token may not do that (403: {said}). Give its service account the role Editor."
        case 404:
            return f"Grafana says that it is not there (404: {said}). Was the folder deleted meanwhile? Push again."
        case 409 | 412:
            fix = _CONFLICTS.get(str(response.get("status")), "see what is there under this uid or title.")
            return f"conflict ({error.status_code}: {said}): {fix}"
        case status:
            return f"{url} answered {status}: {said}."
