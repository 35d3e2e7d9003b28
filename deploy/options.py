"""Values of command lines, checked before any work is done: keys, addresses, numbers, and files to be written."""

import json
import math
import os
from pathlib import Path
from typing import Any

import click

from speculative.errors import ConfigError

_KEY_VARIABLE = "TRUESPEC_API_KEY"


class FiniteRange(click.FloatRange):
    """A range of numbers without nan and inf, which click's own lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, as click reads it."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def api_key(file: Path | None = None) -> str | None:
    """The key that requests carry: of the file, else of the environment; None if there is none. Raises ConfigError: it
    cannot be read, or no request can carry it."""
    if file is None:
        return checked_secret(os.environ.get(_KEY_VARIABLE, ""), _KEY_VARIABLE)
    return read_secret(file, "--api-key-file")


def read_secret(file: Path, option: str) -> str | None:
    """The key or token that a file holds; None where the file is empty. Raises ConfigError: it cannot be read, or no
    request can carry it."""
    from serve_app.config.files import why_unread  # numpy, pydantic: not on every machine that has a GPU

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file} cannot be read: {why_unread(error)}.") from error
    return checked_secret(text, f"{option} {file}")


def checked_secret(text: str, named: str) -> str | None:
    """A key or token without surrounding blanks; None if nothing is left. It is never shown. Raises ConfigError: no
    request can carry it in a header."""
    secret = text.strip()
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(f"{named} holds spaces, line breaks or letters beyond ASCII; give one key, as it was made.")
    return secret or None


def server_url(url: str, named: str) -> str:
    """The URL of a server, as it was given. Raises ConfigError: it is none."""
    import httpx  # not on every machine that has a GPU

    try:
        parts = httpx.URL(url)
        good = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 2**16
    except httpx.InvalidURL:
        good = False
    if not good:
        raise ConfigError(f"{named} {url!r} is not the URL of a server; give http(s)://HOST[:PORT][/PATH].")
    return url


def check_writable(path: Path | None, option: str) -> None:
    """Make sure that a file can be written, before the work whose result it is to hold; None is no file. Raises
    ConfigError: it cannot."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        if is_new or path.is_file():  # a pipe's reader would take closing this for the end of the data
            path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}.") from error


def write_json(path: Path | None, figures: object, indent: int = 2) -> None:
    """Write figures to a file; None = nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=indent) + "\n", encoding="utf-8")
