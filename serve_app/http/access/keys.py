"""API keys: a file of ids, hashes and scopes. Only their owners have the keys themselves.

A key has 256 random bits, so it cannot be brute-forced from its SHA-256. A salt and a slow hash, which low-entropy
passwords need, would only slow down every request here, and let wrong keys keep the server busy.
"""

import asyncio
import hashlib
import logging
import os
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

from serve_app.config.base import AtLeastOne
from serve_app.config.files import read_file
from serve_app.http.access.access import Caller, Scope
from speculative.errors import ConfigError

_logger = logging.getLogger("truespec.access")

_LOOK_EVERY_S = 1.0
_MADE_BY = "# Made by `truespec keys`; it holds hashes, not keys.\n"

_ID = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_Time = Annotated[AwareDatetime, Field(strict=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Key(_Part):
    """One key, as the file has it."""

    id: Annotated[str, Field(pattern=f"^{_ID}$")]  # public
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of the key's UTF-8
    scopes: Annotated[list[Annotated[Scope, Field(strict=False)]], Field(min_length=1)]
    created: _Time | None = None
    expires: _Time | None = None
    max_concurrent: AtLeastOne | None = None  # HTTP requests at once, on each replica


class KeyFile(_Part):
    """The whole file."""

    version: Literal[1] = 1
    keys: list[Key] = []

    @field_validator("keys")
    @classmethod
    def _no_two_alike(cls, keys: list[Key]) -> list[Key]:
        for what, values in (("id", [key.id for key in keys]), ("sha256", [key.sha256 for key in keys])):
            twice, count = Counter(values).most_common(1)[0] if values else ("", 0)
            if count > 1:
                raise ValueError(f"the {what} {twice} occurs twice; remove one.")
        return keys


def digest_of(key: str) -> str:
    """A key's digest, as the file stores it: SHA-256, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> KeyFile:
    """Read a file of keys. Raises ConfigError: it cannot be read, or is wrong; the message names file, field and
    fix."""
    return read_file(path, KeyFile)


def create_key(
    path: Path,
    key_id: str,
    scopes: list[Scope],
    expires: datetime | None = None,
    max_concurrent: int | None = None,
    secret: str | None = None,
) -> str:
    """Add a key to the file, creating it if needed, and return the key. It can never be shown again; without `secret`
    it is made here. Raises ConfigError: the file is wrong, or has a key of that id."""
    known = read_keys(path) if path.exists() else KeyFile()
    if not re.fullmatch(_ID, key_id):
        raise ConfigError(f"{key_id!r} is not an id: use up to 64 letters, digits, '.', '_' and '-', no sign first.")
    if any(key.id == key_id for key in known.keys):
        raise ConfigError(f"{path}: the key {key_id} already exists; choose another id, or revoke it first.")
    secret = secret or f"sk-{secrets.token_urlsafe(32)}"  # 256 bits
    made = Key(
        id=key_id,
        sha256=digest_of(secret),
        scopes=scopes,
        created=datetime.now(UTC).replace(microsecond=0),
        expires=expires,
        max_concurrent=max_concurrent,
    )
    _write(path, KeyFile(keys=[*known.keys, made]))
    return secret


def revoke_key(path: Path, key_id: str) -> None:
    """Remove a key from the file. Raises ConfigError: the file is wrong, or has no key of that id."""
    known = read_keys(path)
    kept = [key for key in known.keys if key.id != key_id]
    if len(kept) == len(known.keys):
        raise ConfigError(f"{path}: there is no key {key_id}; `truespec keys list` shows them.")
    _write(path, KeyFile(keys=kept))


def _write(path: Path, file: KeyFile) -> None:
    """Replace the file atomically: readers see the old one or the new one. Only its owner may read it. Raises
    ConfigError: it cannot be written."""
    data = {"version": file.version, "keys": file.model_dump(mode="json", exclude_defaults=True).get("keys", [])}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as out:
            out.write(_MADE_BY + yaml.safe_dump(data, sort_keys=False))
        os.replace(out.name, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


@dataclass(slots=True)
class KeyStore:
    """The keys of a file, which is read again when it has changed, if somebody looks or watches.

    A changed file that is invalid, or missing, changes nothing: the known keys stay valid, the log says why, and
    `reloaded` is called.

    Raises:
        ConfigError: the file cannot be read, or is wrong, at the start.
    """

    path: Path  # of the file
    reloaded: Callable[[bool], None] = lambda _: None  # after each attempt to read a changed file: whether it succeeded
    _: KW_ONLY
    now: Callable[[], float] = time.time  # unix seconds, for expiry
    _seen: tuple[int, int, int] | None = field(init=False)
    _keys: list[tuple[bytes, float, Caller]] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._signature()
        self._keys = _ready(read_keys(self.path))

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> Caller | None:
        """The owner of this key; None if it is unknown or expired. Takes the same time for any key."""
        digest = digest_of(key).encode()
        found: Caller | None = None
        for expected, expires_at, caller in self._keys:
            if secrets.compare_digest(expected, digest) and self.now() < expires_at:
                found = caller
        return found

    async def watch(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed."""
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = _ready(read_keys(self.path))
        except ConfigError as error:
            _logger.error("keeping the previous keys, because the changed file is invalid: %s", error)
            self.reloaded(False)
        else:
            _logger.info("reloaded %s: %d keys", self.path, len(self._keys))
            self.reloaded(True)

    def _signature(self) -> tuple[int, int, int] | None:
        """Identifies a version of the file; None if there is no file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _ready(file: KeyFile) -> list[tuple[bytes, float, Caller]]:
    """Digest, expiry (unix seconds) and caller of each key."""
    return [
        (
            key.sha256.encode(),
            key.expires.timestamp() if key.expires is not None else float("inf"),
            Caller(key.id, frozenset(key.scopes), key.max_concurrent),
        )
        for key in file.keys
    ]
