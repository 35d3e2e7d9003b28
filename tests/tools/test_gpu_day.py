"""The GPU's day: its calls, what they carry, and what becomes of a stage that fails or takes too long."""

import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

from serve_app.config.files import load_config
from tests.support.command_lines import fault
from tests.support.pretended_cuda import PretendedCuda
from tests.support.triton_interpreter import needs_triton
from tools import gpu_day, gpu_steps
from tools.gpu_day import NOT_THERE, THERE, calls, main, requirements, run_call

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment with the packages of a bare GPU machine: links to those that are installed here."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    (there,) = folder.glob("lib/python*/site-packages")
    for name in requirements(THERE) - NOT_THERE:
        distribution = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}:
            link = there / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def test_every_call_can_be_run_and_all_together_take_a_quarter_of_an_hour(tmp_path: Path) -> None:
    """Each is tests that are there, or a program of ours; start and transfers take 150 seconds more."""
    stages = {name: stage for call in calls(tmp_path) for name, stage in call.items()}
    assert sum(budget_s for budget_s, _ in stages.values()) <= 900 - 150
    for name, (_, command) in stages.items():
        module, *words = command[command.index("-m") + 1 :]
        if module == "pytest":
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), name
        else:
            program = {"tools.gpu_steps": gpu_steps.main, "tools.gpu_day": main}[module]
            program.make_context(module, words)


def test_a_stage_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    codes = {"late": code, "faulty": "1/0", "sound": "print(7)"}
    stages = {name: (5, (sys.executable, "-c", own)) for name, own in codes.items()}
    assert not run_call(2, stages, tmp_path)
    ends = [one.split(" after")[0] for one in capsys.readouterr().out.splitlines()]
    assert ends == ["late: ran out of time", "faulty: ended with 1", "sound: ended with 0"]
    log = (tmp_path / "call-2.log").read_text()
    assert "begun" in log and "ZeroDivisionError" in log and "\n7\n" in log
    assert "commit " in log.splitlines()[0], "figures name it"


def test_what_was_packed_in_parts_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    head = tmp_path / "packed" / "serve_app" / "heads" / "h" / "model.safetensors"
    head.parent.mkdir(parents=True)
    head.write_bytes(bytes(range(256)) * 100)
    head.chmod(0o755)
    archive = gpu_day.packed(tmp_path / "packed")
    gpu_day.PARTS.mkdir(parents=True)
    for number, (begin, end) in enumerate(((0, 100), (100, 101), (101, None)), 1):
        (gpu_day.PARTS / f"part.{number}").write_bytes(archive[begin:end])
    gpu_day.unpack()
    back = tmp_path / "serve_app" / "heads" / "h" / "model.safetensors"
    assert back.read_bytes() == head.read_bytes() and back.stat().st_mode & 0o111


def test_the_demo_has_both_pools_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is one that `truespec` takes."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr("os.execv", lambda program, command: commands.append(command))
    gpu_day.demo(tmp_path)
    assert fault(list(commands[0][3:])) is None
    config = load_config(tmp_path / "demo.yaml").applications[0].args
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
    _, tests = calls(tmp_path)[0]["tests"]
    stages = {"tests": (60, (*tests, "--collect-only"))}
    assert run_call(1, stages, tmp_path), (tmp_path / "call-1.log").read_text()


def in_bare_environment(python: Path, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(python.parents[1])} | environment
    return subprocess.run([str(python), *command], capture_output=True, text=True, env=own, cwd=ROOT, check=False)


def test_a_machine_with_a_gpu_needs_few_packages(bare_python: Path) -> None:
    """The tests that need a GPU are collected, and what the day runs is imported."""
    programs = "tools.gpu_day, tools.gpu_steps, tools.bench.__main__, tools.bench.workers.ours"
    absent = "; ".join(f"assert not find_spec({name!r})" for name in ("gguf", "pydantic", "ray", "hypothesis"))
    options = ["-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-m", "gpu", "-q", "--collect-only", "tests/gpu"]
    code = f"from importlib.util import find_spec; {absent}; import pytest, sys"
    code += f"; found = pytest.main({options}); import {programs}; sys.exit(found)"
    run = in_bare_environment(bare_python, "-c", code)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_greedy_texts_in_bfloat16" in run.stdout


def test_the_day_runs_to_its_end_without_a_gpu(bare_python: Path, tmp_path: Path) -> None:
    run = in_bare_environment(bare_python, "-m", "tools.gpu_day", "--rehearse", OUT=str(tmp_path))
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    for part in (
        "attention of",
        "tiny 2 x 40, eagle3",
        "beside a prompt of",
        "handoff of",
        "tiny in fp8 Load(",
        "a step",
    ):
        assert part in logs, part


@needs_triton
@pytest.mark.parametrize("part", ["attention", "steps", "mixed", "handoff", "fp8"])
def test_a_part_runs_on_a_pretended_gpu(part: str) -> None:
    with PretendedCuda():
        found = CliRunner().invoke(gpu_steps.main, [part, "--shape", "tiny"], catch_exceptions=False)
    assert found.exit_code == 0 and len(found.output.splitlines()) > 1


def test_without_a_gpu_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = CliRunner().invoke(main, [str(tmp_path / "day")])
    assert found.exit_code == 1 and "no CUDA device" in found.output
    assert not (tmp_path / "day").exists()
