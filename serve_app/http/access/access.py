"""Permissions by a file of keys, by the one token of `/admin`, or, where neither is set, for anybody."""

import enum
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.config.files import why_unread
from serve_app.errors import AccessDenied, Forbidden
from speculative.errors import ConfigError


class Scope(enum.StrEnum):
    """The routes that a key opens."""

    USER = "user"  # /v1 and the figures of the status page
    ADMIN = "admin"  # /admin


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and what they may use."""

    id: str  # of the key, never the key; empty for who sent none
    scopes: frozenset[Scope]
    max_concurrent: int | None = None  # HTTP requests at once, on each replica; None = as many as the server takes


ANYBODY = Caller("", frozenset({Scope.USER}))


@dataclass(frozen=True, slots=True)
class Access:
    """Decides by the `Authorization` header."""

    # finds who has a key, if anybody; None = who sends no key may use what needs the scope `user`
    keys: Callable[[str], Caller | None] | None = None
    admin_token: str | None = field(default=None, repr=False)  # opens `/admin` beside the keys of that scope

    @property
    def is_open(self) -> bool:
        """Return whether `/v1` needs no key."""
        return self.keys is None

    @property
    def has_admin(self) -> bool:
        """Return whether there is a way to be let into `/admin`."""
        return self.keys is not None or self.admin_token is not None

    def require(self, scope: Scope | None, authorization: str | None) -> Caller:
        """Let pass who may.

        Args:
            scope: what is needed; None = any key that is known.
            authorization: the header.

        Raises:
            AccessDenied: nothing was sent that opens anything.
            Forbidden: what was sent is known, and does not open this.
        """
        caller = self._identify(authorization)
        if caller is None or (caller is ANYBODY and scope is Scope.ADMIN):
            raise AccessDenied("This needs a valid key: send it as 'Authorization: Bearer KEY'.")
        if scope is not None and scope not in caller.scopes:
            raise Forbidden(f"This needs a key with the scope {scope.value}; the key {caller.id} does not have it.")
        return caller

    def _identify(self, authorization: str | None) -> Caller | None:
        scheme, _, sent = (authorization or "").partition(" ")
        key = sent.strip() if scheme.lower() == "bearer" else ""
        opens = frozenset({Scope.ADMIN, Scope.USER} if self.is_open else {Scope.ADMIN})
        sent_bytes = key.encode("utf-8", "surrogateescape")
        if self.admin_token is not None and secrets.compare_digest(sent_bytes, self.admin_token.encode()):
            return Caller("admin.token_file", opens)
        if self.keys is None:
            return ANYBODY
        return self.keys(key) if key else None


def read_token(path: Path) -> str:
    """The token of `/admin`, from a file such as a mounted secret. Raises ConfigError: there is no such file, or
    nothing in it."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"admin.token_file {path} cannot be read: {why_unread(error)}.") from error
    if not token:
        raise ConfigError(f"admin.token_file {path} is empty; put a token into it.")
    return token
