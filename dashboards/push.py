"""Upload the dashboards to a Grafana server: folder and pages by uid, as often as one likes.

What is already there and identical is skipped. A page that is saved by others between our read and our write is not
overwritten unless requested: Grafana compares the version that was read (412).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
    parts = urlsplit(server.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise PushError(f"{server.url!r} is not the URL of a server; give http(s)://HOST[:PORT][/PATH].")
    if parts.username or parts.password:
        raise PushError("The URL holds a password; give a service account's token instead (GRAFANA_TOKEN).")
    if not server.token or not server.token.isascii() or any(letter.isspace() for letter in server.token):
        raise PushError("The token is empty or holds spaces or line breaks; give a service account's token as it is.")
    prefix = parts.path.strip("/")
    face = GrafanaFace(
        server.token,
        host=parts.netloc,
        url_path_prefix=f"{prefix}/" if prefix else "",
        protocol=parts.scheme,
        timeout=TIMEOUT_S,
    )
    changes: list[Change] = []

    def bring(what: str, there: dict[str, Any] | None, is_ours: bool, save: Callable[[], Any]) -> None:
        if there is not None and is_ours:
            action: Action = "unchanged"
        else:
            action = "created" if there is None else "updated"
            if not dry_run:
                with _reported(f"writing {what}", server.url):
                    save()
        changes.append(Change(what, action))
        progress(changes[-1])

    if _read(face.api.GET, "/health", server.url) is None:
        raise PushError(f"There is no Grafana at {server.url} (404). Is the path right?")
    folder = _read(face.folder.get_folder, FOLDER_UID, server.url)

    def save_folder() -> None:
        if folder is None:
            face.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID)
        else:
            face.folder.update_folder(FOLDER_UID, FOLDER_TITLE, version=folder.get("version"))

    bring(f"folder {FOLDER_TITLE}", folder, folder is not None and folder["title"] == FOLDER_TITLE, save_folder)
    for dashboard in dashboards:
        there = _read(face.dashboard.get_dashboard, dashboard["uid"], server.url)
        is_ours = there is not None and there["meta"].get("folderUid") == FOLDER_UID
        version = 0 if there is None else there["dashboard"]["version"]
        body = {
            "dashboard": dashboard | {"id": None, "version": version},
            "folderUid": FOLDER_UID,
            "overwrite": overwrite,
            "message": "truespec push",
        }
        is_current = there is not None and is_ours and _holds(there["dashboard"], dashboard)
        bring(dashboard["title"], there, is_current, partial(face.dashboard.update_dashboard, body))
    return changes


def _holds(there: Any, ours: Any) -> bool:
    """Return whether `there` has all that is in `ours`; a server adds fields of its own, but no elements to a list."""
    if isinstance(ours, dict) and isinstance(there, dict):
        return all(key in there and _holds(there[key], value) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(there, list):
        return len(ours) == len(there) and all(map(_holds, there, ours))
    return bool(there == ours)


def _read(ask: Callable[[str], Any], name: str, url: str) -> dict[str, Any] | None:
    """Return what Grafana has under that name, or None."""
    with _reported(f"reading {name}", url):
        try:
            answer = ask(name)
        except GrafanaException as error:
            if error.status_code == 404:
                return None
            raise
        if not isinstance(answer, dict):
            raise TypeError("Grafana answers with objects.")
        return answer


@contextmanager
def _reported(doing: str, url: str) -> Iterator[None]:
    try:
        yield
    except GrafanaException as error:
        raise PushError(f"While {doing}: {_explained(error, url)}") from error
    except (ValueError, TypeError) as error:  # the body is no JSON, or not Grafana's
        raise PushError(f"While {doing}: {url} answers not as Grafana does. Is the path right?") from error
    except OSError as error:  # requests' errors are
        raise PushError(f"While {doing}: {url} cannot be reached ({type(error).__name__}).") from error


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
