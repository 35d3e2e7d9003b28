"""Keys in a file: made, known, expired, revoked, and read again; and the command that does it."""

import asyncio
import json
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from deploy.cli.main import main
from serve_app.errors import AccessDenied, Forbidden
from serve_app.http.access import keys
from serve_app.http.access.access import ANYBODY, Access, Scope
from serve_app.http.access.keys import KeyFile, KeyStore, create_key, digest_of, read_keys, revoke_key
from speculative.errors import ConfigError


def file_with(path: Path, **keys: dict[str, Any]) -> Path:
    """A file of keys by id; `key` is the key itself."""
    entries = [
        {"id": name, "sha256": digest_of(fields.pop("key", name)), "scopes": ["user"], **fields}
        for name, fields in keys.items()
    ]
    path.write_text(yaml.safe_dump({"version": 1, "keys": entries}))
    return path


def touch(path: Path, seconds: float) -> None:
    """Set the time of a file's last change, which two writes within one tick of its clock would share."""
    os.utime(path, (seconds, seconds))


def test_a_key_is_made_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "keys.yaml"
    expires = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    key = create_key(path, "alice", [Scope.USER], expires, max_concurrent=2)
    other = create_key(path, "ops", [Scope.USER, Scope.ADMIN])
    assert key != other and len(key) >= 43 and key.startswith("sk-")
    assert key not in path.read_text() and other not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0, "nobody else reads it"
    store = KeyStore(path)
    alice, ops = store.find(key), store.find(other)
    assert alice is not None and ops is not None
    assert (alice.id, alice.scopes, alice.max_concurrent) == ("alice", {Scope.USER}, 2)
    assert (ops.id, ops.scopes, ops.max_concurrent) == ("ops", {Scope.USER, Scope.ADMIN}, None)
    for wrong in ("", key[:-1], key + "x", key.upper(), digest_of(key), "alice", "\udcff"):
        assert store.find(wrong) is None
    assert [one.name for one in path.parent.iterdir()] == ["keys.yaml"], "no other file is left"


def test_a_key_expires(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    moment = datetime.fromtimestamp(now, UTC)
    path = file_with(
        tmp_path / "keys.yaml",
        early={"expires": moment - timedelta(seconds=1)},
        late={"expires": (moment + timedelta(seconds=1)).isoformat()},
    )
    store = KeyStore(path, now=lambda: now)
    assert store.find("early") is None
    assert store.find("late") is not None
    assert KeyStore(path, now=lambda: now + 1).find("late") is None
    path.write_text(json.dumps(yaml.safe_load(path.read_text()), default=str))
    assert KeyStore(path, now=lambda: now).find("late") is not None, "JSON will do"


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("keys: [", "is not YAML"),
        ("- a", "the file: must be a map (lines of `name: value`), got a list."),
        ("version: 2", "version: must be 1, got 2."),
        ("kyes: []", "kyes: Extra inputs are not permitted"),
        ("keys: [{id: a, scopes: [user]}]", "keys[0].sha256: is missing"),
        (f"keys: [{{id: a, sha256: {'0' * 63}, scopes: [user]}}]", "keys[0].sha256"),
        (f"keys: [{{id: 'a b', sha256: {'a' * 64}, scopes: [user]}}]", "keys[0].id"),
        (f"keys: [{{id: a, sha256: {'a' * 64}, scopes: []}}]", "keys[0].scopes"),
        (f"keys: [{{id: a, sha256: {'a' * 64}, scopes: [root]}}]", "keys[0].scopes[0]"),
        (f"keys: [{{id: a, sha256: {'a' * 64}, scopes: [user], expires: 2030-01-01T00:00:00}}]", "keys[0].expires"),
        (f"keys: [{{id: a, sha256: {'a' * 64}, scopes: [user], max_concurrent: 0}}]", "max_concurrent"),
        (f"keys: [{{id: a, sha256: {'a' * 64}, scopes: [user]}}, {{id: a, sha256: {'b' * 64}, scopes: [user]}}]",
         "the id a occurs twice"),
    ],
)  # fmt: skip
def test_a_wrong_file_stops_the_start_and_names_the_field(tmp_path: Path, text: str, reported: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyStore(path)
    assert str(path) in str(caught.value) and reported in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyStore(tmp_path / "missing.yaml")


async def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_LOOK_EVERY_S", 0.001)
    path, reported = file_with(tmp_path / "keys.yaml", alice={}, bob={}), list[bool]()
    touch(path, 1)
    store = KeyStore(path, reported.append)
    assert store.find("alice") and store.find("bob")
    file_with(path, bob={}, carol={})
    touch(path, 2)
    watching = asyncio.create_task(store.watch())
    await asyncio.sleep(0.1)
    watching.cancel()
    assert store.find("carol") and store.find("bob") and not store.find("alice")
    assert reported == [True], "what has not changed is not read again"


@pytest.mark.parametrize("broken", ["keys: [", "keys: [{id: a, expires: 2026-99-99}]", "version: !!int x", None])
def test_a_file_that_breaks_keeps_the_old_keys_and_says_so_once(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, reported = file_with(tmp_path / "keys.yaml", alice={}), list[bool]()
    touch(path, 1)
    store = KeyStore(path, reported.append)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    with caplog.at_level(logging.INFO, "truespec.access"):
        for _ in range(5):
            store.look()
            assert store.find("alice") is not None
    assert reported == [False]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and str(path) in record.getMessage()
    file_with(path, bob={})
    touch(path, 3)
    store.look()
    assert store.find("bob") and not store.find("alice")
    assert reported == [False, True]


def test_every_key_is_compared_whichever_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work does not depend on the key that is sent."""
    path = file_with(tmp_path / "keys.yaml", **{f"k{index}": {} for index in range(7)})
    store = KeyStore(path)
    compared: list[bytes] = []

    def compare(expected: bytes, sent: bytes) -> bool:
        compared.append(expected)
        return expected == sent

    monkeypatch.setattr("serve_app.http.access.keys.secrets.compare_digest", compare)
    for key in ("k0", "k6", "unknown"):
        compared.clear()
        store.find(key)
        assert len(compared) == 7


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = file_with(tmp_path / "keys.yaml", alice={})
    with pytest.raises(ConfigError, match="the key alice already exists"):
        create_key(path, "alice", [Scope.USER])
    with pytest.raises(ConfigError, match="is not an id"):
        create_key(path, "a\nb", [Scope.USER])
    with pytest.raises(ConfigError, match="there is no key bob"):
        revoke_key(path, "bob")
    revoke_key(path, "alice")
    assert read_keys(path) == KeyFile()
    with pytest.raises(ConfigError, match="cannot be written"):
        create_key(path / "below", "a", [Scope.USER])


# ---- access


def test_scopes_open_what_they_name(tmp_path: Path) -> None:
    path = file_with(tmp_path / "k.yaml", user={}, admin={"scopes": ["admin"]}, both={"scopes": ["user", "admin"]})
    access = Access(KeyStore(path).find, "token")
    assert not access.is_open and access.has_admin
    for key, scope in (("user", Scope.USER), ("admin", Scope.ADMIN), ("both", Scope.USER), ("both", Scope.ADMIN)):
        assert access.require(scope, f"Bearer {key}").id == key
        assert access.require(None, f"bearer  {key} ").id == key
        assert digest_of(key) not in repr(access.require(None, f"Bearer {key}"))
    for key, scope in (("user", Scope.ADMIN), ("admin", Scope.USER), ("token", Scope.USER)):
        with pytest.raises(Forbidden, match=scope.value):
            access.require(scope, f"Bearer {key}")
    assert access.require(Scope.ADMIN, "Bearer token").id == "admin.token_file"
    for sent in (None, "", "Bearer", "Bearer ", "user", "Basic user", "Bearer users", "Bearer user x"):
        for scope in (Scope.USER, Scope.ADMIN, None):
            with pytest.raises(AccessDenied):
                access.require(scope, sent)


def test_without_keys_everybody_is_a_user_and_nobody_an_admin() -> None:
    access = Access()
    assert access.is_open and not access.has_admin
    assert access.require(Scope.USER, None) is ANYBODY
    assert access.require(None, "Bearer whatever") is ANYBODY
    with pytest.raises(AccessDenied):
        access.require(Scope.ADMIN, "Bearer whatever")
    with_token = Access(admin_token="token")
    assert with_token.require(Scope.USER, None) is ANYBODY
    assert with_token.require(Scope.USER, "Bearer token").scopes == {Scope.USER, Scope.ADMIN}
    for sent in (None, "Bearer", "Bearer Token", "Bearer token2", "Bearer toke", "Bearer \xff"):
        with pytest.raises(AccessDenied):
            with_token.require(Scope.ADMIN, sent)


# ---- the command


def truespec(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments])


def test_the_command_makes_lists_and_revokes(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    file = ["--file", str(path)]
    made = truespec("create", *file, "--id", "alice", "--expires-days", "30", "--max-concurrent", "3")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    found = KeyStore(path).find(key)
    assert found is not None and found.max_concurrent == 3
    assert truespec("create", *file, "--id", "ops", "--scope", "user", "--scope", "admin").exit_code == 0
    listed = truespec("list", *file)
    assert listed.exit_code == 0
    assert "alice" in listed.output and "user, admin" in listed.output and "never" in listed.output
    assert key not in listed.output and digest_of(key) not in listed.output
    again = truespec("create", *file, "--id", "alice")
    assert again.exit_code == 1 and "already" in again.output
    assert truespec("revoke", *file, "alice").exit_code == 0
    assert KeyStore(path).find(key) is None
    assert truespec("list", "--file", str(tmp_path / "none.yaml")).exit_code == 1
