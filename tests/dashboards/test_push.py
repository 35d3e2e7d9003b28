"""Pushing to a server that behaves like Grafana: existing objects stay, conflicts are reported, no token is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dashboards.build import dashboards
from dashboards.push import FOLDER_UID, PushError, Server, push
from deploy.cli.main import main
from tests.support.fake_grafana import TOKEN, FakeGrafana, running_grafana

PAGES = dashboards()


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with running_grafana() as fake:
        yield fake


def pushed(grafana: FakeGrafana, **options: Any) -> dict[str, str]:
    """What was done, by what it was done to."""
    return {change.what: change.action for change in push(Server(grafana.url, TOKEN), PAGES, **options)}


def command(grafana: FakeGrafana, *args: str, token: str = TOKEN) -> Result:
    env = {"GRAFANA_TOKEN": token, "GRAFANA_URL": grafana.url}
    return CliRunner().invoke(main, ["dashboards", "push", *args], env=env)


def edit(grafana: FakeGrafana, uid: str, **changes: Any) -> None:
    """Save a dashboard as a user of the server does."""
    there = grafana.dashboards[uid]["dashboard"]
    grafana.save({"dashboard": there | changes, "folderUid": FOLDER_UID})


def test_everything_is_created_in_our_folder_once(grafana: FakeGrafana) -> None:
    assert set(pushed(grafana).values()) == {"created"}
    assert {entry["folder"] for entry in grafana.dashboards.values()} == {FOLDER_UID}
    found = {uid: entry["dashboard"]["panels"] for uid, entry in grafana.dashboards.items()}
    assert found == {page["uid"]: page["panels"] for page in PAGES}
    grafana.calls.clear()
    assert set(pushed(grafana).values()) == {"unchanged"}
    assert grafana.writes == []


def test_what_was_edited_there_is_replaced_and_only_that(grafana: FakeGrafana) -> None:
    pushed(grafana)
    edit(grafana, "truespec-latency", panels=[])
    grafana.folders["elsewhere"] = {"uid": "elsewhere", "title": "Elsewhere", "version": 1}
    grafana.dashboards["truespec-overview"]["folder"] = "elsewhere"
    grafana.folders[FOLDER_UID] |= {"title": "Mine", "version": 7}
    changes = pushed(grafana)
    updated = {what for what, action in changes.items() if action == "updated"}
    assert updated == {"folder truespec", "truespec / Overview", "truespec / Latency"}
    assert grafana.folders[FOLDER_UID]["title"] == "truespec"
    assert grafana.dashboards["truespec-overview"]["folder"] == FOLDER_UID
    entry = grafana.dashboards["truespec-latency"]["dashboard"]
    assert entry["version"] == 3
    assert entry["panels"] == next(page["panels"] for page in PAGES if page["uid"] == "truespec-latency")


def test_a_dry_run_reports_and_writes_nothing(grafana: FakeGrafana) -> None:
    result = command(grafana, "--dry-run")
    assert result.exit_code == 0
    assert result.output.count("would be created: ") == 1 + len(PAGES)
    assert grafana.writes == []
    assert not grafana.folders


def test_a_save_between_reading_and_writing_is_not_overwritten_unless_asked(grafana: FakeGrafana) -> None:
    pushed(grafana)
    uid = "truespec-overview"
    edit(grafana, uid, title="Edited")

    def another_user() -> None:
        grafana.before_write = lambda: None
        edit(grafana, uid, title="Edited again")

    grafana.before_write = another_user
    with pytest.raises(PushError, match=r"412.*somebody saved it meanwhile.*--overwrite"):
        pushed(grafana)
    assert grafana.dashboards[uid]["dashboard"]["title"] == "Edited again"
    grafana.before_write = another_user
    assert pushed(grafana, overwrite=True)["truespec / Overview"] == "updated"
    assert grafana.dashboards[uid]["dashboard"]["title"] == "truespec / Overview"


def test_a_namesake_of_a_page_or_of_the_folder_is_reported(grafana: FakeGrafana) -> None:
    pushed(grafana)
    grafana.dashboards["other"] = grafana.dashboards.pop("truespec-latency")
    with pytest.raises(PushError, match=r"truespec / Latency.*412.*has its title"):
        pushed(grafana)
    grafana.folders = {"theirs": {"uid": "theirs", "title": "truespec", "version": 1}}
    with pytest.raises(PushError, match=r"folder truespec.*409.*that name already exists"):
        pushed(grafana)


def test_a_token_that_is_wrong_missing_or_may_only_read_is_reported_and_not_shown(grafana: FakeGrafana) -> None:
    wrong = "glsa_wrong-but-still-secret"
    result = command(grafana, token=wrong)
    assert result.exit_code == 1
    assert "401" in result.output and "service account" in result.output
    assert wrong not in result.output + repr(Server(grafana.url, wrong))
    result = command(grafana, token="")
    assert result.exit_code == 1 and "GRAFANA_TOKEN" in result.output
    grafana.role = "Viewer"
    with pytest.raises(PushError, match=r"403.*role Editor"):
        pushed(grafana)


def test_the_token_may_come_from_a_file(grafana: FakeGrafana, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    result = command(grafana, "--token-file", str(tmp_path / "token"), token="")
    assert result.exit_code == 0, result.output
    assert TOKEN not in result.output
    assert len(grafana.dashboards) == len(PAGES)


@pytest.mark.parametrize(
    ("url", "token", "reported"),
    [
        ("127.0.0.1:3000", TOKEN, "not the URL of a server"),
        ("ftp://host/", TOKEN, "not the URL of a server"),
        ("http://admin:pass@host", TOKEN, "holds a password"),
        ("http://127.0.0.1:1", TOKEN, "cannot be reached"),
        ("http://127.0.0.1:1", "two words", "The token is empty or holds"),
        ("http://127.0.0.1:1", "line\nbreak", "The token is empty or holds"),
        ("http://127.0.0.1:1", "ünicode", "The token is empty or holds"),
    ],
)
def test_what_can_be_no_url_or_token_of_a_server_is_reported(url: str, token: str, reported: str) -> None:
    with pytest.raises(PushError, match=reported) as caught:
        push(Server(url, token), PAGES)
    assert "pass@" not in str(caught.value)


def test_a_wrong_path_or_something_else_that_answers_is_reported(grafana: FakeGrafana) -> None:
    for path in ("", "/grafana/login"):
        with pytest.raises(PushError, match="Is the path right"):
            push(Server(grafana.url.removesuffix("/grafana") + path, TOKEN), PAGES)
    for body in ("<html>Please log in</html>", "[]"):
        grafana.body_of_everything = body
        with pytest.raises(PushError, match="answers not as Grafana does"):
            pushed(grafana)
