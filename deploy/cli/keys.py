"""`truespec keys`: make, show and revoke API keys."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from rich.table import Table

from deploy.cli.console import MainGroup, a_file, err, out
from deploy.options import FiniteRange
from serve_app.http.access.access import Scope
from serve_app.http.access.keys import create_key, read_keys, revoke_key

_FILE = click.option("--file", type=a_file, required=True, help="The file of keys, as in access.keys_file.")


@click.group(cls=MainGroup)
def keys() -> None:
    """Make, list and revoke API keys of a service.

    They are a file of ids, hashes and scopes (access.keys_file).
    """


@keys.command("create")
@_FILE
@click.option("--id", "key_id", required=True, help="The key's public name; `list` and error messages show it.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    default=[Scope.USER.value],
    help="user opens /v1 and the status page's figures, admin opens /admin; give it twice for both.",
)
@click.option(
    "--expires-days",
    type=FiniteRange(0, 36500, min_open=True),
    help="Days until the key expires; the default is never.",
)
@click.option("--max-concurrent", type=click.IntRange(min=1), help="Limit of concurrent requests, on each replica.")
def keys_create(
    file: Path, key_id: str, scopes: tuple[str, ...], expires_days: float | None, max_concurrent: int | None
) -> None:
    """Add a key to the file, and print it, once.

    The file is created if it is missing.
    """
    expires = None
    if expires_days is not None:
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=expires_days)
    made = create_key(file, key_id, [Scope(scope) for scope in scopes], expires, max_concurrent)
    err.print(f"{file}: added the key {key_id}, which is shown this once:", markup=False, soft_wrap=True)
    out.print(made, markup=False, soft_wrap=True)


@keys.command("list")
@_FILE
def keys_list(file: Path) -> None:
    """Show ids, scopes and expiry of the keys.

    The file does not hold the keys themselves.
    """
    table = Table("id", "scopes", "created", "expires", "requests at once")
    for key in read_keys(file).keys:
        expiry = "never" if key.expires is None else _day(key.expires)
        if key.expires is not None and key.expires <= datetime.now(UTC):
            expiry += " (expired)"
        table.add_row(key.id, ", ".join(key.scopes), _day(key.created), expiry, str(key.max_concurrent or ""))
    out.print(table)


@keys.command("revoke")
@_FILE
@click.argument("key_id")
def keys_revoke(file: Path, key_id: str) -> None:
    """Remove a key; replicas refuse it within a second."""
    revoke_key(file, key_id)
    out.print(f"{file}: the key {key_id} was revoked", markup=False, soft_wrap=True)


def _day(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).date().isoformat()
