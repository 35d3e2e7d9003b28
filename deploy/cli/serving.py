"""`truespec serve` and `truespec demo`, and how a command gets a service of its own."""

import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from deploy.cli.application import ApplicationCommand, ServeTarget, application_options
from deploy.cli.console import CONFIGS, a_config, a_file, err, out, progress_printer, say
from deploy.options import api_key, check_writable, write_json
from serve_app.config.files import load_config
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError


@click.command(cls=ApplicationCommand)
@application_options
@click.option("--api-key", metavar="KEY", multiple=True, help="Ask clients for this key. Several: any of them.")
@click.option("--address", metavar="ADDRESS", help="Run on this Ray cluster: auto, or host:port.")
def serve(asked: ServeTarget, checked: ServeFile, address: str | None) -> None:
    """Serve a model until interrupted.

    MODEL is a folder, or a hub id (ORG/MODEL). FILE has settings, and those given here go before it. It may be the name
    of one that comes with truespec: demo, monolith, resilient, vllm, or own for a model of yours.
    """
    report = progress_printer()
    report(f"starting to serve {asked.named}")  # what is imported now takes seconds
    from deploy.run.cluster import cluster_address
    from deploy.run.demo import curl_line

    if "--api-key" in asked.changes and cluster_address(address) is not None:
        raise ConfigError(
            "--api-key makes a file on this machine, and replicas on a cluster read their own: set access.keys_file to "
            "a file of `truespec keys create` on every node."
        )
    with served(checked, address, report) as service:
        stop = threading.Event()

        def end(*_: object) -> None:
            """Stop at the first interrupt, which breaks off no line that is being printed; the next ones interrupt."""
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        say(f"Serving {service.model_name} at {service.base_url}. Try:\n  {curl_line(service)}", err)
        if checked.application.args.access.keys_file is not None:
            say("It asks for an API key: add -H 'authorization: Bearer KEY'.", err)
        else:
            say("Anyone who can reach this address may use it; --api-key KEY asks for a key.", err)
        if service.tokenizer is not None:
            say(service.tokenizer.ends(), err)
        say("Ctrl-C stops it; a second one does not wait for requests that run.", err)
        stop.wait()


@click.command()
@click.option("--json", "json_file", type=a_file, help="Write the figures to this file.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Listen on this port.")
@click.option("--config", "file", type=a_config, default="demo", help="Serve this configuration.")
def demo(json_file: Path | None, port: int, file: Path) -> None:
    """Serve a real model here, check its answers, and find a fault.

    The fault is put into the running service; then speed is measured. It takes 2 to 5 minutes, and its first run
    fetches a model of 93 MB.
    """
    check_writable(json_file, "--json")
    checked = at_port(load_config(file), port)
    from deploy.run.demo import BUSY_CORES, curl_line, run_demo

    report = progress_printer()
    report("the demo takes 2 to 5 minutes; its first run also fetches a model of 93 MB")
    token, rehearses = secrets.token_hex(16), checked.application.args.guard.rehearsal
    with tempfile.NamedTemporaryFile("w", prefix="truespec-token-") as file_of_token:
        print(token, file=file_of_token, flush=True)
        args = checked.application.args
        admin = args.admin.model_copy(update={"token_file": file_of_token.name})
        with served(checked.with_args(args.model_copy(update={"admin": admin})), None, report) as service:
            print_text = partial(out.print, end="", markup=False, highlight=False, soft_wrap=True)
            figures = run_demo(service, report, print_text, token if rehearses else None)
            curl = curl_line(service)
    speeds = Table(title="Speed without drafts and with them, tokens/s", show_header=False)
    for one in figures["tasks"]:
        spread = f"rounds: {one['least_ratio']:.2f} to {one['most_ratio']:.2f}"
        pair = f"{one['tokens_per_s_off']:.0f} to {one['tokens_per_s_on']:.0f}"
        speeds.add_row(one["task"], pair, f"{one['ratio']:.2f} times ({spread})")
    out.print(speeds)
    say(
        "A small model on a few cores gains where its answer repeats text; elsewhere drafts cost about what they save. "
        "A larger one gains more: its step takes as long as reading its weights does, for one token or several drafts."
    )
    table = Table(title="What the service measured of itself", show_header=False)
    rows = (
        ("acceptance rate", "acceptance_rate", "{:.1%}"),
        ("mean accepted length", "mean_accepted_length", "{:.2f} tokens a round"),
        ("first token after", "first_token_s", "{:.2f} s"),
        ("TME (1.00 = the logprobs are right)", "tme", "{:.4f}"),
        ("self-check terms taken", "selfcheck_terms", "{}"),
        ("self-check alarms", "selfcheck_alarms", "{}"),
    )
    for label, key, form in rows:
        value = figures[key]
        table.add_row(label, "nothing was counted" if value is None else form.format(value))
    out.print(table)
    if (busy_cores := figures["others_cores"] or 0.0) > BUSY_CORES:
        cores = os.cpu_count() or 1
        say(
            f"This machine was busy: others used {busy_cores:.1f} of its {cores} cores meanwhile, and the "
            "speeds and ratios above mean little. Stop other processes, and measure again."
        )
    name = file.stem if file.parent == CONFIGS else file
    program = "truespec" if shutil.which("truespec") else os.path.relpath(sys.argv[0])
    said = f"run [bold]{escape(f'{program} serve {name}')}[/bold] and then:\n  {escape(curl)}"
    out.print(f"\nTo talk to it yourself, {said}", soft_wrap=True)
    write_json(json_file, figures)
    if json_file is not None:
        say(f"figures written to {json_file}", err)


def at_port(file: ServeFile, port: int) -> ServeFile:
    """The configuration, listening on this port."""
    return file.model_copy(update={"http_options": file.http_options.model_copy(update={"port": port})})


@contextmanager
def served(file: ServeFile, address: str | None, report: Callable[[str], None] | None = None) -> Iterator[Any]:
    """The running application, with a client of its own."""
    from deploy.run.cluster import running_app
    from deploy.run.demo import Service

    report = report or progress_printer()
    api_key()  # the client's: what is wrong with it is reported before anything starts
    with running_app(file, report, address=address) as running:
        service = Service(*running)
        with service.client:
            yield service
