"""The GPU's day: which stages run, in which order, and what becomes of one that fails or takes too long."""

import importlib.metadata
import re
import subprocess
import sys
import time
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from serve_app.config.files import load_config
from tests.support.command_lines import fault
from tests.support.waiting import wait_for
from tools.gpu_day import CALLS, Stage, main, read_outcome, run_day, serve, stages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "pytest", "pytest-xdist")
_NOT_THERE = {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "xxhash", "httpx"}
"""Requirements of other versions of these packages."""
_NAME = re.compile(r"[\w.-]+")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment with the packages of a bare GPU machine: links to those that are installed here."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    (there,) = folder.glob("lib/python*/site-packages")
    for name in _with_requirements(PACKAGES):
        distribution = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}:
            link = there / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name in _NOT_THERE:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        waiting += [_NAME.match(one)[0] for one in required if "extra ==" not in one]  # type: ignore[index]
    return found


def python(name: str, code: str, *needs: str, budget_s: float = 60) -> Stage:
    return Stage(name, budget_s, (sys.executable, "-c", code), needs)


def run(chosen: list[Stage], folder: Path, *, again: bool = False) -> list[str]:
    said: list[str] = []
    run_day(chosen, folder, "a device", said.append, again=again)
    return said


def test_a_stage_that_passed_is_not_repeated_and_one_that_failed_is(tmp_path: Path) -> None:
    first = python("first", f"open({str(tmp_path / 'runs')!r}, 'a').write('1')")
    second = python("second", f"open({str(tmp_path / 'runs')!r}, 'a').write('2'); raise SystemExit(3)")
    for _ in range(2):
        run([first, second], tmp_path / "day")
    assert (tmp_path / "runs").read_text() == "122"
    failed = read_outcome(tmp_path / "day", "second")
    assert failed is not None and failed.exit_code == 3 and not failed.passed and failed.device == "a device"
    run([first], tmp_path / "day", again=True)
    assert (tmp_path / "runs").read_text() == "1221"


def test_a_stage_whose_needs_did_not_pass_is_left_out(tmp_path: Path) -> None:
    said = run([python("kernels", "raise SystemExit(1)"), python("bench", "pass", "kernels")], tmp_path)
    assert said[-1] == "bench: left out, because kernels did not pass"
    assert read_outcome(tmp_path, "bench") is None


def test_a_stage_over_its_budget_is_interrupted_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = subprocess.Popen.wait

    def wait_once_ready(process: Any, timeout: float | None = None) -> int:
        if timeout == budget_s:  # which begins when the stage is at work, however busy the machine
            while not (tmp_path / "ready").exists():
                time.sleep(0.02)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_ready)
    budget_s = 0.5
    code = f"""
import subprocess, sys, time
ignoring = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignoring])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
try:
    open({str(tmp_path / "ready")!r}, "w").close()
    time.sleep(600)
except KeyboardInterrupt:
    print("checkpoint written")
    raise SystemExit(130)
"""
    said = run([python("head", code, budget_s=budget_s)], tmp_path)
    assert said[-1].startswith("head: ran out of time")
    assert "checkpoint written" in (tmp_path / "head.log").read_text()
    outcome = read_outcome(tmp_path, "head")
    assert outcome is not None and outcome.exit_code is None and not outcome.passed
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    wait_for(  # killed, and reaped by init or not
        lambda: not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z", "the child's end"
    )


@pytest.mark.parametrize("rehearses", [False, True])
def test_no_stage_writes_where_an_outcome_is_kept_or_another_stage_writes_its_figures(
    tmp_path: Path, rehearses: bool
) -> None:
    known = stages(tmp_path, rehearses=rehearses)
    written = [part for stage in known for part in stage.command if part.startswith(str(tmp_path)) and ".json" in part]
    assert written and len(written) == len(set(written))
    assert not set(written) & {str(tmp_path / f"{stage.name}.json") for stage in known}


def test_every_stage_can_be_run(tmp_path: Path) -> None:
    """Each is a command line that `truespec` takes, or tests that are there, within what a lent machine takes."""
    known = stages(tmp_path)
    for stage in known:
        module, *words = stage.command[stage.command.index("-m") + 1 :]
        if module in ("deploy.cli.main", "tools.bench", "tools.train_head"):
            own = [] if module == "deploy.cli.main" else [module]
            assert fault([*own, *words]) is None, stage.name
        elif module == "pytest":
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), stage.name
        else:
            assert module in ("tools.gpu_steps", "tools.gpu_day")
        assert set(stage.needs) <= {other.name for other in known[: known.index(stage)]}, "it needs what comes before"
    budgets_s = {stage.name: stage.budget_s for stage in known}
    assert max(budgets_s.values()) <= 480
    done = set[str]()
    for names in CALLS:
        done |= set(names)
        assert {need for stage in known if stage.name in names for need in stage.needs} <= done
    assert done == budgets_s.keys() - {"head", "bench-head", "service", "bench-service"}


def test_the_service_has_both_pools_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is one that `truespec` takes."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr("os.execv", lambda program, command: commands.append(command))
    serve(tmp_path)
    assert fault(list(commands[0][3:])) is None
    config = load_config(tmp_path / "service.yaml").applications[0].args
    assert [config.pool(name).num_gpus for name in config.pool_names] == [0.5, 0.5]


def test_plugins_that_a_machine_happens_to_have_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-benchmark warns where pytest-xdist is active, and warnings are errors."""
    pytest.importorskip("triton")
    plugin = tmp_path / "site" / "foreign-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[pytest11]\nforeign = foreign\n")
    (plugin.parent / "foreign.py").write_text("def pytest_configure(config):\n    raise RuntimeError('foreign')\n")
    monkeypatch.setenv("PYTHONPATH", f"{plugin.parent}:{ROOT}")
    (kernels,) = (stage for stage in stages(tmp_path) if stage.name == "kernels")
    collected = replace(kernels, command=(*kernels.command, "--collect-only"))
    (outcome,) = run_day([collected], tmp_path, "a CPU", print)
    assert outcome.passed, (tmp_path / "kernels.log").read_text()


def in_bare_environment(python: Path, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(python.parents[1])} | environment
    return subprocess.run([str(python), *command], capture_output=True, text=True, env=own, cwd=ROOT, check=False)


def test_a_machine_with_a_gpu_needs_few_packages(bare_python: Path) -> None:
    """The tests that need a GPU are collected, and what the day runs is imported."""
    programs = "tools.gpu_day, tools.gpu_steps, tools.bench.__main__, tools.bench.workers.ours"
    absent = "; ".join(
        f"assert not find_spec({name!r})" for name in ("gguf", "pydantic", "ray", "xxhash", "hypothesis")
    )
    options = ["-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-m", "gpu", "-q", "--collect-only", "tests/gpu"]
    code = f"from importlib.util import find_spec; {absent}; import pytest, sys"
    code += f"; found = pytest.main({options}); import {programs}; sys.exit(found)"
    run = in_bare_environment(bare_python, "-c", code)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_greedy_texts_in_bfloat16" in run.stdout


def test_the_day_runs_to_its_end_without_a_gpu(bare_python: Path, tmp_path: Path) -> None:
    run = in_bare_environment(bare_python, "-m", "tools.gpu_day", "--rehearse", OUT=str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = {stage.name: read_outcome(tmp_path, stage.name) for stage in stages(tmp_path, rehearses=True)}
    assert all(outcome is not None and outcome.passed for outcome in outcomes.values())
    assert "8 steps" in (tmp_path / "profile.log").read_text()
    assert ", ray none," in (tmp_path / "bench.md").read_text()


def test_without_a_gpu_or_with_an_unknown_stage_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = CliRunner().invoke(main, [str(tmp_path / "day")])
    assert found.exit_code == 1 and "no CUDA device" in found.output
    found = CliRunner().invoke(main, [str(tmp_path / "day"), "--only", "lunch"])
    assert found.exit_code == 2 and "no stage 'lunch'" in found.output
    assert not (tmp_path / "day").exists()
