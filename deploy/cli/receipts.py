"""`truespec verify`: whether receipts follow from the weights and seeds that they name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from deploy.cli.console import err, say
from deploy.reports.progress import View
from deploy.run.models import find_model
from speculative.errors import ConfigError, TruespecError

_WRONG, _UNCHECKED = 1, 2


@click.command()
@click.argument("receipt", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--model", required=True, help="The weights: a folder, a catalogue name, or a hub id.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "transformers"]),
    default="torch",
    show_default=True,
    help="What computes the logits again: this engine, or transformers in float32, which shares no model code with it. "
    "The sampling rules applied to them and the random numbers are this engine's in both.",
)
@click.option("--public-key", type=click.Path(path_type=Path), help="The PEM file of the key that must have signed.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON, one a line.")
@click.pass_context
def verify(ctx: click.Context, receipt: Path, model: str, engine: Any, public_key: Path | None, as_json: bool) -> None:
    """Compute an answer again from its receipt, and make its draws again.

    RECEIPT is a file with a receipt, or with a reply that has `receipts`; - reads standard input. The exit status is 0
    where every answer follows from its seed and the weights, 1 where one does not, 2 where that cannot be checked.
    """
    wrong = False
    try:
        for verdict in _verdicts(receipt, model, engine, public_key):
            say(json.dumps(verdict.to_wire()) if as_json else verdict.in_words())
            wrong |= bool(verdict.reason)
    except TruespecError as error:
        say(f"This cannot be checked: {error}", err)
        ctx.exit(_UNCHECKED)
    ctx.exit(_WRONG if wrong else 0)


def _verdicts(receipt: Path, model: str, engine: Any, public_key: Path | None) -> Iterator[Any]:
    """On each receipt as soon as it is checked."""
    from deploy.run.verify import verify as check
    from serve_app.referee.receipts import read_receipts
    from serve_app.referee.signatures import PublicKey

    try:
        with click.open_file(str(receipt), encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{receipt} cannot be read: {error}.") from error
    receipts = read_receipts(text)
    key = None if public_key is None else PublicKey.from_file(public_key)
    with View(err) as view:
        folder = find_model(model, view)
        for number, one in enumerate(receipts, start=1):
            view.stage(f"computing receipt {number} of {len(receipts)} again, {len(one.token_ids)} tokens")
            yield check(one, folder, engine, key)
