"""`truespec watch`: a referee for any server, from a proxy in front of it or from answers that were kept."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from deploy.cli.console import INTERRUPTED, Failure, MainGroup, a_file, err, key_option, out, progress_printer, say
from deploy.options import FiniteRange, api_key, check_writable, server_url, write_json
from deploy.reports.progress import View
from deploy.reports.terminal import print_document, print_facts
from deploy.run.models import find_model
from deploy.watch.report import document
from deploy.watch.sentences import shortcomings
from serve_app.referee.wire.vendors import VENDORS
from speculative.errors import ConfigError

_ENGINES = ("torch", "transformers", "vllm")
_PRECISIONS = ("float32", "bfloat16", "fp8")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Command = Callable[..., Any]


@click.group(cls=MainGroup)
def watch() -> None:
    """Check whether the answers of another server are its model's own.

    The server goes on as it is; nothing is installed there.
    """


_MODEL = click.option(
    "--model", required=True, help="The weights that the server has: a catalogue name, a folder or a hub id."
)
_SERVER = [
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
        help="The server's vendor, which decides how it is asked for logprobs and how requests are sampled by default.",
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
        help="The engine that computes answers again. `vllm` compares logprobs only.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        default="float32",
        help="The data type that it computes in.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=0),
        default=0,
        show_default=False,
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

_REPORT = [
    click.option("--json", "json_file", type=a_file, help="Write the findings to this file."),
    click.option("--html", "html_file", type=a_file, help="Write a report for a browser to this file."),
]
"""Options of the commands that end with a report."""

_REFEREE = [*_SERVER, *_ENGINE]
"""Options of every command that has a referee."""


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
    from serve_app.referee.judge.tolerance import Tolerance
    from speculative.weight_formats import PRECISIONS

    defaults = dict(_default(text) for text in options["defaults"])
    if options["tolerance"] is not None and options["precision"] is not None:
        raise ConfigError("--precision and --tolerance contradict each other; leave --precision out.")
    if options["tolerance"] is not None:
        tolerance = Tolerance.read(options["tolerance"], "--tolerance")
    else:
        precisions = options["precision"] or "bfloat16", options.get("dtype", "float32")
        tolerance = Tolerance.against_float32(max(precisions, key=PRECISIONS.index))
    engine = {name: options[name] for name in ("engine", "dtype", "threads", "max_model_len") if name in options}
    if engine.get("engine") == "transformers" and engine["dtype"] != "float32":
        raise ConfigError("--dtype: transformers computes in float32 here; leave it out, or choose --engine torch.")
    replayer = ReplayerOptions(find_model(options["model"], progress_printer()), **engine)
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
@click.option("--host", default="127.0.0.1", help="Listen on this address.")
@click.option("--port", type=click.IntRange(1, 65535), default=8100, help="Listen on this port.")
@click.option("--share", type=FiniteRange(min=0, max=1), default=0.1, help="Watch this share of the requests.")
@click.option("--referee", help="Send what is captured to this referee, which runs already.")
@click.option("--model", help="Without --referee: start one here that replays with these weights.")
@click.option(
    "--referee-port", type=click.IntRange(1, 65535), default=8101, help="With --model: where the referee listens."
)
@_options(*_REFEREE)
@click.option("--replica-header", metavar="NAME", help="The header of a reply that names the replica.")
@click.option(
    "--max-queued",
    type=click.IntRange(min=1),
    default=1000,
    help="Exchanges that may wait for the referee; further ones are dropped and counted.",
)
def watch_proxy(url: str, referee: str | None, referee_port: int, **options: Any) -> None:
    """Pass requests on, and show a share of the answers to a referee.

    With --model the options of `truespec watch referee` are those of the referee that is started here.
    """
    from deploy.run.ports import free_port
    from deploy.watch.proxy import ProxyOptions, run_proxy
    from serve_app.config.serve_file import HttpOptions

    server_url(url, "URL")
    ctx = click.get_current_context()
    words = [word for param in ctx.command.params if param.name in _SHARED for word in _as_given(ctx, param)]
    if (referee is None) == (options["model"] is None):
        raise click.UsageError("Set --referee URL to use a running referee, or --model to start one here.")
    if referee is not None:
        server_url(referee, "--referee")
        if own := [word for word in words if not word.startswith("--dialect=")]:
            raise click.UsageError(f"{own[0].split('=')[0]} is for the referee; set it where {referee} is started.")
    own_options = {name: options[name] for name in options if name not in _SHARED} | {"dialect": options["dialect"]}
    proxy = ProxyOptions(url, referee=referee or f"http://127.0.0.1:{referee_port}", **own_options)
    free_port(HttpOptions(host=proxy.host), proxy.port, "--")
    if referee is None:
        free_port(HttpOptions(host="127.0.0.1"), referee_port, "--referee-")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = None
    if referee is None:
        command = [sys.executable, "-m", "deploy.cli.main", "watch", "referee", f"--port={referee_port}", *words]
        process = subprocess.Popen(command)
    try:
        ended = (lambda: False) if process is None else (lambda: process.poll() is not None)
        if not asyncio.run(run_proxy(proxy, lambda text: say(text, err), ended)):
            raise Failure("The referee did not start; its message is above.")
    finally:
        if process is not None:
            process.terminate()
            process.wait()


_SHARED = {"model", *(param.name for param in click.command()(_options(*_REFEREE)(lambda: None)).params)}
"""Names of the options of a referee."""


def _as_given(ctx: click.Context, option: click.Parameter) -> Iterator[str]:
    """Yield an option as it was given, for the command line of another process."""
    name, value = option.opts[-1], ctx.params[str(option.name)]
    if ctx.get_parameter_source(str(option.name)) is not click.core.ParameterSource.COMMANDLINE:
        return
    values = value if option.multiple else [value]
    yield from [name] if value is True else [f"{name}={one}" for one in values]


@watch.command("referee")
@_options(_MODEL, *_REFEREE)
@click.option("--host", default="127.0.0.1", help="Listen on this address.")
@click.option("--port", type=click.IntRange(1, 65535), default=8101, help="Listen on this port.")
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=256, help="Answers that may wait to be computed again."
)
def watch_referee(host: str, port: int, max_queue: int, **options: Any) -> None:
    """Judge what proxies send.

    `/` shows verdicts and findings, /metrics is for Prometheus.
    """
    from deploy.run.ports import free_port
    from deploy.watch.app import serve_referee
    from serve_app.config.serve_file import HttpOptions

    free_port(HttpOptions(host=host), port, "--")
    referee, replayer = _referee_options(options, max_queue=max_queue)
    asyncio.run(serve_referee(referee, replayer, host, port))


@watch.command("files")
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--requests", type=a_file, help="The input of the batch whose output RECORDS are.")
@_options(_MODEL, *_REFEREE)
@click.option(
    "--fail-on",
    multiple=True,
    type=click.Choice(("alarm", "suspect", "unread", "untested", "dropped")),
    default=("alarm", "suspect", "unread"),
    help="Exit with 1 for this. May be given several times.",
)
@_options(*_REPORT)
def watch_files(
    records: tuple[Path, ...],
    requests: Path | None,
    fail_on: tuple[str, ...],
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Judge answers that were kept in files.

    The files are JSONL or Parquet; `-` is standard input.

    A record is a line of a batch's output in OpenAI's format (--requests names its input), an object with `request` and
    `response`, or a rollout with `prompt_token_ids`, `token_ids` and `logprobs`.
    """
    from deploy.watch.records import read_records
    from deploy.watch.run import judge_records

    for option, path in {"--json": json_file, "--html": html_file}.items():
        check_writable(path, option)
    answers = read_records(records, requests)
    referee, replayer = _referee_options(options)
    with View(err) as view:
        report = asyncio.run(judge_records(answers, referee, replayer, view))
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
@_options(_MODEL, *_SERVER)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=200,
    help="Send this many ordinary requests; the probes send some hundred more.",
)
@key_option
@_options(*_REPORT)
def watch_audit(
    url: str, requests: int, api_key_file: Path | None, json_file: Path | None, html_file: Path | None, **options: Any
) -> None:
    """Ask a server questions of our own, and judge its answers.

    Exits with 1 where something is suspect, and with 2 where the server could not be judged.
    """
    from deploy.exchange.client import ServiceError, check_serving
    from deploy.watch.audit import AuditOptions, run_audit

    try:
        server_url(url, "URL")
        for option, path in {"--json": json_file, "--html": html_file}.items():
            check_writable(path, option)
        asked = AuditOptions(url, options["served"], api_key(api_key_file), requests=requests)
        check_serving(url, asked.api_key)
        referee, replayer = _referee_options(options, keep_prompts=True)
        with View(err) as view:
            report = asyncio.run(run_audit(asked, referee, replayer, view))
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
@_MODEL
@click.option("--served", help="Ask this one of the server's models; the default is the first.")
@click.option(
    "--prompts",
    "num_prompts",
    type=click.IntRange(min=8),
    default=96,
    help="Compare the next token's distribution after this many prompts.",
)
@click.option("--out", "file", type=a_file, required=True, help="Write the tolerance to this file, for --tolerance.")
@key_option
def watch_calibrate(
    url: str, model: str, served: str | None, num_prompts: int, file: Path, api_key_file: Path | None
) -> None:
    """Measure a server's rounding, for --tolerance.

    Its logprobs are compared with the same weights in float32.
    """
    from deploy.exchange.client import check_serving
    from deploy.watch.calibration import calibrate

    server_url(url, "URL")
    check_writable(file, "--out")
    key = api_key(api_key_file)
    check_serving(url, key)
    with View(err) as view:
        tolerance = calibrate(url, find_model(model, view), served, num_prompts, key, view)
    write_json(file, tolerance.to_wire())
    print_facts(tolerance.facts(), out)
