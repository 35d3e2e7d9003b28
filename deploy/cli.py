"""The `truespec` command."""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.keys import keys
from deploy.models import CATALOGUE, fetch_model
from deploy.options import FiniteRange, api_key, check_writable, read_secret, server_url, write_json
from serve_app.config import ServeFile, load_config
from speculative.errors import ConfigError, TruespecError

CONFIGS = Path(__file__).parent / "configs"
_DEMO = CONFIGS / "demo.yaml"

_err = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


class _Failure(click.ClickException):
    exit_code = 1


class _Group(click.Group):
    """Tells our own errors in one line; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TruespecError as error:
            raise _Failure(str(error)) from error


def progress_printer() -> Callable[[str], None]:
    """Prints what is going on, with the seconds since the start, to standard error."""
    began = time.monotonic()

    def report(message: str) -> None:
        _err.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {escape(message)}")

    return report


def _say(text: str, on: Console = _out) -> None:
    """Print a line as it is, brackets and all; what reads a pipe gets it unbroken."""
    on.print(text, markup=False, soft_wrap=True)


@click.group(cls=_Group)
@click.version_option(package_name="truespec")
def main() -> None:
    """Serve language models with speculative decoding that is lossless, and shows that it is while it serves."""


@main.group()
def model() -> None:
    """Fetch models that need no hub."""


@model.command("list")
def model_list() -> None:
    """Show the catalogue."""
    for name, entry in CATALOGUE.items():
        _say(f"{name:<16} {entry.served_name} ({entry.licence})")


@model.command("get")
@click.argument("name")
def model_get(name: str) -> None:
    """Fetch a catalogue model into the cache and print its folder."""
    _say(str(fetch_model(name, progress=progress_printer())))


main.add_command(keys)


@main.group()
def config() -> None:
    """Look at configurations."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def config_check(file: Path) -> None:
    """Check a configuration; each fault is told with its field and the mend."""
    load_config(file)
    _say(f"{file}: fine")


@config.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def config_show(file: Path) -> None:
    """Print a configuration with every default filled in, as a configuration that can be served."""
    from deploy.reference import effective_config

    _out.print(effective_config(load_config(file)), end="", markup=False, soft_wrap=True)


@config.command("reference")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write it here instead of printing it.")
@click.option("--check", is_flag=True, help="With --out: write nothing; fail if the file is out of date.")
def config_reference(out: Path | None, check: bool) -> None:
    """Print the reference of all settings as Markdown (docs/configuration.md)."""
    from deploy.reference import configuration_reference

    text = configuration_reference()
    if out is None:
        _out.print(text, end="", markup=False, soft_wrap=True)
    elif check:
        if not out.is_file() or out.read_text(encoding="utf-8") != text:
            raise _Failure(f"{out} is out of date; run `truespec config reference --out {out}`.")
    else:
        check_writable(out, "--out")
        out.write_text(text, encoding="utf-8")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--address", help="Run on this Ray cluster instead of one started here (auto, or host:port).")
def serve(file: Path, address: str | None) -> None:
    """Serve the application of a configuration until interrupted."""
    from deploy.demo import curl_line

    checked = load_config(file)
    with _served(checked, address) as client:
        _say(f"Serving {client.model_name} at {client.base_url}. Try:\n  {curl_line(client)}", _err)
        if checked.application.args.access.keys_file is not None:
            _say("It asks for an API key: add -H 'authorization: Bearer KEY'.", _err)
        _say("Ctrl-C stops it.", _err)
        _wait_for_interrupt()


@main.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--config", "file", type=click.Path(path_type=Path), default=_DEMO, help="What to serve.")
def demo(json_file: Path | None, port: int, file: Path) -> None:
    """Serve a real model on this machine, talk to it, and show its metrics."""
    from deploy.demo import curl_line, run_demo

    check_writable(json_file, "--json")
    checked = _at_port(load_config(file), port)
    report = progress_printer()
    with _served(checked, None, report) as client:
        figures = run_demo(client, report, on_text=lambda text: _out.print(text, end="", markup=False, soft_wrap=True))
        curl = curl_line(client)
    _print_figures(figures.as_dict())
    serving = "make serve" if file == _DEMO else f"truespec serve {file}"
    said = f"run [bold]{escape(serving)}[/bold] and then:\n  {escape(curl)}"
    _out.print(f"\nTo talk to it yourself, {said}", soft_wrap=True)
    write_json(json_file, figures.as_dict())
    if json_file is not None:
        _say(f"figures written to {json_file}", _err)


@main.group()
def dashboards() -> None:
    """Grafana dashboards, Prometheus rules, and the pages that describe metrics and alerts."""


@dashboards.command("build")
@click.option("--check", is_flag=True, help="Write nothing; fail if a file is out of date.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write below this folder.")
def dashboards_build(check: bool, out: Path | None) -> None:
    """Write dashboards/generated and the generated pages of docs."""
    from dashboards import build

    root = out or build.ROOT
    if out is None and not (root / "pyproject.toml").is_file():
        raise _Failure("This is not a checkout of truespec; say with --out where to write.")
    changed = build.stale(root) if check else build.write(root)
    for path in changed:
        _say(f"{'out of date' if check else 'written'}: {path}")
    if check and changed:
        raise _Failure("Run `truespec dashboards build`, and commit what it writes.")
    _say(f"{len(build.files())} files are up to date")


@dashboards.command("push")
@click.option("--url", envvar="GRAFANA_URL", required=True, help="Of the Grafana server. [env: GRAFANA_URL]")
@click.option("--token-file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="In place of the env.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--overwrite", is_flag=True, help="Replace pages that somebody saved meanwhile, too.")
def dashboards_push(url: str, token_file: Path | None, dry_run: bool, overwrite: bool) -> None:
    """Upload the dashboards to Grafana, into the folder truespec. The token is read from GRAFANA_TOKEN or a file."""
    from dashboards import build

    try:
        from dashboards.push import Change, PushError, Server, push
    except ModuleNotFoundError as error:
        raise _Failure("This needs grafana-api: pip install 'truespec[grafana]'.") from error
    token = read_secret(token_file, "--token-file") if token_file else os.environ.get("GRAFANA_TOKEN")
    if not token:
        raise _Failure("There is no token: set GRAFANA_TOKEN or give --token-file.")

    def told(change: Change) -> None:
        _say(f"{'would be ' if dry_run and change.action != 'unchanged' else ''}{change.action}: {change.what}")

    try:
        push(Server(url, token), build.dashboards(), dry_run=dry_run, overwrite=overwrite, progress=told)
    except PushError as error:
        raise _Failure(str(error)) from error


@main.command("train-drafter")
@click.option("--model", "source", required=True, help="A catalogue name, a folder or a hub id.")
@click.option("--kind", type=click.Choice(["eagle3", "mtp"]), default="eagle3", show_default=True)
@click.option("--init-from", help="Start from this head (a folder or name) instead of from the model's last layer.")
@click.option("--data", default="self", show_default=True, help="self, a .jsonl of prompts, or an .npz.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Gets head and report.")
@click.option(
    "--minutes", type=FiniteRange(min=0, min_open=True), help="Train so long (60 when --steps is not given either)."
)
@click.option("--steps", type=click.IntRange(min=1), help="Train so many steps.")
@click.option(
    "--draft-vocab",
    type=click.IntRange(min=1),
    default=16384,
    show_default=True,
    help="So many of the commonest tokens are all that a new EAGLE-3 head drafts, and what an MTP loss is over.",
)
@click.option("--conversations", type=click.IntRange(min=10), default=2000, show_default=True, help="With --data self.")
@click.option("--learning-rate", type=FiniteRange(min=1e-9), help="Its peak: 1e-3, or 3e-4 with --init-from.")
@click.option("--tokens-per-step", type=click.IntRange(min=1), default=1024, show_default=True, help="More on a GPU.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Of the products; auto: float32 on a CPU without bfloat16 instructions.",
)
@click.option("--checkpoint-minutes", type=FiniteRange(min=0), default=5.0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in --out; repeat the options.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here too.")
def train_drafter(source: str, out: Path, json_file: Path | None, **options: Any) -> None:
    """Train a draft head for a model, on what the model itself writes."""
    from deploy.jobs.train_drafter import TrainJob, run_training
    from deploy.jobs.view import View
    from speculative.training.loop import TrainingConfig

    check_writable(json_file, "--json")
    minutes, steps = options.pop("minutes"), options.pop("steps")
    changes = {} if options["init_from"] is None else {"learning_rate": 3e-4, "warm_draft_share": 0.0}
    rate = options.pop("learning_rate")
    training = TrainingConfig(
        **changes if rate is None else changes | {"learning_rate": rate},
        steps=steps,
        minutes=60.0 if minutes is None and steps is None else minutes,
        tokens_per_step=options.pop("tokens_per_step"),
        report_every_s=60 * options.pop("checkpoint_minutes"),
    )
    with View(_err) as view:
        report = run_training(TrainJob(model=source, out=out, training=training, **options), view)
    final = report["final"]["held_out"]
    _say(f"head in {out / 'head'}; held-out acceptance {[round(rate, 3) for rate in final['acceptance']]}")
    write_json(json_file, report)


@main.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="A catalogue name, a folder or a hub id.")
@click.option("--engines", help="family/variant[:option=value]..., separated by commas; without it all that are here.")
@click.option("--kinds", default="chat,code,summarise", show_default=True, help="Of prompts.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Other prompts: JSON, a list for each kind.")
@click.option("--streams", help="Prompts answered at once.  [default: 1,4,16; with --gpu 1,4,16,64]")
@click.option("--temperatures", default="0,1", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=96, show_default=True, help="Of every answer.")
@click.option("--threads", type=click.IntRange(min=1), help="Of every engine; all cores when not given.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--against", help="Compare with the best of these engines; the first one when not given.")
@click.option(
    "--measure",
    type=click.Choice(["decode", "whole"]),
    default="decode",
    show_default=True,
    help="Tokens a second after the first token, or of the whole batch.",
)
@click.option("--profile", is_flag=True, help="Show where the time of our steps goes.")
@click.option("--together", is_flag=True, help="Our engines of the same weights share a process and one copy of them.")
@click.option(
    "--gpu", is_flag=True, help="Our engines on a GPU: off, n-gram and the head, with and without CUDA graphs."
)
@click.option("--head", help="A trained head, for eagle3 and dynamic.")
@click.option("--draft-model", help="For draft_model.")
@click.option("--gguf", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The model for llama.cpp.")
@click.option("--vllm-python", help="The interpreter of the environment that has vllm.")
@click.option("--llama-python", help="The interpreter of the environment that has llama-cpp-python.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write every sample here.")
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Put the tables into this page.")
@click.option("--section", default="benchmark", show_default=True, help="Which section of the page to write anew.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="Draw PNG and SVG here.")
def bench(**options: Any) -> None:
    """Measure engines side by side: same model, prompts and sampling, in turns."""
    from deploy.bench.command import BenchOptions, run_command

    found = run_command(BenchOptions(**options), progress_printer(), _out)
    if not found.samples:
        raise _Failure("Nothing was measured; the lines above say why.")


@main.command("bench-handoff")
@click.option("--mib", type=click.IntRange(min=1), default=300, show_default=True, help="Size of a handoff.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--transports", default="plasma", show_default=True, help="Of handoff.transport, separated by commas.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
def bench_handoff(mib: int, rounds: int, transports: str, json_file: Path | None) -> None:
    """Measure how fast handoffs get from process to process, beside what shared memory itself does."""
    from deploy.bench.handoff import bench_on_ray

    check_writable(json_file, "--json")
    found = bench_on_ray(mib * 2**20, [name.strip() for name in transports.split(",")], rounds)
    for name, way in found["ways"].items():
        _say(
            f"{name}: {1e3 * way['median_s']:.1f} ms, {way['gb_per_s']:.2f} GB/s, "
            f"{way['share_of_reference']:.2f} of the reference"
        )
    write_json(json_file, found, indent=1)


@main.command()
@click.argument("url", required=False)
@click.option("--mutants", is_flag=True, help="Put every known fault into an engine; tell who finds it, and when.")
@click.option("--outside", is_flag=True, help="With --mutants: serve each fault, and look for it from outside.")
@click.option("--clean", type=click.IntRange(min=0), default=0, help="Serve so many positions without a fault.")
@click.option(
    "--model",
    help="With URL: the weights to compare with (a catalogue name, a folder or a hub id). With --clean: serve with "
    "this model instead of a table; wants --head.",
)
@click.option("--head", help="With --clean: the draft head of --model, a name or a folder.")
@click.option("--served", help="With URL: which of the server's models; else the first.")
@click.option("--beside", help="With URL: a server of the same model without speculation, to compare with.")
@click.option("--destructive", is_flag=True, help="With URL: send what has killed servers, too.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="With URL: only this probe. With --outside: only faults whose names begin so. May be given several times.",
)
@click.option("--budget", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="With URL.")
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(min=1), default=120, show_default=True, help="Seconds of a request."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Holds the server's key; else TRUESPEC_API_KEY does.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the findings here.")
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path, dir_okay=False), help="With URL: a report to read."
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Put the tables into this page; without it those of --mutants go to docs/detection.md, with --outside to "
    "docs/audit.md.",
)
@click.option("--section", help="With URL and --page: the section's name.")
def audit(
    url: str | None,
    mutants: bool,
    outside: bool,
    clean: int,
    model: str | None,
    head: str | None,
    page: Path | None,
    **options: Any,
) -> None:
    """Audit the server at URL from outside; or, without one, the self-checks.

    Exits with 1 when something was found (or, of the self-checks, missed), with 2 when the server could not be audited.
    """
    if url is not None:
        _audit_url(url, model, page, **options)
        return
    json_file: Path | None = options["json_file"]
    check_writable(json_file, "--json")
    if mutants and outside:
        _audit_from_outside(page or Path("docs/audit.md"), options["only"])
        return
    from deploy.audit.model import AuditedModel
    from deploy.audit.report import clean_table, detection_table, write_clean, write_detection
    from deploy.audit.run import MAX_Z, VOCAB_SIZE, audit_clean, audit_mutants, pooled

    if not (mutants or clean):
        raise click.UsageError("Say what to audit: the URL of a server, --mutants, --clean POSITIONS, or both.")
    check_writable(page or (Path("docs/detection.md") if mutants else None), "--page")
    report, missed = progress_printer(), list[str]()
    if clean:
        runs = audit_clean(clean, report, None if model is None else AuditedModel.find(model, head).serve)
        _out.print(clean_table(runs))
        if page is not None:
            write_clean(runs, page, model or f"a table of {VOCAB_SIZE} tokens")
        missed += [f"{run.setting}: {run.alarms | run.violations}" for run in runs if run.alarms or run.violations]
        missed += [
            f"{check}: its mean is {sums.z:+.1f} standard deviations from 0"
            for check, sums in pooled(runs).items()
            if abs(sums.z) > MAX_Z
        ]
    if mutants:
        findings = audit_mutants(report=report)
        _out.print(detection_table(findings))
        write_detection(findings, page or Path("docs/detection.md"))
        write_json(json_file, [one.as_dict() for one in findings])
        missed += [f"{one.fault}: nobody found it" for one in findings if one.delay is None]
    if missed:
        raise _Failure("\n".join(missed))


def _audit_url(url: str, model: str | None, page: Path | None, **options: Any) -> None:
    """Audit a running server."""
    from deploy.audit.blackbox.command import AuditOptions, audit_url, put_into, tell
    from deploy.audit.blackbox.dialect import AuditFailed

    files = {"--json": options["json_file"], "--html": options["html_file"], "--page": page}
    section = options["section"]
    try:
        for option, path in files.items():
            check_writable(path, option)
        for named, address in {"URL": url, "--beside": options["beside"]}.items():
            if address is not None:
                server_url(address, named)
        key = api_key(options["api_key_file"])
        asked = AuditOptions(url, model, api_key=key, **{name: options[name] for name in _AUDIT_OPTIONS})
        found = audit_url(asked, progress_printer())
    except (AuditFailed, ConfigError) as error:
        _say(f"Error: {error}", _err)
        raise click.exceptions.Exit(2) from error
    tell(found, _out, options["json_file"], options["html_file"])
    if page is not None:
        put_into(page, found, section or f"{found.facts['model']} at {url}")
    if found.findings:
        raise click.exceptions.Exit(1)


_AUDIT_OPTIONS = ("served", "beside", "destructive", "budget", "timeout_s", "only")


def _audit_from_outside(page: Path, only: tuple[str, ...]) -> None:
    """Serve known faults, and look for them from outside."""
    from deploy.audit.blackbox.command import audit_faults, servable

    names = servable(only)
    check_writable(page, "--page")
    wrong = audit_faults(names, page, progress_printer())
    if wrong:
        raise _Failure(f"Servers without a fault were found at fault: {'; '.join(wrong)}.")


@main.command()
@click.argument("requests", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("answers", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--url", help="Of a running server, with or without /v1.")
@click.option("--model", "source", help="Start an engine of its own: monolith.yaml with this model, on CPUs.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Start an engine of its own: this application.")
@click.option("--address", help="For an engine of its own: on this Ray cluster, not on one started here.")
@click.option("--concurrency", type=click.IntRange(min=1), default=16, show_default=True, help="Requests in flight.")
@click.option("--retries", type=click.IntRange(min=0), default=8, show_default=True, help="Of each request.")
@click.option("--timeout", "timeout_s", type=FiniteRange(min=1), default=600, show_default=True, help="Seconds.")
@click.option("--verify", is_flag=True, help="Have every answer computed again; the verdict goes with it.")
@click.option("--retry-failed", is_flag=True, help="Ask the requests again whose lines hold no answer.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Holds the server's key; else TRUESPEC_API_KEY does.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
def batch(requests: Path, answers: Path, json_file: Path | None, **options: Any) -> None:
    """Answer a file of requests in OpenAI's batch format (JSONL); an interrupted run goes on where it ended.

    Exits with 1 when a request has no answer, or an answer is suspect.
    """
    from deploy.jobs.batch import BatchOptions, complaint, run_batch, summary
    from deploy.jobs.batch_files import BatchInput, BatchOutput
    from deploy.jobs.view import View

    check_writable(json_file, "--json")
    server = {name: options.pop(name) for name in ("url", "source", "file", "address")}
    if server["url"] is not None:
        server_url(server["url"], "--url")
    read, key = BatchInput(requests), api_key(options.pop("api_key_file"))
    with BatchOutput.opened(answers, read.custom_ids, retry_failed=options.pop("retry_failed")) as output:
        models = read.models if len(output.done) < len(read) else None
        with _batch_server(**server, models=models) as url, View(_err) as view:
            figures = run_batch(read, output, BatchOptions(url=url, api_key=key, **options), view)
    for line in summary(figures):
        _say(line)
    write_json(json_file, figures)
    if (fault := complaint(figures)) is not None:
        raise _Failure(fault)


@contextmanager
def _batch_server(
    url: str | None, source: str | None, file: Path | None, address: str | None, models: set[str] | None
) -> Iterator[str]:
    """Where a batch that asks for these models is answered: a server that runs, or one that runs until the block ends.

    `models` is None where nothing is left to answer; then nothing is started.
    """
    from deploy.jobs.batch_engine import batch_application

    if [url, source, file].count(None) != 2:
        raise click.UsageError("Say who answers: --url of a server, or --model or --config for an engine of its own.")
    if url is not None or models is None:
        yield url or ""
        return
    application = batch_application(source, file, models, on_a_cluster=bool(address or os.environ.get("RAY_ADDRESS")))
    with _served(application, address, alone=True) as client:
        yield client.base_url


def _reliability_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `chaos` and `load` have in common."""
    path = click.Path(path_type=Path, dir_okay=False)
    for option in (
        click.option("--config", "file", type=path, default=CONFIGS / "resilient.yaml", help="What to serve."),
        click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True),
        click.option("--max-tokens", type=click.IntRange(min=4), default=96, show_default=True, help="Of an answer."),
        click.option("--seed", type=int, default=1, show_default=True, help="Of requests and times."),
        click.option("--json", "json_file", type=path, help="Write the figures here."),
        click.option("--page", type=path, help="Put the figures into this page."),
    ):
        command = option(command)
    return command


@main.command()
@_reliability_options
@click.option("--requests", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--kill-every", "kill_every_s", type=FiniteRange(min=0.1), default=3.0, show_default=True, help="s")
@click.option("--minutes", type=FiniteRange(min=0), default=12.0, show_default=True, help="No kill after so long.")
def chaos(file: Path, port: int, json_file: Path | None, page: Path | None, **options: Any) -> None:
    """Kill replicas on this machine while clients stream; check that nothing is lost, repeated, changed or leaked."""
    from deploy.chaos.command import ChaosOptions
    from deploy.chaos.command import chaos as run
    from deploy.chaos.page import write_chaos

    check_writable(json_file, "--json")
    check_writable(page, "--page")
    checked = _at_port(load_config(file), port)
    report = progress_printer()
    with _served(checked, None, report) as client:
        figures = run(checked.application, client.base_url, ChaosOptions(**options), report)
    write_json(json_file, figures.as_dict())
    if page is not None:
        write_chaos(page, figures, _command_line(), client.model_name)
    _out.print_json(data=figures.as_dict())
    if not figures.sound:
        raise _Failure("Something was lost, repeated, changed or leaked; the figures say what.")


@main.command()
@_reliability_options
@click.option("--seconds", type=FiniteRange(min=1), default=600.0, show_default=True, help="Of each stretch.")
@click.option("--calibrate", "calibrate_s", type=FiniteRange(min=1), default=60.0, show_default=True, help="s")
def load(file: Path, port: int, json_file: Path | None, page: Path | None, **options: Any) -> None:
    """Load the service with what it can do and with twice that; check that it refuses in good order."""
    from deploy.chaos.command import LoadOptions
    from deploy.chaos.command import load as run
    from deploy.chaos.page import write_load

    check_writable(json_file, "--json")
    check_writable(page, "--page")
    checked = _at_port(load_config(file), port)
    report = progress_printer()
    with _served(checked, None, report) as client:
        stretches = run(checked.application, client.base_url, LoadOptions(**options), report)
    figures = {"stretches": [one.as_dict() for one in stretches]}
    write_json(json_file, figures)
    if page is not None:
        write_load(page, stretches, _command_line(), client.model_name)
    _out.print_json(data=figures)
    if not all(one.in_order for one in stretches):
        raise _Failure("Something else than full service and polite refusals was seen; the figures say what.")


def _at_port(file: ServeFile, port: int) -> ServeFile:
    return file.model_copy(update={"http_options": file.http_options.model_copy(update={"port": port})})


def _command_line() -> str:
    return shlex.join(["truespec", *sys.argv[1:]])


@contextmanager
def _served(
    file: ServeFile, address: str | None, report: Callable[[str], None] | None = None, *, alone: bool = False
) -> Iterator[Any]:
    """The running application, with its model fetched first when it is one of the catalogue."""
    from deploy.client import Client
    from deploy.cluster import running_app

    report = report or progress_printer()
    api_key()  # the client's: what is wrong with it is told before anything starts
    source = file.application.args.model.source
    if source in CATALOGUE and address is None:
        fetch_model(source, progress=report)
    with (
        running_app(file, report, address=address, alone=alone) as app,
        Client(app.base_url, app.model_name) as client,
    ):
        yield client


def _print_figures(figures: dict[str, Any]) -> None:
    table = Table(title="What the service measured of itself", show_header=False)
    rows = (
        ("acceptance rate", "acceptance_rate", "{:.1%}"),
        ("mean accepted length", "mean_accepted_length", "{:.2f} tokens a round"),
        ("speed, speculation on", "tokens_per_s_on", "{:.1f} tokens/s"),
        ("speed, speculation off", "tokens_per_s_off", "{:.1f} tokens/s"),
        ("first token after", "first_token_s", "{:.2f} s"),
        ("TME (1.00 = the logprobs are right)", "tme", "{:.4f}"),
        ("tokens replayed for it", "replayed_tokens", "{}"),
        ("answers computed again", "verdicts", "{0[verified]} verified, {0[suspect]} suspect"),
        ("self-check terms taken", "selfcheck_terms", "{}"),
        ("self-check alarms", "selfcheck_alarms", "{}"),
        ("breaker trips", "breaker_trips", "{}"),
        ("handoffs from prefill to decode", "handoffs", "{}"),
    )
    for label, key, form in rows:
        value = figures[key]
        table.add_row(label, "nothing was counted" if value is None else form.format(value))
    _out.print(table)


def _wait_for_interrupt() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


if __name__ == "__main__":
    sys.exit(main())
