"""The arguments of commands about one application."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from deploy.cli.console import a_config
from deploy.run.own_model import OwnModel, own_application
from serve_app.config.files import load_config
from serve_app.config.serve_file import ServeFile


def application_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of a command about one application: FILE, or a model of one's own and where it is to run.

    The command gets them as `file` and `own`, of which one is None.
    """

    @functools.wraps(command)
    def with_application(file: Path | None, source: str | None, **others: Any) -> Any:
        placed = {name: others.pop(name) for name in ("name", "gpus", "drafter", "engine")}
        if file is not None and source is not None:
            raise click.UsageError(f"{file} names its own model; give it or --model, not both.")
        if file is None and source is None:
            raise click.UsageError("Give a configuration file, or --model with a folder or a hub id.")
        given = [f"--{name}" for name, value in placed.items() if value is not None]
        if source is None and given:
            raise click.UsageError(f"{given[0]} goes with --model; {file} has a setting for it.")
        own = None if source is None else OwnModel(source, **{n: v for n, v in placed.items() if v is not None})
        return command(file=file, own=own, **others)

    options = (
        click.argument("file", type=a_config, required=False),
        click.option("--model", "source", help="Instead of FILE: serve this model; a folder, or a hub id (ORG/MODEL)."),
        click.option("--name", help="With --model: the name that clients ask for.  [default: the model's last part]"),
        click.option(
            "--gpus",
            type=click.IntRange(min=0),
            help="With --model: GPUs to use, a replica on each, or with vLLM one over all of them.  [default: 1, or 0 "
            "where this machine has none]",
        ),
        click.option(
            "--drafter", help="With --model: KIND, or KIND:FOLDER of a drafter with weights.  [default: ngram]"
        ),
        click.option(
            "--engine",
            type=click.Choice(["torch", "vllm"]),
            help="With --model: truespec's own engine, or vLLM for models that it does not run.  [default: torch]",
        ),
    )
    for option in reversed(options):
        with_application = option(with_application)
    return with_application


def application_of(file: Path | None, own: OwnModel | None) -> ServeFile:
    """The checked application of a file or of a model, as `application_options` gives them.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    if own is not None:
        return own_application(own)
    assert file is not None
    return load_config(file)
