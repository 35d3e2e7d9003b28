"""Who may do what. Today one bearer token opens `/admin`; keys with scopes can take its place behind `Access`."""

import enum
import secrets
from pathlib import Path
from typing import Protocol

from serve_app.errors import AccessDenied
from speculative.errors import ConfigError


class Scope(enum.StrEnum):
    """What a route asks for."""

    ADMIN = "admin"


class Access(Protocol):
    """Decides by the `Authorization` header."""

    def require(self, scope: Scope, authorization: str | None) -> None:
        """Let pass who may.

        Raises:
            AccessDenied: who asks is nobody known, or may not.
        """
        ...


class TokenAccess:
    """One token, for every scope."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    @classmethod
    def from_file(cls, path: Path) -> "TokenAccess":
        """Read the token from a file, such as a mounted secret.

        Raises:
            ConfigError: there is no such file, or nothing in it.
        """
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"admin.token_file {path} cannot be read: {error}.") from error
        if not token:
            raise ConfigError(f"admin.token_file {path} is empty; put a token into it.")
        return cls(token)

    def require(self, scope: Scope, authorization: str | None) -> None:
        """Let pass who sent the token."""
        if not secrets.compare_digest((authorization or "").encode(), self._expected):
            raise AccessDenied(f"This needs the {scope.value} token: send it as 'Authorization: Bearer TOKEN'.")
