"""`python -m tools.bench` asks engines in turn, survives those that fail, and writes what it found."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from deploy.reports.progress import View
from deploy.run import quiet
from deploy.run.processes import process_tree
from tools.bench import process, rounds
from tools.bench.__main__ import main
from tools.bench.command import BenchOptions, make_plan
from tools.bench.engines import Launch, resolve
from tools.bench.plan import BenchPlan, EngineName
from tools.bench.rounds import BenchResult, run_bench
from tools.bench.workers.channel import BatchOfPrompts

pytestmark = pytest.mark.slow


def plan(*names: str, **changes: Any) -> BenchPlan:
    settings: dict[str, Any] = {
        "model": Path("none"),
        "engines": tuple(EngineName.parse(name) for name in names),
        "prompts": {"chat": [[1, 2], [3]]},
        "streams": (1,),
        "temperatures": (0.0,),
        "rounds": 2,
        "tokens": 4,
        "threads": 1,
        "dtype": "float32",
        "against": (names[0],),
    }
    return BenchPlan(**settings | changes)


class Said(View):
    """Keeps what is said, as it is said."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def say(self, message: str) -> None:
        self._lines.append(message)


def run_fakes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, settings: dict[str, dict[str, Any]], **changes: Any
) -> tuple[BenchResult, list[str], list[str]]:
    """What was found, who was asked in which order (name and seed), and the progress lines in between."""
    log = folder / "asked"
    log.touch()
    module = "tests.support.fake_bench_worker"
    launches = [
        Launch(EngineName.parse(name), module, {"name": name, "log": str(log), **own}, 3, if_killed="give it memory")
        for name, own in settings.items()
    ]
    monkeypatch.setattr(rounds, "resolve", lambda _: (launches, []))
    monkeypatch.setattr(process, "_SETTLE_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    reported: list[str] = []
    found = run_bench(plan(*settings, **changes), {}, Said(reported))
    return found, log.read_text().splitlines(), reported


def test_engines_are_asked_in_turn_on_the_same_prompts_and_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, asked, _ = run_fakes(monkeypatch, tmp_path, {"fake/a": {}, "fake/b": {}})
    assert asked == ["fake/a 0", "fake/b 0", "fake/a 1", "fake/b 1", "fake/a 2", "fake/b 2"]
    kept = [f"{sample.engine} {sample.round}" for sample in found.samples]
    assert kept == ["fake/a 0", "fake/b 0", "fake/a 1", "fake/b 1"], "the warm-up counts for nothing"
    assert all(sample.reported["memory"]["peak_mib"] > 1 for sample in found.samples)


def test_a_prefix_hit_is_measured_on_prompts_that_were_just_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench_model: Path
) -> None:
    found, asked, _ = run_fakes(monkeypatch, tmp_path, {"fake/a": {}, "fake/b": {}}, measure="prefix-hit", rounds=1)
    assert asked[-4:] == ["fake/a 1", "fake/a 1", "fake/b 1", "fake/b 1"]
    assert len(found.samples) == 2, "the first of both counts for nothing"
    monkeypatch.undo()
    settings = bench_options(bench_model, engines="ours/off,llama.cpp/plain", measure="prefix-hit")
    launches, left_out = resolve(make_plan(settings, View()))
    assert [launch.settings["engines"]["ours/off"]["engine"]["prefix_caching"] for launch in launches] == [True]
    assert [one.name for one in left_out] == ["llama.cpp/plain"]


def test_an_engine_is_stopped_with_its_children_while_others_are_asked(tmp_path: Path) -> None:
    started = {"name": "fake/a", "log": str(tmp_path / "log"), "child": True}
    launch = Launch(EngineName.parse("fake/a"), "tests.support.fake_bench_worker", started, 1)
    with process.EngineProcess(launch, tmp_path) as engine:
        assert engine.pid is not None
        family = process_tree(engine.pid)
        assert len(family) == 2 and set(map(state, family)) == {"T"}
        for _ in range(2):
            assert engine.run(BatchOfPrompts([[1]], 2, 0.0, 0))["num_tokens"] == 2
            assert set(map(state, family)) == {"T"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in family[:1]), "it has ended although it was stopped"


def state(pid: int) -> str:
    """One letter, as Linux has it: T = stopped."""
    deadline = time.monotonic() + 10
    while True:  # a signal arrives a moment after it was sent
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if found == "T" or time.monotonic() > deadline:
            return found


def test_engines_are_measured_with_each_number_of_threads(bench_model: Path) -> None:
    made = make_plan(bench_options(bench_model, engines="ours/off,ours/ngram:threads=4", threads="1,2"), View())
    launches, left_out = resolve(made)
    assert not left_out
    assert {launch.name.text: launch.threads for launch in launches} == {
        "ours/off:threads=1": 1,
        "ours/off:threads=2": 2,
        "ours/ngram:threads=4": 4,
    }
    best_of = bench_options(bench_model, engines="ours/off,ours/ngram", threads="1,2", against="ours/ngram")
    assert make_plan(best_of, View()).against == ("ours/ngram:threads=1", "ours/ngram:threads=2")


BUSY = "import time; began = time.process_time()\nwhile time.process_time() < began + 1: pass"


def test_only_the_work_of_strangers_counts_as_others() -> None:
    before, busy = quiet.others_s(), quiet.busy_s()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    others, all_of_us = quiet.others_s(), quiet.busy_s()
    assert None not in (before, busy, others, all_of_us)
    assert all_of_us - busy - (others - before) > 0.9, "a child's work is this process's own"
    read, write = os.pipe()  # it ends when the last process that has it does
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BUSY!r}], close_fds=False)"
    subprocess.run([sys.executable, "-c", orphan], pass_fds=[write], check=True)
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
    assert quiet.others_s() - others > 0.9, "one that is nobody's child is a stranger"


def test_a_page_of_a_noisy_machine_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench_model: Path
) -> None:
    page = tmp_path / "page.md"
    wanted = ["--engines", "ours/off", "--streams", "1", "--temperatures", "0", "--rounds", "1", "--markdown", page]
    monkeypatch.setattr(quiet.Others, "now", lambda: 0.5)
    reported = bench(bench_model, *wanted)
    assert reported.exit_code == 1 and "before anything was started" in reported.output and "--noisy" in reported.output
    monkeypatch.setattr(quiet.Others, "now", lambda: 0.0)
    monkeypatch.setattr(quiet.Others, "cores", lambda self: 0.5)
    reported = bench(bench_model, *wanted, "--json", tmp_path / "all.json")
    assert reported.exit_code == 1 and "while this was measured" in reported.output
    assert not page.exists()
    assert json.loads((tmp_path / "all.json").read_text())["samples"], "what was measured is kept"
    reported = bench(bench_model, *wanted, "--noisy")
    assert reported.exit_code == 0 and "**The machine was not quiet**" in page.read_text()


@pytest.mark.parametrize(
    ("dies", "words"),
    [
        (None, "it would not"),
        (3, "status 3: a last word"),
        ("SIGKILL", "SIGKILL ended it (give it memory): a last word"),
    ],
)
def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: int | str | None, words: str
) -> None:
    fakes = {"fake/a": {}, "fake/b": {"fails_at": 3, "dies": dies}, "fake/c": {"fails_at": 0}}
    found, _, reported = run_fakes(monkeypatch, tmp_path, fakes)
    assert {one.name: words in one.reason for one in found.left_out} == {"fake/b": True, "fake/c": False}
    assert any("left out: fake/c: it did not start: ValueError: no such fake" in line for line in reported)
    counts = [sample.engine for sample in found.samples]
    assert (counts.count("fake/a"), counts.count("fake/b")) == (2, 1)


def test_engines_of_the_same_weights_share_a_process_when_asked(bench_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    names = ["ours/off:weights=float32", "ours/ngram:k=2:weights=float32", "ours/off"]
    options = ["--engines", ",".join(names), "--streams", "2", "--temperatures", "0", "--rounds", "1", "--tokens", "60"]
    result = bench(bench_model, *options, "--together", "--json", out)
    assert result.exit_code == 0, result.output
    assert f"starting {names[0]}, {names[1]}\n" in result.output
    assert f"starting {names[2]}\n" in result.output
    samples = {one["engine"]: one for one in json.loads(out.read_text())["samples"]}
    assert list(samples) == names
    assert samples[names[0]]["token_ids"] == samples[names[1]]["token_ids"]
    assert samples[names[0]]["drafted_per_position"] != samples[names[1]]["drafted_per_position"], (
        "each its own drafter"
    )


def bench(model: Path, *options: object) -> Result:
    fixed = ["--model", model, "--dtype", "float32", "--threads", 1, "--kinds", "chat", "--tokens", 6]
    return CliRunner().invoke(main, [str(one) for one in [*fixed, *options]])


def test_the_command_compares_real_engines(bench_model: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "figures.json", tmp_path / "page.md"
    options = ["--engines", "ours/off,ours/draft_model:k=2,ours/eagle3", "--draft-model", str(bench_model)]
    options += ["--streams", "2", "--temperatures", "0", "--rounds", "1", "--json", str(out)]
    result = bench(bench_model, *options, "--markdown", page, "--section", "two words", "--noisy")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert len(found["samples"]) == 2
    answers: dict[tuple[int, int], list[Any]] = {}
    for sample in found["samples"]:
        assert sample["num_tokens"] == 6 * sample["streams"]
        assert sample["decode_tokens_per_s"] > 0
        answers.setdefault((sample["streams"], sample["round"]), []).append(sample["token_ids"])
    assert all(same == [same[0]] * 2 for same in answers.values()), "greedy answers of one model differ"
    assert {one["engine"] for one in found["left_out"]} == {"ours/eagle3"}
    assert "--head" in found["left_out"][0]["reason"]
    text = page.read_text()
    assert text.count("<!-- bench: two words -->") == 1
    assert "| ours/draft_model:k=2 |" in text and f"commit {found['provenance']['commit']}" in text


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--engines", "ours"], "family/variant"),
        (["--engines", "theirs/off"], "no engine 'theirs'"),
        (["--engines", "ours/off:k=2"], "unknown k"),
        (["--engines", "ours/ngram:k=65"], "num_draft_tokens"),
        (["--engines", "vllm/best"], "vllm has off, ngram"),
        (["--engines", "ours/off", "--against", "ours/ngram"], "not among --engines"),
        (["--engines", "ours/off,ours/off"], "one twice"),
        (["--engines", "ours/off", "--streams", "1,0"], "above 0"),
        (["--engines", "ours/off", "--kinds", "poems"], "no prompts for poems"),
        (["--engines", "ours/off", "--temperatures", "nan"], "--temperatures"),
        (["--engines", "vllm/off", "--vllm-python", "/no/python"], "cannot be run"),
        (["--engines", "vllm/off", "--vllm-python", "/usr/bin/false"], "vllm is not installed in /usr/bin/false"),
        (["--engines", "served/ours:proxy=nginx"], "proxy must be ray or haproxy"),
    ],
)
def test_wrong_options_are_reported_before_anything_starts(
    bench_model: Path, options: list[str], reported: str
) -> None:
    result = bench(bench_model, *options)
    assert result.exit_code == 1, result.output
    assert reported in " ".join(result.output.split())


def bench_options(model: Path, **changes: Any) -> BenchOptions:
    given = {"model": str(model), "kinds": "chat", "temperatures": "0", "rounds": 1, "tokens": 4, "threads": "1"}
    given |= {"dtype": "bfloat16", "measure": "decode", "gpu": False, "section": "any", "streams": "1"}
    return BenchOptions(**dict.fromkeys(BenchOptions.__annotations__) | given | changes)


def test_a_gpu_computes_with_graphs_and_without(monkeypatch: pytest.MonkeyPatch, bench_model: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engines = "ours/off,ours/ngram:graphs=no"
    launches, _ = resolve(make_plan(bench_options(bench_model, gpu=True, engines=engines), View()))
    made = [launch.settings["engines"][launch.name.text]["engine"] for launch in launches]
    assert [(one["device"], one["cuda_graphs"]) for one in made] == [("auto", None), ("auto", False)]


@pytest.mark.parametrize("worker", ["llama_engine", "vllm_engine"])
def test_workers_of_other_environments_import_nothing_of_ours_but_deploy(worker: str) -> None:
    """Those environments hold the peer, and a link to `deploy`."""
    waiting, read = [f"tools.bench.workers.{worker}"], set[str]()
    while waiting:
        module = waiting.pop()
        source = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        read.add(module)
        imported = re.findall(r"^(?:from|import) ([\w.]+)", source, re.M)
        assert not [name for name in imported if name.split(".")[0] in ("serve_app", "speculative", "dashboards")], (
            module
        )
        waiting += [name for name in imported if name.startswith("deploy.") and name not in read]
