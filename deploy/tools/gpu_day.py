"""`make gpu-day`: everything that wants a GPU, in order, each part within a budget of time.

    python -m deploy.tools.gpu_day FOLDER [--only STAGE] [--again]

Each stage writes FOLDER/STAGE.log and, when it ends, FOLDER/STAGE.json. A stage that passed is not run again, so an
interrupted day continues where it stopped; one that failed or ran out of time is repeated, and training continues from
its checkpoint.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

_MODEL = "smollm2-135m"
_STOP_S = 30.0  # that a stage has to end after its budget


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the day. `needs` names stages without which its figures mean nothing."""

    name: str
    budget_s: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageResult:
    """The end of a stage.

    exit_code: None where it ran out of time.
    """

    stage: str
    exit_code: int | None
    seconds: float
    command: str
    device: str

    @property
    def passed(self) -> bool:
        """Return whether it need not run again."""
        return self.exit_code == 0


def stages(folder: Path) -> tuple[Stage, ...]:
    """The day's stages, in order; what they write lies in `folder`."""
    python = (sys.executable, "-m")
    # Several processes: nearly all of the time Triton compiles. On an H100's machine with 16 cores all took 3 minutes.
    test = (*python, "pytest", "-m", "gpu", "-n", "8", "--maxfail", "40")
    truespec = (*python, "deploy.cli.main")
    head = folder / "head"
    train = (*truespec, "train-drafter", "--model", _MODEL, "--init-from", f"{_MODEL}-eagle3", "--resume")
    bench = (*truespec, "bench", "--gpu", "--model", _MODEL, "--kinds", "chat", "--noisy")
    page = ("--markdown", str(folder / "bench.md"), "--section")
    everything_equal = ("equality",)
    return (
        Stage("kernels", 300, (*test, *(f"tests/gpu/test_{name}_on_gpu.py" for name in ("triton", "layers", "fp8")))),
        Stage(
            "graphs", 300, (*test, "tests/gpu/test_graphs_on_gpu.py", "-k", "replay_reads or share_a_pool or memory")
        ),
        Stage("equality", 420, (*test, "tests/gpu"), ("kernels", "graphs")),
        Stage(
            "head",
            540,
            (*train, "--conversations", "3000", "--tokens-per-step", "16384", "--minutes", "4", "--out", str(head)),
            everything_equal,
        ),
        Stage("bench", 540, (*bench, "--rounds", "3", *page, "shipped head"), everything_equal),
        Stage(
            "bench-head",
            300,
            (*bench, "--engines", "ours/off,ours/eagle3", "--head", str(head / "head"), *page, "head trained here"),
            ("head",),
        ),
        Stage(
            "profile",
            240,
            (*bench, "--profile", "--streams", "1,64", "--rounds", "1", *page, "profile"),
            everything_equal,
        ),
    )


def run_day(
    chosen: Sequence[Stage], folder: Path, device: str, say: Callable[[str], None], *, again: bool = False
) -> list[StageResult]:
    """Run what has not passed yet.

    Args:
        chosen: stages, in order. One whose needs did not pass is left out, with a line that says so.
        folder: where logs and outcomes lie.
        device: what the outcomes are of.
        say: takes a line of progress.
        again: run those that passed, too.

    Returns:
        The outcomes there are now, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, StageResult] = {}
    for stage in chosen:
        before = read_outcome(folder, stage.name)
        if before is not None and before.passed and not again:
            outcomes[stage.name] = before
            say(f"{stage.name}: passed before ({before.seconds:.0f} s)")
            continue
        missing = [name for name in stage.needs if not _has_passed(folder, name)]
        if missing:
            say(f"{stage.name}: left out, because {' and '.join(missing)} did not pass")
            continue
        say(f"{stage.name}: at most {stage.budget_s:.0f} s; its log is {folder / stage.name}.log")
        outcome = outcomes[stage.name] = _run(stage, folder, device)
        (folder / f"{stage.name}.json").write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")
        ended = "ran out of time" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
        say(f"{stage.name}: {ended} after {outcome.seconds:.0f} s")
    return list(outcomes.values())


def read_outcome(folder: Path, name: str) -> StageResult | None:
    """Return how a stage ended the last time; None where it has not."""
    path = folder / f"{name}.json"
    return StageResult(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _has_passed(folder: Path, name: str) -> bool:
    outcome = read_outcome(folder, name)
    return outcome is not None and outcome.passed


def _run(stage: Stage, folder: Path, device: str) -> StageResult:
    began = time.monotonic()
    with (folder / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(stage.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        exit_code: int | None = None
        try:
            exit_code = process.wait(timeout=stage.budget_s)
        except subprocess.TimeoutExpired:
            _stop(process)
    return StageResult(stage.name, exit_code, time.monotonic() - began, shlex.join(stage.command), device)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt like Ctrl-C, so that a training writes its checkpoint; then kill it with its children."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--only", multiple=True, help="Run only this stage. May be given several times.")
@click.option("--again", is_flag=True, help="Run stages that passed before, too.")
def main(folder: Path, only: tuple[str, ...], again: bool) -> None:
    """Run the GPU's day; what it writes lies in FOLDER."""
    known = stages(folder)
    unknown = sorted(set(only) - {stage.name for stage in known})
    if unknown:
        raise click.UsageError(f"--only: no stage {unknown[0]!r}; known: {', '.join(stage.name for stage in known)}.")
    if not torch.cuda.is_available():
        raise click.ClickException(f"torch {torch.__version__} sees no CUDA device here; nothing was run.")
    chosen = [stage for stage in known if not only or stage.name in only]
    outcomes = run_day(chosen, folder, torch.cuda.get_device_name(), click.echo, again=again)
    if len(outcomes) < len(chosen) or not all(outcome.passed for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
