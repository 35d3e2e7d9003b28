"""`truespec batch`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from deploy.cli.application import application_of
from deploy.cli.console import Failure, a_config, a_file, concurrency_option, err, key_option, say
from deploy.cli.serving import served
from deploy.options import FiniteRange, api_key, check_writable, server_url, write_json
from deploy.run.own_model import OwnModel


@click.command()
@click.argument("requests", type=a_file)
@click.argument("answers", type=a_file)
@click.option("--url", help="Ask this running server; the URL may end in /v1 or not.")
@click.option("--model", "source", help="Start an engine for this batch: this model, on a GPU if there is one.")
@click.option(
    "--config",
    "file",
    type=a_config,
    help="Start an engine for this batch: the application of this configuration.",
)
@click.option("--address", help="With --model or --config: run on this Ray cluster, not on one started here.")
@concurrency_option
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Retry each request up to this many times.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=1),
    default=600,
    show_default=True,
    help="Give up on a request after this many seconds.",
)
@click.option("--verify", is_flag=True, help="Have every answer replayed; its verdict is written with it.")
@click.option("--retry-failed", is_flag=True, help="Ask again the requests whose lines hold no answer.")
@key_option
@click.option("--json", "json_file", type=a_file, help="Write the figures to this file.")
def batch(requests: Path, answers: Path, json_file: Path | None, **options: Any) -> None:
    """Answer a file of requests in OpenAI's batch format (JSONL); an interrupted run continues where it stopped.

    Exits with 1 when a request has no answer, or an answer is suspect.
    """
    from deploy.jobs.batch import BatchOptions, complaint, run_batch, summary
    from deploy.jobs.batch_files import BatchInput, BatchOutput
    from deploy.reports.progress import View

    check_writable(json_file, "--json")
    server = {name: options.pop(name) for name in ("url", "source", "file", "address")}
    if server["url"] is not None:
        server_url(server["url"], "--url")
    read, key = BatchInput(requests), api_key(options.pop("api_key_file"))
    with BatchOutput.opened(answers, read.custom_ids, retry_failed=options.pop("retry_failed")) as output:
        models = read.models if len(output.done) < len(read) else None
        with _batch_server(**server, models=models) as url, View(err) as view:
            figures = run_batch(read, output, BatchOptions(url=url, api_key=key, **options), view)
    for line in summary(figures):
        say(line)
    write_json(json_file, figures)
    if (fault := complaint(figures)) is not None:
        raise Failure(fault)


@contextmanager
def _batch_server(
    url: str | None, source: str | None, file: Path | None, address: str | None, models: set[str] | None
) -> Iterator[str]:
    """Return where a batch that asks for these models is answered: a server that runs, or one that runs until the block
    ends.

    `models` is None where nothing is left to answer; then nothing is started.
    """
    from deploy.jobs.batch_engine import batch_application

    if [url, source, file].count(None) != 2:
        raise click.UsageError(
            "Set exactly one of --url, for a running server, and --model or --config, for an engine here."
        )
    if url is not None or models is None:
        yield url or ""
        return
    configured = application_of(file, None if source is None else OwnModel(source))
    application = batch_application(configured, models, on_a_cluster=bool(address or os.environ.get("RAY_ADDRESS")))
    with served(application, address, alone=True) as service:
        yield service.base_url
