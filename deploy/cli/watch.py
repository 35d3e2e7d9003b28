"""`truespec watch`: a referee for any server, from a proxy in front of it or from answers that were kept."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from deploy.cli.console import INTERRUPTED, Failure, a_file, err, key_option, out, progress_printer, say
from deploy.exchange.vendors import VENDORS
from deploy.options import FiniteRange, api_key, check_writable, server_url, write_json
from deploy.reports.progress import View
from deploy.reports.terminal import print_document
from deploy.run.models import find_model
from deploy.watch.report import document
from deploy.watch.sentences import shortcomings
from speculative.errors import ConfigError

_ENGINES = ("torch", "transformers", "vllm")
_PRECISIONS = ("float32", "bfloat16", "fp8")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Command = Callable[..., Any]


@click.group()
def watch() -> None:
    """Check, without replacing it, whether the answers of a server in production are its model's own."""


_SERVER = [
    click.option(
        "--model", required=True, help="The weights that the server has: a catalogue name, a folder or a hub id."
    ),
    click.option("--served", help="The model's name in metrics and report; the default is that of --model."),
    click.option(
        "--tolerance",
        type=a_file,
        help="The tolerance for this server's rounding, as `truespec watch calibrate` wrote it.",
    ),
    click.option(
        "--precision",
        type=click.Choice(_PRECISIONS),
        help="Without --tolerance: the data type that the server computes in; the default is bfloat16.",
    ),
    click.option(
        "--logprobs",
        type=click.Choice(["raw", "processed"]),
        help="The stage of the server's logprobs: before or after temperature and filters; the default is what "
        "--tolerance says, or raw.",
    ),
    click.option(
        "--dialect",
        type=click.Choice(("auto", *VENDORS)),
        default="auto",
        show_default=True,
        help="The server's vendor, which decides how requests are sampled by default.",
    ),
    click.option(
        "--default",
        "defaults",
        multiple=True,
        metavar="NAME=VALUE",
        help="A sampling default of the server, for requests that do not set it. May be given several times.",
    ),
]
"""Options that say what the server serves, and how it rounds and samples."""

_ENGINE = [
    click.option(
        "--engine",
        type=click.Choice(_ENGINES),
        default="torch",
        show_default=True,
        help="The engine that computes answers again. `vllm` compares logprobs only.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        default="float32",
        show_default=True,
        help="The data type that it computes in.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=0),
        default=0,
        help="CPU threads of an engine; the default is all cores.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=2),
        help="Leave longer answers out; the default is the model's own limit, on a CPU at most 16,384 tokens.",
    ),
    click.option(
        "--keep-prompts",
        is_flag=True,
        help="Show prompts and answers in findings. Without it no text of a client is kept.",
    ),
]
"""Options that say what computes its answers again, and what a report shows."""


def _options(*options: Command) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _referee_options(options: dict[str, Any], **own: Any) -> tuple[Any, Any]:
    """Return how answers are judged, and computed again."""
    from deploy.run.replayers import ReplayerOptions
    from deploy.watch.referee import RefereeOptions
    from serve_app.backends.base import PRECISIONS
    from serve_app.referee.tolerance import Tolerance

    defaults = dict(_default(text) for text in options["defaults"])
    if options["tolerance"] is not None and options["precision"] is not None:
        raise ConfigError("--precision and --tolerance contradict each other; leave --precision out.")
    if options["tolerance"] is not None:
        tolerance = Tolerance.read(options["tolerance"])
    else:
        precisions = options["precision"] or "bfloat16", options.get("dtype", "float32")
        tolerance = Tolerance.against_float32(max(precisions, key=PRECISIONS.index))
    replayer = ReplayerOptions(
        find_model(options["model"], progress_printer()),
        **{name: options[name] for name in ("engine", "dtype", "threads", "max_model_len") if name in options},
    )
    if replayer.engine == "transformers" and replayer.dtype != "float32":
        raise ConfigError("--dtype: transformers computes in float32 here; leave it out, or choose --engine torch.")
    mode = options["logprobs"] or ("processed" if tolerance.processed else "raw")
    referee = RefereeOptions(
        served=options["served"] or Path(options["model"]).name,
        tolerance=tolerance,
        processed=mode == "processed",
        dialect=options["dialect"],
        defaults=defaults,
        **{"keep_prompts": options.get("keep_prompts", False), **own},
    )
    return referee, replayer


def _default(text: str) -> tuple[str, float]:
    name, found, value = text.partition("=")
    try:
        if found and name in _SAMPLING:
            return name, float(value)
    except ValueError:
        pass
    raise ConfigError(f"--default {text!r}: must be NAME=NUMBER, and NAME one of {', '.join(_SAMPLING)}.")


@watch.command("proxy")
@click.argument("url")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option("--port", type=click.IntRange(1, 65535), default=8100, show_default=True, help="Listen on this port.")
@click.option(
    "--share", type=FiniteRange(min=0, max=1), default=0.1, show_default=True, help="Watch this share of the requests."
)
@click.option(
    "--dialect",
    type=click.Choice(("auto", *VENDORS)),
    default="auto",
    show_default=True,
    help="The server's vendor, which decides how it is asked for token ids and logprobs.",
)
@click.option("--referee", help="Send what is captured to this referee.")
@click.option("--model", help="Without --referee: start one here that replays with these weights.")
@click.option(
    "--referee-port",
    type=click.IntRange(1, 65535),
    default=8101,
    show_default=True,
    help="With --model: where the referee listens.",
)
@click.option("--tolerance", type=a_file, help="With --model: passed on to the referee.")
@click.option("--replica-header", metavar="NAME", help="The header of a reply that names the replica.")
@click.option(
    "--max-queued",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Exchanges that may wait for the referee; further ones are dropped and counted.",
)
def watch_proxy(
    url: str, referee: str | None, model: str | None, referee_port: int, tolerance: Path | None, **options: Any
) -> None:
    """Pass requests on to the server at URL, and show a share of the answers to a referee."""
    from deploy.watch.proxy import ProxyOptions, run_proxy

    server_url(url, "URL")
    if referee is not None:
        server_url(referee, "--referee")
    if (referee is None) == (model is None):
        raise click.UsageError("Set --referee URL to use a running referee, or --model to start one here.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _own_referee(model, referee_port, tolerance, options) as own:
        proxy_options = ProxyOptions(url, referee=own or referee, **options)
        say(f"Passing requests at http://{options['host']}:{options['port']} on to {url}", err)
        asyncio.run(run_proxy(proxy_options))


@contextlib.contextmanager
def _own_referee(
    model: str | None, port: int, tolerance: Path | None, options: Mapping[str, Any]
) -> Iterator[str | None]:
    """A referee in a process of its own until the block ends; its URL."""
    if model is None:
        yield None
        return
    find_model(model, progress_printer())
    command = [sys.executable, "-m", "deploy.cli.main", "watch", "referee", "--model", model, "--port", str(port)]
    command += ["--dialect", options["dialect"], *(["--tolerance", str(tolerance)] if tolerance else [])]
    process = subprocess.Popen(command)
    try:
        say(f"The referee's page: http://127.0.0.1:{port}/", err)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@watch.command("referee")
@_options(*_SERVER, *_ENGINE)
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option("--port", type=click.IntRange(1, 65535), default=8101, show_default=True, help="Listen on this port.")
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Answers that may wait to be computed again.",
)
def watch_referee(host: str, port: int, max_queue: int, **options: Any) -> None:
    """Judge what proxies send: `/` shows the state, /report what was found, /metrics is for Prometheus."""
    from deploy.watch.app import run_referee

    referee, replayer = _referee_options(options, max_queue=max_queue)
    run_referee(referee, replayer, host, port)


@watch.command("files")
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--requests", type=a_file, help="The input of the batch whose output RECORDS are.")
@_options(*_SERVER, *_ENGINE)
@click.option(
    "--fail-on",
    multiple=True,
    type=click.Choice(("alarm", "suspect", "unread", "untested", "dropped")),
    default=("alarm", "suspect", "unread"),
    show_default=True,
    help="Exit with 1 for this. May be given several times.",
)
@click.option("--json", "json_file", type=a_file, help="Write the findings to this file.")
@click.option("--html", "html_file", type=a_file, help="Write a report for a browser to this file.")
def watch_files(
    records: tuple[Path, ...],
    requests: Path | None,
    fail_on: tuple[str, ...],
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Judge answers that were kept: JSONL or Parquet files, `-` for standard input.

    A record is a line of a batch's output in OpenAI's format (--requests names its input), an object with `request` and
    `response`, or a rollout with `prompt_token_ids`, `token_ids` and `logprobs`.
    """
    from deploy.watch.records import read_records
    from deploy.watch.run import judge_records

    for option, path in {"--json": json_file, "--html": html_file}.items():
        check_writable(path, option)
    referee, replayer = _referee_options(options)
    with View(err) as view:
        report = judge_records(read_records(records, requests), referee, replayer, view)
    _show(report, json_file, html_file)
    if reasons := [f"{name}: {text}." for name, text in shortcomings(report).items() if name in fail_on]:
        raise Failure("\n".join(reasons))


def _show(report: Mapping[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    """Print a report, and write its files."""
    from deploy.reports.html_pages import page

    print_document(document(report), out)
    write_json(json_file, report)
    if html_file is not None:
        html_file.write_text(page(document(report)), encoding="utf-8")
    if report["interrupted"]:
        say("Interrupted: the report covers the answers judged so far.", err)
        raise click.exceptions.Exit(INTERRUPTED)


@watch.command("audit")
@click.argument("url")
@_options(*_SERVER)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Send this many ordinary requests; the probes send some hundred more.",
)
@key_option
@click.option("--json", "json_file", type=a_file, help="Write the findings to this file.")
@click.option("--html", "html_file", type=a_file, help="Write a report for a browser to this file.")
def watch_audit(
    url: str,
    requests: int,
    api_key_file: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Ask the server at URL questions of our own, and judge its answers.

    Exits with 1 where something is suspect, and with 2 where the server could not be judged.
    """
    from deploy.exchange.client import ServiceError
    from deploy.watch.audit import AuditOptions, run_audit

    try:
        server_url(url, "URL")
        for option, path in {"--json": json_file, "--html": html_file}.items():
            check_writable(path, option)
        asked = AuditOptions(url, options["served"], api_key(api_key_file), requests=requests)
        referee, replayer = _referee_options(options, keep_prompts=True)
        with View(err) as view:
            report = run_audit(asked, referee, replayer, view)
    except (ServiceError, ConfigError) as error:
        say(f"Error: {error}", err)
        raise click.exceptions.Exit(2) from error
    _show(report, json_file, html_file)
    found = shortcomings(report)
    if found.keys() & {"alarm", "probes", "suspect"}:
        raise click.exceptions.Exit(1)
    if "unread" in found:
        raise click.exceptions.Exit(2)


@watch.command("calibrate")
@click.argument("url")
@click.option("--model", required=True, help="The weights that the server has: a catalogue name, a folder or a hub id.")
@click.option("--served", help="Ask this one of the server's models; the default is the first.")
@click.option(
    "--prompts",
    "num_prompts",
    type=click.IntRange(min=8),
    default=96,
    show_default=True,
    help="Compare the next token's distribution after this many prompts.",
)
@click.option("--out", "file", type=a_file, required=True, help="Write the tolerance to this file, for --tolerance.")
@key_option
def watch_calibrate(
    url: str, model: str, served: str | None, num_prompts: int, file: Path, api_key_file: Path | None
) -> None:
    """Measure the rounding of the server at URL: its logprobs against the same weights in float32."""
    from deploy.watch.calibration import calibrate

    server_url(url, "URL")
    check_writable(file, "--out")
    with View(err) as view:
        folder = find_model(model, view)
        tolerance = calibrate(url, folder, served, num_prompts, api_key(api_key_file), view)
    write_json(file, tolerance.to_wire())
    for line in tolerance.in_words():
        say(line)
