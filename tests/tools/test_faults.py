"""The audit: every known fault is found while an engine runs, and a sound engine is left in peace."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from speculative.stats import CheckSums
from tools.faults import __main__ as command
from tools.faults import run
from tools.faults.__main__ import main
from tools.faults.mutants import FRONT_END, MUTANTS
from tools.faults.traffic import DECODERS, TABLES

FIRST = {  # the detector that is to find it, where it is not one of the terms
    "F1": "replay",
    "F2": "logprob contract",
    "F5": "replay",
    "F9": "invariant support",
    "F9 penalties are skipped where nothing else is asked for": "replay",
    "F9 a bad word is forbidden one token too late": "request limit",
    "F10 ids of other tokens beside the likeliest tokens' logprobs": "replayed alternatives",
    "F10 scored ids of the row before": "replayed alternatives",
    "F11": "replay drift (prompt)",
    "F11 the prompt's likeliest tokens go by other ids": "replayed alternatives",
    "F13": "replay",
    "F13 the handoff drops the drafter's keys and values": "acceptance floor",
    "F14 blocks of the prefix cache lack the drafter's keys and values": "acceptance floor",
    "F14": "replay",
    "F14 blocks of the prefix cache are shared with requests of another cache_salt": "invariant isolation",
    "F15": "replay",
    "F15 penalties forget what was said before a preemption": "request limit",  # bad words, too
    "F16": "invariant",
    "F17": "repeated random streams",
    "F18": "invariant metrics",
    "F19": "acceptance floor",
    "F20": "acceptance floor",
    "F20 the prefix cache outlives an update of the weights": "replay",
    "F20 running requests keep the keys and values of old weights through an update": "replay",
    "F21": "invariant stop",
    "F22": "no drafts while logprobs are asked for",
    "F23": "invariant draw",
    "F25 one token beyond the model's length": "invariant length",
    "F25 a limit that is one too high for the whole engine": "replay refused",
    "F26 q is lost at its source": "invariant q_missing",
    "F26 sampled drafts are declared deterministic": "acceptance floor",
    "F27": "replay",
    "F28": "acceptance floor",
    "F29": "replayed draws: interval",
    "F30": "transformers: replay",
    "F31": "clean run",
    "F32": "term coin",
    "F33": "invariant resolution",
    "F34": "replay",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_fault_is_found(name: str) -> None:
    finding = run.audit_mutant(name, patience=1.0)
    assert finding.delay is not None, f"nobody found it within {run.MAX_POSITIONS} positions"
    in_front = MUTANTS[name].traffic == FRONT_END
    expected = "wire" if in_front else FIRST.get(name, FIRST.get(name.split()[0]))
    if expected is not None:
        assert next(iter(finding.detectors)).startswith(expected)


def test_the_catalogue_is_covered() -> None:
    assert {mutant.fault for mutant in MUTANTS.values()} == {f"F{number}" for number in range(1, 35)}


def test_a_fault_of_the_referee_is_seen_by_nobody_who_has_it() -> None:
    (name,) = (name for name, mutant in MUTANTS.items() if mutant.place == "referee")
    assert all(detector.startswith("transformers: ") for detector in run.audit_mutant(name).detectors)


@pytest.mark.parametrize("traffic", [*TABLES, *DECODERS, FRONT_END])
def test_traffic_without_a_fault_raises_no_alarm(traffic: str) -> None:
    settings = {tuple(mutant.settings.items()) for mutant in MUTANTS.values() if mutant.traffic == traffic}
    for own in settings | {()}:
        assert not run.sound_watch(traffic, own).found


def test_sound_engines_raise_no_alarm() -> None:
    runs = run.audit_clean(12_000, serve=partial(run.serve_table, vocab_size=128))
    assert sum(one.num_positions for one in runs) >= 12_000
    assert all(not (one.alarms or one.violations) for one in runs)
    assert all(abs(sums.z) < run.MAX_Z for sums in run.pooled(runs).values())


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run.MutantAudit("F8 something", {"term f": 416, "term c": 717}, "positions", 416, 0.43, 0.45)
    lost = run.MutantAudit("F9 something else", {}, "requests", None, 0.2, 0.2)
    monkeypatch.setattr(command, "audit_mutants", lambda *_, **__: [found, lost])
    page, figures = tmp_path / "docs" / "detection.md", tmp_path / "audit.json"
    for _ in range(2):
        result = CliRunner().invoke(main, ["find", "--page", str(page), "--json", str(figures)])
        assert result.exit_code == 1 and "nobody found it" in result.output
    assert page.read_text("utf-8").count("## Faults put back") == 1, "a section is rewritten in its place"
    assert "| F8 something | term f (416), term c (717) | 416 positions | 43.0% (45.0%) |" in page.read_text("utf-8")
    assert json.loads(figures.read_text("utf-8"))[0] == asdict(found)


def test_chosen_faults_leave_the_page_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(command, "audit_mutants", lambda names, *_: asked.extend(names) or [])
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(main, ["find", "--only", "F12"])
    assert len(asked) == 2 and all(name.startswith("F12") for name in asked)
    assert not (tmp_path / "docs").exists()
    refused = CliRunner().invoke(main, ["find", "--only", "F12", "--only", "F99"])
    assert refused.exit_code == 1 and "no fault begins with 'F99'" in refused.output


def test_a_clean_run_is_written_beside_the_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, crooked = CheckSums(100, 10.0, 9.0, 40.0), CheckSums(10_000, 900.0, 0.0, 400.0)
    page, figures = tmp_path / "detection.md", tmp_path / "audit.json"
    page.write_text("# Mine\n", encoding="utf-8")
    sound = run.CleanRun("block, drawn", 1234, {}, {}, {"a": sums})
    monkeypatch.setattr(command, "audit_clean", lambda *_: [sound])
    result = CliRunner().invoke(main, ["clean", "1234", "--page", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text("utf-8")
    assert text.startswith("# Mine\n")
    assert "| block, drawn | 1,234 | none |" in text
    assert f"| `a` | 100 | {sums.mean:+.2e} | {sums.z:+.2f} |" in text
    for wrong in ({"checks": {"a": crooked}}, {"violations": {"support": 1}}):
        monkeypatch.setattr(command, "audit_clean", lambda *_, wrong=wrong: [replace(sound, **wrong)])
        result = CliRunner().invoke(main, ["clean", "1234", "--json", str(figures)])
        assert result.exit_code == 1
        assert ("standard deviations from 0" in result.output) is ("checks" in wrong)
    assert json.loads(figures.read_text("utf-8"))[0]["violations"] == {"support": 1}
