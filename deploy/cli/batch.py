"""`truespec batch`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from deploy.cli.application import ServeTarget, application_of
from deploy.cli.console import Failure, a_config, a_file, concurrency_option, err, key_option, say
from deploy.cli.serving import at_port, served
from deploy.options import FiniteRange, api_key, server_url
from deploy.run.own_model import OwnModel
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError


@click.command()
@click.argument("requests", type=a_file)
@click.argument("answers", type=a_file)
@click.option("--url", help="Ask this running server; the URL may end in /v1 or not.")
@click.option("--model", "source", help="Start an engine for this batch: this model, on a GPU if there is one.")
@click.option("--config", "file", type=a_config, help="Start an engine for this batch: this configuration's.")
@concurrency_option
@click.option("--retries", type=click.IntRange(min=0), default=8, help="Retries of a request.")
@click.option("--timeout", type=FiniteRange(min=1), default=600, help="Seconds for one try.")
@click.option("--verify", is_flag=True, help="Have every answer replayed; its verdict is written with it.")
@key_option
def batch(
    requests: Path, answers: Path, url: str | None, source: str | None, file: Path | None, **options: Any
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    The files are JSONL. The same command continues an interrupted run. Exits with 1 when a request has no answer, or an
    answer is suspect.
    """
    from deploy.jobs.batch import BatchOptions, run_batch
    from deploy.jobs.batch_files import REFUSED, BatchOutput, read_requests
    from deploy.reports.progress import View

    if [url, source, file].count(None) != 2:
        raise click.UsageError("Give exactly one of --url, for a running server, and --model or --config.")
    if url is not None:
        server_url(url, "--url")
    key, wanted = api_key(options.pop("api_key_file")), read_requests(requests)
    models = {str(request.body["model"]) for request in wanted.values() if "model" in request.body}
    own = None
    if url is None:
        own = application_of(ServeTarget(file if file is not None else OwnModel(source or "")))
        if others := models - {name := own.application.args.model.served_name}:
            raise ConfigError(f"The requests ask for {', '.join(map(repr, others))}; this engine serves {name!r} only.")
    with BatchOutput.opened(answers, wanted) as output:
        before = len(output.outcomes)
        if before < len(wanted):
            with _asked(url, own) as server, View(err) as view:
                run_batch(wanted, output, BatchOptions(url=server, api_key=key, **options), view)
        counts = Counter(output.outcomes.values())
    found = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    say(f"{counts.total()} of {len(wanted)} requests done, {before} of them before: {found or 'nothing'}")
    if missing := len(wanted) - counts.total():
        raise Failure(f"{missing} requests have no answer; the same command sends them again.")
    if refused := counts[REFUSED]:
        raise Failure(f"{refused} requests were refused; their lines say why. Without these lines they are sent again.")
    if suspect := counts["suspect"]:
        raise Failure(f"{suspect} answers are suspect: their replay did not confirm them. Do not use these.")


@contextmanager
def _asked(url: str | None, own: ServeFile | None) -> Iterator[str]:
    """The URL of the server that a batch asks: as given, or of one that runs until the block ends."""
    from deploy.run.cluster import cluster_address
    from deploy.run.ports import free_port

    if own is None:
        yield str(url)
        return
    if cluster_address(None) is None:  # a server that runs on this machine is not in the way
        own = at_port(own, free_port(own.http_options))
    with served(own, None) as service:
        yield service.base_url
