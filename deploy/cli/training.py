"""`truespec train-drafter`."""

from pathlib import Path
from typing import Any

import click

from deploy.cli.console import a_file, err, say
from deploy.options import FiniteRange, check_writable, write_json


@click.command("train-drafter")
@click.option("--model", "source", required=True, help="The model: a catalogue name, a folder or a hub id.")
@click.option(
    "--kind", type=click.Choice(["eagle3", "mtp"]), default="eagle3", show_default=True, help="Train this kind of head."
)
@click.option("--init-from", help="Start from this head (a folder or name) instead of from the model's last layer.")
@click.option(
    "--data",
    default="self",
    show_default=True,
    help="Train on this data: self (the model's own answers), a .jsonl file of prompts, or an .npz file.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Write head and report here."
)
@click.option(
    "--minutes",
    type=FiniteRange(min=0, min_open=True),
    help="Train for this long (60 when --steps is not given either).",
)
@click.option("--steps", type=click.IntRange(min=1), help="Train for this many steps.")
@click.option(
    "--draft-vocab",
    type=click.IntRange(min=1),
    default=16384,
    show_default=True,
    help="Let a new EAGLE-3 head draft only this many of the commonest tokens; an MTP loss is over them.",
)
@click.option(
    "--conversations",
    type=click.IntRange(min=10),
    default=2000,
    show_default=True,
    help="With --data self: generate this many conversations.",
)
@click.option(
    "--learning-rate", type=FiniteRange(min=1e-9), help="The peak learning rate: 1e-3, or 3e-4 with --init-from."
)
@click.option(
    "--tokens-per-step",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Tokens of a training step; use more on a GPU.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Compute with this many CPU threads."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Data type of the matrix products; auto is float32 on a CPU without bfloat16 instructions.",
)
@click.option(
    "--checkpoint-minutes",
    type=FiniteRange(min=0),
    default=5.0,
    show_default=True,
    help="Write a checkpoint this often.",
)
@click.option("--resume", is_flag=True, help="Continue from the checkpoint in --out; repeat the other options.")
@click.option("--json", "json_file", type=a_file, help="Write the report to this file, too.")
def train_drafter(source: str, out: Path, json_file: Path | None, **options: Any) -> None:
    """Train a draft head for a model, on the model's own answers."""
    from deploy.jobs.train_drafter import TrainJob, run_training
    from deploy.reports.progress import View
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
    with View(err) as view:
        report = run_training(TrainJob(model=source, out=out, training=training, **options), view)
    best, final = report["best"], report["final"]
    say(f"head in {out / 'head'}, of step {best['step']}; held-out acceptance {_rates(best)}")
    if best["step"] != final["step"]:
        say(f"warning: training went on to step {final['step']} and made it worse: {_rates(final)}", err)
    write_json(json_file, report)


def _rates(point: dict[str, Any]) -> list[float]:
    """Held-out acceptance at each draft position, of a point of a training's report."""
    return [round(rate, 3) for rate in point["held_out"]["acceptance"]]
