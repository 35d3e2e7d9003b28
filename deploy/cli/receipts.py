"""`truespec verify`: whether receipts follow from the weights and seeds that they name."""

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from deploy.cli.console import err, say
from deploy.reports.progress import View
from deploy.run.models import find_model
from speculative.errors import ConfigError, TruespecError
from speculative.weight_formats import PRECISIONS

_WRONG, _UNCHECKED = 1, 2


@click.command()
@click.argument("receipt", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--model", required=True, help="The weights: a folder, a catalogue name, or a hub id.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "transformers"]),
    default="torch",
    help="Compute the logits with truespec's engine, or with transformers in float32, which shares no model code with "
    "it. Sampling rules and random numbers are truespec's with either.",
)
@click.option("--public-key", type=click.Path(path_type=Path), help="The PEM file of the key that must have signed.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="The coarsest that the service may have computed in.  [default: bfloat16, or that of a rounded checkpoint]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON, one a line.")
@click.pass_context
def verify(ctx: click.Context, /, receipt: Path, model: str, as_json: bool, **options: Any) -> None:
    """Compute an answer again from its receipt.

    RECEIPT is a file with a receipt, or with a reply that has `receipts`; - reads standard input. Exits with 1 when an
    answer does not follow from its seed and the weights, and otherwise with 2 when one cannot be checked, or decided.
    """
    try:
        status = asyncio.run(_check(receipt, model, as_json, **options))
    except TruespecError as error:
        say(f"This cannot be checked: {error}", err)
        status = _UNCHECKED
    ctx.exit(status)


async def _check(
    path: Path, model: str, as_json: bool, engine: Any, public_key: Path | None, precision: str | None
) -> int:
    """Check every receipt of a file; the exit status."""
    from deploy.run.replied import replied_in
    from deploy.run.verify import Verifier
    from serve_app.config.files import why_unread
    from serve_app.referee.records.receipts import NotAReceipt, Receipt, read_receipt, receipts_in
    from serve_app.referee.records.signatures import PublicKey

    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {why_unread(error)}.") from error
    contents, reply = receipts_in(text)
    receipts: list[Any] = []  # each, or why it is none
    for content in contents:
        try:
            receipts.append(read_receipt(content))
        except NotAReceipt as error:
            receipts.append(error)
    replied = replied_in(reply, receipts)
    readable = [one for one in receipts if isinstance(one, Receipt)]
    key = None if public_key is None else PublicKey.from_file(public_key)
    if not readable:
        raise receipts[0]
    with View(err) as view:
        folder = find_model(model, view)
        longest = max(one.num_tokens for one in readable)
        async with Verifier(folder, engine, longest, key, precision or "") as verifier:
            found = []
            for number, (one, own) in enumerate(zip(receipts, replied, strict=True), start=1):
                which = f"receipt {number} of {len(receipts)}"
                if isinstance(one, Receipt):
                    view.stage(f"computing {which} again, {len(one.token_ids)} tokens")
                if not as_json and len(receipts) > 1:
                    say(f"{which.capitalize()}:")
                found.append(await _check_one(verifier, one, own, which, as_json))
    return _WRONG if _WRONG in found else max(found)


async def _check_one(verifier: Any, receipt: Any, replied: Any, which: str, as_json: bool) -> int:
    """Check a receipt, or say why it is none; the exit status, were it the only one."""
    try:
        if isinstance(receipt, TruespecError):
            raise receipt
        verdict = await verifier.check(receipt, replied)
        found = json.dumps(verdict.to_wire()) if as_json else verdict.in_words()
    except Exception as error:  # whatever one receipt does to the check, the others are checked
        reason = str(error) if isinstance(error, TruespecError) else f"the check failed with {error!r}."
        say(f"{which.capitalize()} cannot be checked: {reason}", err)
        if as_json:
            say(json.dumps({"id": getattr(receipt, "id", None), "verified": None, "reason": reason}))
        return _UNCHECKED
    say(found)
    return _WRONG if verdict.reason else _UNCHECKED if verdict.open else 0
