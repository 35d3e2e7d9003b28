"""`truespec model`: models that need no hub."""

import click

from deploy.cli.console import MainGroup, progress_printer, say
from speculative.model.catalogue import CATALOGUE, fetch_model


@click.group(cls=MainGroup)
def model() -> None:
    """Fetch models of the catalogue, which need no hub."""


@model.command("list")
def model_list() -> None:
    """Show the catalogue."""
    for name, entry in CATALOGUE.items():
        say(f"{name:<16} {entry.served_name} ({entry.licence}, {entry.quantization} weights)")


@model.command("get")
@click.argument("name")
def model_get(name: str) -> None:
    """Fetch a catalogue model into the cache and print its folder."""
    say(str(fetch_model(name, progress=progress_printer())))
