"""The `truespec` command."""

import json
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
from rich.table import Table

from deploy.models import CATALOGUE, fetch_model
from serve_app.config import ServeFile, load_config
from speculative.errors import TruespecError

CONFIGS = Path(__file__).parent / "configs"

_err = Console(stderr=True, highlight=False)
_out = Console(highlight=False)


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
        _err.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {message}")

    return report


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
        _out.print(f"{name:<16} {entry.served_name} ({entry.licence})")


@model.command("get")
@click.argument("name")
def model_get(name: str) -> None:
    """Fetch a catalogue model into the cache and print its folder."""
    _out.print(str(fetch_model(name, progress=progress_printer())), soft_wrap=True)


@main.group()
def config() -> None:
    """Look at configurations."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def config_check(file: Path) -> None:
    """Check a configuration; each fault is told with its field and the mend."""
    load_config(file)
    _out.print(f"{file}: fine")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--address", help="Run on this Ray cluster instead of one started here (auto, or host:port).")
def serve(file: Path, address: str | None) -> None:
    """Serve the application of a configuration until interrupted."""
    from deploy.demo import curl_line

    checked = load_config(file)
    with _served(checked, address) as client:
        _err.print(f"Serving {client.model_name} at {client.base_url}. Try:\n  {curl_line(client)}")
        _err.print("Ctrl-C stops it.")
        _wait_for_interrupt()


@main.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--config", "file", type=click.Path(path_type=Path), default=CONFIGS / "demo.yaml", help="What to serve.")
def demo(json_file: Path | None, port: int, file: Path) -> None:
    """Serve a real model on this machine, talk to it, and show its metrics."""
    from deploy.demo import curl_line, run_demo

    checked = load_config(file)
    checked = checked.model_copy(update={"http_options": checked.http_options.model_copy(update={"port": port})})
    report = progress_printer()
    with _served(checked, None, report) as client:
        figures = run_demo(client, report, on_text=lambda text: _out.print(text, end="", soft_wrap=True))
        curl = curl_line(client)
    _print_figures(figures.as_dict())
    _out.print(f"\nTo talk to it yourself, run [bold]make serve[/bold] and then:\n  {curl}", soft_wrap=True)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures.as_dict(), indent=2) + "\n", encoding="utf-8")
        _err.print(f"figures written to {json_file}")


@main.command("train-drafter")
@click.option("--model", "source", required=True, help="A catalogue name, a folder or a hub id.")
@click.option("--data", default="self", show_default=True, help="self, a .jsonl of prompts, or an .npz.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Gets head and report.")
@click.option("--minutes", type=click.FloatRange(min=0), help="Train so long (60 when --steps is not given either).")
@click.option("--steps", type=click.IntRange(min=1), help="Train so many steps.")
@click.option("--draft-vocab", type=click.IntRange(min=1), default=16384, show_default=True)
@click.option("--conversations", type=click.IntRange(min=10), default=2000, show_default=True, help="With --data self.")
@click.option("--tokens-per-step", type=click.IntRange(min=1), default=1024, show_default=True, help="More on a GPU.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads.")
@click.option("--checkpoint-minutes", type=click.FloatRange(min=0), default=5.0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in --out.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here too.")
def train_drafter(source: str, out: Path, json_file: Path | None, **options: Any) -> None:
    """Train an EAGLE-3 draft head for a model, on what the model itself writes."""
    from deploy.jobs.train_drafter import TrainJob, View, run_training
    from speculative.training.loop import TrainingConfig

    minutes, steps = options.pop("minutes"), options.pop("steps")
    training = TrainingConfig(
        steps=steps,
        minutes=60.0 if minutes is None and steps is None else minutes,
        tokens_per_step=options.pop("tokens_per_step"),
        report_every_s=60 * options.pop("checkpoint_minutes"),
    )
    with View(_err) as view:
        report = run_training(TrainJob(model=source, out=out, training=training, **options), view)
    final = report["final"]["held_out"]
    _out.print(f"head in {out / 'head'}; held-out acceptance {[round(rate, 3) for rate in final['acceptance']]}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _served(file: ServeFile, address: str | None, report: Callable[[str], None] | None = None) -> Iterator[Any]:
    """The running application, with its model fetched first when it is one of the catalogue."""
    from deploy.client import Client
    from deploy.cluster import running_app

    report = report or progress_printer()
    source = file.application.args.model.source
    if source in CATALOGUE and address is None:
        fetch_model(source, progress=report)
    with running_app(file, report, address=address) as app, Client(app.base_url, app.model_name) as client:
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
