"""`make gpu-day`: a quarter of an hour on one GPU, in six calls, each of which decides something.

    python -m tools.gpu_day [FOLDER] [--call NUMBER]... [--rehearse]
    python -m tools.gpu_day --prepare

A lent machine may have no more than x86-64, Python 3.12 and `THERE`, no network, and 64 MiB a transfer. `--prepare`,
elsewhere, packs what the service needs beside these in parts, one for each call up to its own, and prints the calls. A
call's log is FOLDER/call-NUMBER.log, by default in the folder that the variable OUT names.
"""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from packaging.requirements import Requirement

from speculative.model.catalogue import CATALOGUE
from tools.bench.workers.channel import BatchOfPrompts
from tools.bench.workers.http_load import ServerLoad
from tools.faults.tiny import write_tiny_pair, write_tiny_tokenizer
from tools.provenance import COMMIT, commit, mark

ROOT = Path(__file__).parents[1]
PARTS = Path("build/gpu-parts")
_SITE = PARTS / "site"  # of the packages that were carried
_MODEL = "smollm2-135m"
_HEADS = Path("serve_app/heads")
THERE = ("torch", "triton", "transformers", "numpy", "safetensors", "xxhash", "pytest", "pytest-xdist")
NOT_THERE = {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "httpx"}  # of new versions of these
_NEVER_LOADED = ("ray/jars", "ray/dashboard/client", "ray/**/*.map")
_SERVICE_CALL = 4
_HOST, _PORT = "127.0.0.1", 8000
_STOP_S = 30  # that a stage has to end after its budget
_TIMED_OUT = (124, 137)  # of `timeout`: interrupted, and killed


Stages = dict[str, tuple[int, tuple[str, ...]]]
"""Names with the seconds that a command may take, and the command."""


def calls(folder: Path, *, rehearses: bool = False) -> tuple[Stages, ...]:
    """The stages of each call, of which docs/gpu.md says what they decide; rehearses: of a tiny model on a CPU."""
    python = (sys.executable, "-m")
    alone = (*python, "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-m", "gpu")
    test = (*alone, "-p", "xdist", "-n", "2" if rehearses else "12", "--maxfail", "40")
    new, *others = (f"tests/gpu/test_{name}_on_gpu.py" for name in ("graphs", "triton", "layers", "fp8"))
    # Without the allocator's cache, a read past a tensor is not within memory of its own.
    memcheck: tuple[str, ...] = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
    memcheck += () if rehearses else ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")

    def measure(*parts: str) -> tuple[str, ...]:
        return (*python, "tools.gpu_steps", *parts, *(("--shape", "tiny") if rehearses else ()))

    def part(name: str) -> tuple[str, ...]:
        return (*python, "tools.gpu_day", str(folder), "--part", name, *(("--rehearse",) if rehearses else ()))

    interpreted = ("env", "TRITON_INTERPRET=1") if rehearses else ()
    return (
        {
            "new tests": (70, (*test, new)),
            "tests": (70, (*test, *others)),
            "attention": (30, (*interpreted, *measure("attention"))),
        },
        {"steps": (140, measure("steps")), "mixed": (40, measure("mixed"))},
        {
            "handoff": (30, measure("handoff")),
            "memcheck": (40, (*memcheck, *alone, others[0], "-k", "prompts and heads4 and dtype1")),
        },
        {"service": (85, part("service")), "demo": (80, part("demo"))},
        {"fp8": (60, measure("fp8"))},
        {"peer": (95, measure("peer"))},
    )


# -- what is carried ------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Pack what the service needs on a bare machine, and say what to run."""
    shutil.rmtree(PARTS, ignore_errors=True)
    PARTS.mkdir(parents=True)
    COMMIT.write_text(commit(), encoding="utf-8")  # a tree that travels has no history
    names = requirements(("truespec",)) - (requirements(THERE) - NOT_THERE) - {"truespec"}
    entry = CATALOGUE[_MODEL]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _pip(
            "install",
            *(f"{one}=={metadata.version(one)}" for one in sorted(names)),
            f"--target={folder}",
            "--no-compile",
        )
        for pattern in _NEVER_LOADED:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        _pip("download", f"{entry.package}=={entry.version}", f"--dest={folder}")
        for path in [*_HEADS.glob("*/*.safetensors")]:  # too large to travel with every call
            (folder / path).parent.mkdir(parents=True)
            shutil.move(path, folder / path)
        archive = packed(folder)
    size = -(-len(archive) // _SERVICE_CALL)
    for number, stages in enumerate(calls(Path()), 1):
        carried = f"carry {COMMIT}"
        if part := archive[(number - 1) * size : number * size]:
            (PARTS / f"part.{number}").write_bytes(part)
            carried += f" and {PARTS}/part.{number}, {len(part) >> 20} MiB"
        seconds = sum(budget_s for budget_s, _ in stages.values())
        click.echo(f"python -m tools.gpu_day --call {number}; at most {seconds} s; {carried}")
    click.echo(f"Afterwards, `git checkout {_HEADS}` brings back the weights that were packed.")


def unpack() -> None:
    """Put the parts together that came, and let what is started find the packages in them."""
    if pieces := sorted(PARTS.glob("part.*")):
        archive = io.BytesIO(b"".join(path.read_bytes() for path in pieces))
        with tarfile.open(fileobj=archive, mode="r:gz") as found:
            found.extractall(_SITE, filter="tar")
        shutil.copytree(_SITE / _HEADS, _HEADS, dirs_exist_ok=True)
    if _SITE.exists():
        sys.path.insert(1, str(_SITE.resolve()))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(_SITE.resolve())])
        os.environ.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(_SITE.resolve()))


def requirements(names: Iterable[str]) -> set[str]:
    """These packages and all that they need here, of what is installed."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines = [] if name in found else metadata.requires(name) or []
            found.add(name)
            needed = map(Requirement, lines)
            wanted = [{"extra": ""}, {"extra": "serve"}]  # Ray's
            waiting += [one.name for one in needed if not one.marker or any(map(one.marker.evaluate, wanted))]
    return found


def _pip(command: str, *packages: str) -> None:
    """Run pip for the machine that is lent."""
    platforms = [f"--platform=manylinux{one}_x86_64" for one in ("_2_35", "_2_31", "_2_28", "_2_27", "_2_17", "2014")]
    own = ("--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms)
    subprocess.run([sys.executable, "-m", "pip", command, *own, *packages], check=True)


def packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        archive.add(folder, ".")
    return packed.getvalue()


# -- the service ----------------------------------------------------------------------------------------------------


def serve(folder: Path, model: str, gpus: int) -> None:
    """Serve a model as users do, ask it, load it, and keep what it says of itself."""
    from deploy.exchange.client import Client, ServiceError
    from deploy.run.demo import Service

    began, url = time.monotonic(), f"http://{_HOST}:{_PORT}"
    server = subprocess.Popen([sys.executable, "-m", "deploy.cli.main", "serve", model, "--gpus", str(gpus)])
    try:
        name, client = "", Client(url)
        while not name:
            if server.poll() is not None:
                raise click.ClickException("The service ended before it was ready; its log is above.")
            with contextlib.suppress(ServiceError):
                name = json.loads(client.fetch("/v1/models"))["data"][0]["id"]
            time.sleep(0.5)
        click.echo(f"{name} is ready after {time.monotonic() - began:.1f} s")
        asked: dict[str, Any] = {"model": name, "prompt": "The capital of France is", "max_tokens": 48}
        for wish in ({"stream": True}, {"logprobs": 3}, {"verify": True}):
            reply = client.post(asked | wish)
            click.echo(f"{wish}: {reply.reported()}: {reply.content.decode()[-800:] or reply.reply.first.text}")
        prompts = [[20 + number] * 64 for number in range(64 if gpus else 8)]
        load = BatchOfPrompts(prompts, 256, temperature=1.0, seed=0)
        found = ServerLoad(_HOST, _PORT, name).run(load)
        first, speed = statistics.median(found["first_token_s"]), found["num_tokens"] / found["wall_s"]
        click.echo(f"{len(prompts)} streams: {speed:.0f} tokens/s, first tokens after {first:.2f} s")
        time.sleep(10)  # for the replays
        metrics = Service(url, name).metrics()
        click.echo(
            f"TME {metrics['tme']}, verdicts {metrics['verdicts']}, self-checks' alarms {metrics['selfcheck_alarms']}"
        )
        (folder / "status.json").write_text(client.fetch("/status"), encoding="utf-8")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def demo(folder: Path) -> None:
    """Run the demo with both pools on this machine's one GPU."""
    text, path = files("deploy").joinpath("configs/demo.yaml").read_text(encoding="utf-8"), folder / "demo.yaml"
    path.write_text(text.replace("replicas: 1\n", "replicas: 1\n          num_gpus: 0.5\n"), encoding="utf-8")
    command = (sys.executable, "-m", "deploy.cli.main", "demo", "--config", str(path))
    os.execv(command[0], (*command, "--json", str(folder / "demo-figures.json")))


# -- running --------------------------------------------------------------------------------------------------------


def run_call(number: int, stages: Stages, folder: Path, *, longer: int = 1) -> bool:
    """Run all stages of a call, whatever becomes of one of them, and return whether all passed."""
    codes, environment = list[int](), os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a foreign one may warn
    with (folder / f"call-{number}.log").open("w", encoding="utf-8") as log:
        print(mark(), file=log)
        for name, (budget_s, command) in stages.items():
            print(f"== {name}: {shlex.join(command)}", file=log, flush=True)
            limited = ("timeout", "--signal=INT", f"--kill-after={_STOP_S}", str(budget_s * longer), *command)
            began = time.monotonic()
            codes.append(subprocess.run(limited, stdout=log, stderr=log, env=environment, check=False).returncode)
            end = "ran out of time" if codes[-1] in _TIMED_OUT else f"ended with {codes[-1]}"
            end = f"{name}: {end} after {time.monotonic() - began:.0f} s"
            print(f"== {end}", file=log, flush=True)
            click.echo(f"{end}; {log.name}")
    return not any(codes)


def _run_part(part: str, folder: Path, *, rehearses: bool) -> None:
    """Run a stage that is no other program's."""
    unpack()
    if rehearses and (part == "demo" or find_spec("ray") is None):
        return click.echo("left out: the demo on one GPU, and the service where Ray is not installed")
    if part == "demo":
        return demo(folder)
    model = _MODEL
    if rehearses:
        target, _ = write_tiny_pair(folder / "tiny")
        write_tiny_tokenizer(target, chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
        model = str(target)
    return serve(folder, model, 0 if rehearses else 1)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--call", "numbers", multiple=True, type=click.IntRange(1, 6), help="Only this one. Several: these.")
@click.option("--rehearse", is_flag=True, help="Without a GPU: run the same commands, of a tiny model on the CPU.")
@click.option("--prepare", "prepares", is_flag=True, help="Pack what a machine without a network lacks.")
@click.option("--part", type=click.Choice(["service", "demo"]), hidden=True)
def main(folder: Path | None, numbers: tuple[int, ...], *, rehearse: bool, prepares: bool, part: str | None) -> None:
    """Run the GPU's day; what it writes lies in FOLDER, by default the folder that the variable OUT names."""
    if prepares:
        return prepare()
    if part is None and not rehearse and not torch.cuda.is_available():
        raise click.ClickException(f"torch {torch.__version__} sees no CUDA device here; nothing was run.")
    folder = folder or Path(os.environ.get("OUT") or "build/gpu-day")
    folder.mkdir(parents=True, exist_ok=True)
    if part is not None:
        return _run_part(part, folder, rehearses=rehearse)
    known = dict(enumerate(calls(folder, rehearses=rehearse), 1))
    longer = 10 if rehearse else 1  # on a few cores
    passed = [run_call(one, known[one], folder, longer=longer) for one in numbers or known]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
