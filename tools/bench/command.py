"""`python -m tools.bench`: from the command line's options to a plan, and from the result to files."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from deploy.options import check_writable, write_json
from deploy.reports.progress import View
from deploy.run.models import find_model
from deploy.run.quiet import MOST_CORES
from serve_app.backends.base import SHIPPED_HEADS
from speculative.config import models_folder
from speculative.errors import ConfigError
from speculative.model.catalogue import CATALOGUE, download_gguf
from speculative.model.loading import resolve_model
from tools.bench.engines import LLAMA, VLLM, default_names
from tools.bench.plan import BenchPlan, EngineName, Measure
from tools.bench.prompts import read_prompts
from tools.bench.report import print_report, write_markdown
from tools.bench.rounds import BenchResult, run_bench
from tools.provenance import provenance


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The command's options as they were given; lists are separated by commas."""

    model: str
    engines: str | None
    kinds: str
    prompts: Path | None
    streams: str
    temperatures: str
    rounds: int
    tokens: int
    threads: str | None
    dtype: str
    against: str | None
    measure: Measure
    together: bool
    gpu: bool
    head: str | None
    draft_model: str | None
    gguf: Path | None
    vllm_python: str | None
    llama_python: str | None
    json_file: Path | None
    markdown: Path | None
    section: str
    noisy: bool


def run_command(options: BenchOptions, view: View, console: Console) -> BenchResult:
    """Measure, print, and write what was asked for. Raises ConfigError: an option is wrong, a file cannot be written,
    no engine could be started, or the machine was not quiet and a page was to be written without `--noisy`."""
    for_page = options.markdown is not None and not options.noisy
    check_writable(options.json_file, "--json")
    check_writable(options.markdown, "--markdown")
    plan = make_plan(options, view)
    machine = provenance()
    if for_page:
        _require_quiet(machine["others_before"], "before anything was started")
    with view:
        found = run_bench(plan, machine, view)
    print_report(found, console)
    write_json(options.json_file, found.as_dict(), indent=1)
    if options.json_file is not None:
        view.say(f"every sample is in {options.json_file}")
    if for_page:
        _require_quiet(found.provenance["others_meanwhile"], "while this was measured")
    if options.markdown is not None:
        write_markdown(found, options.markdown, options.section)
        view.say(f"section {options.section!r} is in {options.markdown}")
    return found


def _require_quiet(others_cores: float | None, when: str) -> None:
    if others_cores is not None and others_cores > MOST_CORES:
        raise ConfigError(
            f"--markdown: other processes (or other machines on this host) used {others_cores:.2f} cores {when}, more "
            f"than {MOST_CORES:g}: these figures would not hold. Stop them, or give --noisy to write them with a mark."
        )


def make_plan(options: BenchOptions, view: View) -> BenchPlan:
    """Check the options, and fetch and encode what they name. Raises ConfigError: one is wrong."""
    if options.gpu and not torch.cuda.is_available():
        raise ConfigError(
            "--gpu: torch sees no CUDA device here; run it on a machine that has one, with a CUDA build of torch "
            f"(this one is {torch.__version__})."
        )
    names = _words(options.engines) or default_names(options.head, options.draft_model)
    against = _words(options.against) or names[:1]
    threads = [len(os.sched_getaffinity(0))]
    if options.threads is not None:
        threads = [_integer("--threads", word) for word in _some_words("--threads", options.threads)]
    if len(threads) > 1:
        names, against = _with_threads(names, threads), _with_threads(against, threads)
    engines = tuple(EngineName.parse(name) for name in names)
    folder = find_model(options.model, view)
    gguf = options.gguf
    if gguf is None and any(engine.family == LLAMA for engine in engines):
        gguf = _find_gguf(options.model, folder, view)
    pythons = {LLAMA: options.llama_python, VLLM: options.vllm_python}
    return BenchPlan(
        model=folder,
        engines=engines,
        prompts=read_prompts(folder, tuple(_some_words("--kinds", options.kinds)), options.prompts),
        streams=tuple(_integer("--streams", word) for word in _some_words("--streams", options.streams)),
        temperatures=tuple(_temperature(word) for word in _some_words("--temperatures", options.temperatures)),
        rounds=options.rounds,
        tokens=options.tokens,
        threads=threads[0],
        dtype=options.dtype,
        against=tuple(against),
        measure=options.measure,
        together=options.together,
        gguf=gguf,
        head=options.head and str(resolve_model(options.head, SHIPPED_HEADS)),
        draft_model=options.draft_model and str(resolve_model(options.draft_model)),
        pythons={family: python for family, python in pythons.items() if python is not None},
    )


def _find_gguf(model: str, folder: Path, view: View) -> Path | None:
    """The GGUF file beside a model's weights, or that of a catalogue model, fetched once into the cache; else None.
    Raises FetchFailed: it could not be downloaded."""
    beside = sorted(folder.glob("*.gguf"))
    if beside:
        return beside[0]
    if model not in CATALOGUE:
        return None
    kept = models_folder().parent / "gguf" / Path(CATALOGUE[model].member).name
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
            shutil.move(download_gguf(CATALOGUE[model], Path(temporary), view), kept)
    return kept


def _with_threads(names: Sequence[str], threads: Sequence[int]) -> list[str]:
    """Each engine once with each number of threads, unless its name gives one."""
    return [
        given
        for name in names
        for given in ([name] if ":threads=" in name else [f"{name}:threads={n}" for n in threads])
    ]


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _some_words(option: str, text: str) -> list[str]:
    words = _words(text)
    if not words:
        raise ConfigError(f"{option} names nothing; give at least one, or leave it out.")
    return words


def _integer(option: str, word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{option} must be whole numbers above 0, separated by commas; got {word!r}.")
    return int(word)


def _temperature(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ConfigError(f"--temperatures must be between 0 and 100, separated by commas; got {word!r}.")
    return value
