"""The GPU's day: which stages run, in which order, and what becomes of one that fails or takes too long."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deploy.tools.gpu_day import Stage, main, read_outcome, run_day, stages
from tests.support.command_lines import fault

ROOT = Path(__file__).parents[2]


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
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":  # killed, and reaped by init or not
        assert time.monotonic() < deadline, "the stage left a process behind"
        time.sleep(0.05)


def test_every_stage_can_be_run(tmp_path: Path) -> None:
    """Each is a command line that `truespec` takes, or tests that are there."""
    known = stages(tmp_path)
    for stage in known:
        module, *words = stage.command[2:]
        if module == "deploy.cli.main":
            assert fault(words) is None, stage.name
        else:
            assert module == "pytest"
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), stage.name
        assert set(stage.needs) <= {other.name for other in known[: known.index(stage)]}, "it needs what comes before"


def test_without_a_gpu_or_with_an_unknown_stage_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = CliRunner().invoke(main, [str(tmp_path / "day")])
    assert found.exit_code == 1 and "no CUDA device" in found.output
    found = CliRunner().invoke(main, [str(tmp_path / "day"), "--only", "lunch"])
    assert found.exit_code == 2 and "no stage 'lunch'" in found.output
    assert not (tmp_path / "day").exists()
