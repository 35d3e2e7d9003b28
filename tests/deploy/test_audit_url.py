"""The audit from outside: a sound server passes, faults are found and named, and what cannot be asked is reported."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from deploy.cli.main import main
from deploy.exchange.client import Client
from deploy.exchange.dialect import Ask, AuditFailed, find_dialect
from deploy.probes.audit import Audit, run_audit
from deploy.probes.command import BUDGETS
from deploy.probes.lab import QUICK, Lab
from deploy.probes.page import html_page
from deploy.probes.probes import FALSE_ALARMS, PROBES, ProbeVerdict, Trial, delta_per_test
from deploy.probes.reference import Reference
from deploy.probes.replay import check_logprobs
from deploy.probes.statistics import binomial_tail, departs, mean_departs, too_many
from serve_app.backends.base import Replayed
from serve_app.referee.tolerance import Tolerance
from speculative.errors import ConfigError
from speculative.request import SamplingParams
from tests.support.fake_audited import DIES, FakeAudited, Reply, uniform_reply
from tools.faults.mutants import MUTANTS
from tools.faults.outside import audit_faulty, faulty_servers, servable
from tools.faults.tiny import write_tiny_pair

NAMED = {  # a fault of each kind that can be seen over HTTP, and the probes that are to find and name it
    "F2 scored ids gathered from the logits": ["scored ids"],
    "F5 a reused slot's last token after a handoff": ["replayed logprobs", "distribution of the tokens"],
    "F9 sampling parameters skipped on drafted positions": ["sampling parameters"],
    "F10 logprob 0 for every token": ["replayed logprobs", "logprob contract"],
    "F10 ids of other tokens beside the likeliest tokens' logprobs": ["replayed logprobs"],
    "F11 prompt logprobs damaged at chunk borders": ["prompt logprobs"],
    "F12 the first draft is committed unverified": ["distribution of the tokens"],
    "F17 unseeded requests share a stream": ["unseeded answers"],
    "F18 every draft counts as accepted": ["counters"],
    "F21 a stop inside an accepted run is overlooked": ["ends"],
}
SMALL = replace(QUICK, answers=3, twins=3, first_tokens=60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("audited"))


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> Reference:
    return Reference(folders[0])


@pytest.fixture(scope="module")
def audit_of(folders: tuple[Path, Path], reference: Reference) -> Callable[[str], Audit]:
    """Audits a server with one fault by the probes that suffice for it, once."""

    @cache
    def audited(name: str) -> Audit:
        (server,) = faulty_servers(name, *folders, guarded=False).values()
        return audit_faulty(server, reference, only=NAMED[name])

    return audited


def reported(audit: Audit) -> str:
    return "\n".join(f"{one.probe}: {one.verdict} {one.reported}" for one in audit.outcomes)


# -- servers with a real engine --------------------------------------------------------------------------------------


def test_a_sound_server_passes(folders: tuple[Path, Path], reference: Reference) -> None:
    server = faulty_servers("sound", *folders, guarded=True)["draft model"]
    audit = audit_faulty(server, reference, SMALL)
    assert not audit.findings, reported(audit)
    assert {one.verdict for one in audit.outcomes} == {ProbeVerdict.PASSED}, reported(audit)
    assert {one.probe for one in audit.outcomes} == set(PROBES)


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_is_found_and_named(name: str, audit_of: Callable[[str], Audit]) -> None:
    audit = audit_of(name)
    assert name.split()[0] in audit.faults, reported(audit)
    assert all(finding.expected and finding.observed for finding in audit.findings)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["n-gram", "n-gram, handoffs", "draft model, handoffs"])
def test_other_sound_servers_pass(way: str, folders: tuple[Path, Path], reference: Reference) -> None:
    audit = audit_faulty(faulty_servers("sound", *folders, guarded=False)[way], reference)
    assert not audit.findings, reported(audit)


def test_a_guarded_server_reports_of_its_own_alarms(folders: tuple[Path, Path], reference: Reference) -> None:
    name = "F9 sampling parameters skipped on drafted positions"
    (server,) = faulty_servers(name, *folders, guarded=True).values()
    audit = audit_faulty(server, reference, only=["sampling parameters", "own alarms"])
    alarms = next(one for one in audit.outcomes if one.probe == "own alarms")
    assert any("F9" in finding.faults for finding in alarms.findings), reported(audit)


# -- servers that talk otherwise, refuse, or die ---------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[FakeAudited]:
    with FakeAudited().running() as running:
        yield running


@pytest.fixture
def server(fake: FakeAudited) -> Iterator[Client]:
    with Client(fake.url) as opened:
        yield opened


def test_the_dialect_is_found_by_asking(fake: FakeAudited, server: Client) -> None:
    def strict_on_min_p(body: dict[str, Any]) -> Reply:
        return (400, {"error": {"message": "min_p?"}}) if "min_p" in body else uniform_reply(body)

    fake.answer = strict_on_min_p
    dialect = find_dialect(server)
    assert (dialect.model, dialect.max_model_len) == ("fake", 512)
    assert dialect.can.token_ids and dialect.can.logprobs and dialect.can.token_prompts
    assert not dialect.can.prompt_logprobs and not dialect.can.strict
    assert not dialect.can.switches_speculation, "a server that takes any field is not believed to switch"
    assert "min_p" not in dialect.fields and "return_tokens_as_token_ids" in dialect.fields


def test_ids_and_candidates_are_read_as_vllm_writes_them(server: Client) -> None:
    dialect = find_dialect(server)
    lab = Lab(server, dialect, QUICK)
    one = lab.ask(Ask((7, 8), SamplingParams(max_tokens=3, logprobs=2, temperature=0)))
    assert one.ids == (12, 13, 14)
    assert one.top == [[-1.39] * 4] * 3
    scored = lab.ask(Ask((7, 8), SamplingParams(max_tokens=1, logprobs=2), extra={"logprob_token_ids": [901, 77]}))
    assert scored.scored == [{901: -1.39}]


def test_llama_cpp_is_not_believed_to_report_every_token(fake: FakeAudited, server: Client) -> None:
    """Its ids lack the tokens within a character, and its logprobs those of accepted drafts."""

    def as_llama_cpp(body: dict[str, Any]) -> Reply:
        status, reply = uniform_reply(body)
        (choice,) = reply["choices"]
        entries = [{"id": token, "token": "a", "bytes": [97], "logprob": -1.39} for token in choice.pop("token_ids")]
        return status, reply | {"choices": [choice | {"logprobs": {"content": entries}}]}

    fake.answer = as_llama_cpp
    can = find_dialect(server).can
    assert not can.token_ids and not can.logprobs


def test_a_reply_that_is_no_completion_is_a_failure(fake: FakeAudited, server: Client) -> None:
    lab = Lab(server, find_dialect(server), QUICK)
    fake.answer = lambda body: (200, {"choices": [{"index": 0, "text": "a", "token_ids": ["x"]}]})
    one = lab.ask(Ask((7, 8)))
    assert not one.attempt.ok and one.attempt.reported() == "HTTP 200: the reply is not a completion in OpenAI's format"
    assert one.ids == ()


def test_what_cannot_be_asked_is_reported(server: Client) -> None:
    audit = run_audit(
        Lab(server, find_dialect(server), QUICK), only=["distribution of the tokens", "counters", "greedy twins"]
    )
    verdicts = {one.probe: one for one in audit.outcomes}
    assert verdicts["distribution of the tokens"].verdict is ProbeVerdict.UNSUPPORTED
    assert "weights" in verdicts["distribution of the tokens"].reported
    assert verdicts["counters"].verdict is ProbeVerdict.UNSUPPORTED
    assert verdicts["greedy twins"].verdict is ProbeVerdict.UNSUPPORTED, "without a tokenizer it has no tokens to send"


def test_what_was_found_is_kept_after_every_probe(server: Client) -> None:
    kept: list[Audit] = []
    only = ["nonsense", "structured output"]
    audit = run_audit(Lab(server, find_dialect(server), QUICK), only=only, keep=kept.append)
    assert [len(one.outcomes) for one in kept] == [1, 2]
    assert kept[-1].outcomes == audit.outcomes and kept[0].num_requests < audit.num_requests


def test_a_dying_server_is_a_finding_and_the_audit_ends(fake: FakeAudited, server: Client) -> None:
    lab = Lab(server, find_dialect(server), QUICK)
    fake.answer = lambda body: DIES if body.get("top_p") == 2.0 else uniform_reply(body)
    audit = run_audit(lab, only=["nonsense", "own alarms", "structured output"])
    assert "server dies" in audit.faults
    (dead,) = [one for one in audit.outcomes if one.verdict is ProbeVerdict.FAILED]
    assert dead.probe == "nonsense"
    assert any(finding.request.get("top_p") == 2.0 for finding in dead.findings), "with the request that did it"


def test_what_kills_a_server_is_asked_last_and_named(
    fake: FakeAudited, server: Client, folders: tuple[Path, Path], reference: Reference
) -> None:
    """A dead engine behind a door that still opens: its lists are given, and no request is answered any more."""
    gone = False

    def dying(body: dict[str, Any]) -> Reply:
        nonlocal gone
        gone = gone or body.get("top_k", 0) > 0
        if gone or "logprob_token_ids" in body:
            return 500, {"error": {"message": "the engine is dead" if gone else "list index out of range"}}
        return uniform_reply(body)

    lab = Lab(server, find_dialect(server), QUICK, reference, destructive=True)
    fake.answer = dying
    audit = run_audit(lab, only=["top_k", "scored ids", "neighbours of scored ids"])
    reported = {one.probe: one for one in audit.outcomes}
    assert list(reported) == ["scored ids", "top_k", "neighbours of scored ids"]
    assert reported["scored ids"].findings[0].faults == ("F2", "request fails")
    assert "server dies" in {fault for one in reported["top_k"].findings for fault in one.faults}
    assert reported["neighbours of scored ids"].verdict is ProbeVerdict.INCONCLUSIVE
    careful = Lab(server, lab.dialect, QUICK, reference, scores_wrongly=True)
    (left,) = run_audit(careful, only=["neighbours of scored ids"]).outcomes
    assert left.verdict is ProbeVerdict.UNSUPPORTED and "--destructive" in left.reported


def test_top_k_is_kept_from_a_server_whose_parameters_do_not_hold(
    fake: FakeAudited, server: Client, reference: Reference
) -> None:
    asked = []

    def heedless(body: dict[str, Any]) -> Reply:
        asked.append(body.get("top_k", 0))
        return uniform_reply(body)

    fake.answer = heedless
    careful = Lab(server, find_dialect(server), QUICK, reference)
    mixed, left = run_audit(careful, only=["sampling parameters", "top_k"]).outcomes
    assert mixed.verdict is ProbeVerdict.FAILED
    assert left.verdict is ProbeVerdict.UNSUPPORTED and "--destructive" in left.reported
    assert not any(asked)


def test_answers_without_a_token_are_found(fake: FakeAudited, server: Client) -> None:
    def mute(body: dict[str, Any]) -> Reply:
        status, reply = uniform_reply(body | {"max_tokens": 0})
        return status, reply

    lab = Lab(server, find_dialect(server), QUICK)
    lab.corpus = tuple(range(3, 300))  # type: ignore[misc]
    fake.answer = mute
    assert run_audit(lab, only=["ends"]).faults == ("no tokens",)


@pytest.mark.parametrize(("precision", "wrong"), [("float32", True), ("bfloat16", False)])
def test_logprobs_are_judged_by_the_servers_precision(
    server: Client, reference: Reference, precision: str, wrong: bool
) -> None:
    """One of four is 1.2 nats off, as rounding leaves it behind a token that the model would hardly say."""
    lab = Lab(server, find_dialect(server), QUICK, reference)
    lab.modes, lab.tolerance = {}, Tolerance.against_float32(precision)  # type: ignore[misc]
    one = lab.ask(Ask((7, 8), SamplingParams(max_tokens=4, logprobs=2)))
    one.replayed = Replayed((-1.39, -2.59, -1.39, -1.39), lab.rows(one))
    assert lab.stranger(one) == 900, "the tiny model has 512 tokens"
    assert (lab.judge(one).checked.reason == "drift") == wrong
    assert lab.largest_drift(one) == pytest.approx(1.2)
    trial = Trial(PROBES["replayed logprobs"], 1e-6)
    assert check_logprobs(lab, trial, [one], "an answer", ("F10",)) == (not wrong)
    assert [finding.observed for finding in trial.findings()] == (
        ["one of 4 is off by 1.20 nats; 1 by more than 0.01"] if wrong else []
    )


def test_contradictory_logprobs_are_found_without_the_weights(fake: FakeAudited, server: Client) -> None:
    def wrong(body: dict[str, Any]) -> Reply:
        status, reply = uniform_reply(body)
        if reply["choices"][0]["logprobs"] and body.get("max_tokens", 1) > 1:
            reply["choices"][0]["logprobs"]["token_logprobs"][1] = 0.5
        return status, reply

    lab = Lab(server, find_dialect(server), QUICK)
    lab.corpus = tuple(range(3, 300))  # type: ignore[misc]
    fake.answer = wrong
    audit = run_audit(lab, only=["logprob contract"])
    expectations = {finding.expected for finding in audit.findings}
    assert "logprobs of at most 0" in expectations
    assert "no logprob above the top logprob" in expectations


def test_who_does_not_answer_cannot_be_audited(fake: FakeAudited, server: Client) -> None:
    with pytest.raises(AuditFailed, match="no list of models"), Client("http://127.0.0.1:9", timeout_s=2) as nobody:
        find_dialect(nobody)
    fake.answer = lambda body: (500, {"error": "broken"})
    with pytest.raises(AuditFailed, match="does not answer a plain completion"):
        find_dialect(server)
    result = CliRunner().invoke(main, ["audit", "server", fake.url])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--only", "lenghts-typo"], "there is no probe 'lenghts-typo'; the nearest are '"),
        (["--only", "ends", "--only", "End"], "there is no probe 'End'; the nearest are 'ends', "),
        (["--beside", "host:8000"], "--beside 'host:8000' is not the URL of a server"),
    ],
)
def test_an_audit_of_nothing_is_refused(fake: FakeAudited, options: list[str], reported: str) -> None:
    result = CliRunner().invoke(main, ["audit", "server", fake.url, *options])
    assert result.exit_code == 2 and reported in " ".join(result.output.split())
    assert "no findings" not in result.output


@pytest.mark.parametrize("key", ["sk-\u00e9", "sk-1\nsk-2"])
def test_an_audit_with_a_key_that_cannot_be_sent_is_refused(fake: FakeAudited, key: str) -> None:
    result = CliRunner().invoke(main, ["audit", "server", fake.url], env={"TRUESPEC_API_KEY": key})
    assert result.exit_code == 2 and "TRUESPEC_API_KEY holds" in result.output and "sk-" not in result.output
    assert CliRunner().invoke(main, ["audit", "server", "127.0.0.1:9"]).exit_code == 2


def test_faults_that_there_are_not_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = CliRunner().invoke(main, ["audit", "faults", "--outside", "--only", "zzz", "--page", str(page)])
    assert result.exit_code == 1 and "no fault that can be served begins with 'zzz'; the nearest are" in result.output
    assert not page.exists()
    with pytest.raises(ConfigError, match="begins with 'F99'"):
        servable(["F2 ", "F99"])


# -- reports ---------------------------------------------------------------------------------------------------------


def test_the_command_reports_and_exits_by_what_it_found(fake: FakeAudited, tmp_path: Path) -> None:
    files = {name: tmp_path / f"audit.{name}" for name in ("json", "html", "md")}
    options = ["--json", str(files["json"]), "--html", str(files["html"]), "--page", str(files["md"])]
    result = CliRunner().invoke(main, ["audit", "server", fake.url, "--section", "A fake", *options])
    found = json.loads(files["json"].read_text("utf-8"))
    failed = [one["probe"] for one in found["probes"] if one["findings"]]
    assert result.exit_code == (1 if failed else 0), result.output
    assert {one["probe"] for one in found["probes"]} == set(PROBES)
    assert "## A fake" in files["md"].read_text("utf-8")
    page = files["html"].read_text("utf-8")
    assert not re.search(r"<script|https?://(?!127)|@import|url\(", page), "a report loads nothing"
    assert all(name in page for name in PROBES)


def test_a_report_shows_findings_and_plots(audit_of: Callable[[str], Audit]) -> None:
    audit = audit_of("F12 the first draft is committed unverified")
    page = html_page(audit)
    assert page.count("<svg") >= len([name for name in PROBES if name == "distribution of the tokens"])
    assert "0 on average if correct" in page
    assert "A request that shows it" in page
    assert "&lt;" not in audit.findings[0].expected


# -- statistics ------------------------------------------------------------------------------------------------------


def test_tails_are_exact() -> None:
    exact = sum(math.comb(20, k) * 0.3**k * 0.7 ** (20 - k) for k in range(11, 21))
    assert binomial_tail(20, 11, 0.3) == pytest.approx(exact, rel=1e-9)
    assert binomial_tail(20, 0, 0.3) == 1.0
    assert binomial_tail(20, 1, 0.0) == 0.0
    assert too_many(1000, 30, 0.01, 1e-6) and not too_many(1000, 15, 0.01, 1e-6)
    assert departs(1000, 700, 0.5, 0.02, 1e-6) and departs(1000, 300, 0.5, 0.02, 1e-6)
    assert not departs(1000, 530, 0.5, 0.02, 1e-6)


def test_false_alarms_stay_below_their_bound() -> None:
    random = np.random.default_rng(3)
    accept_uniforms = random.integers(0, 2, (200, 300)) * 2.0 - 1
    assert sum(mean_departs(row, 0.0, 0.05) for row in accept_uniforms) <= 22
    assert mean_departs(accept_uniforms.ravel()[:3000] * 0.5 + 0.2, 0.0, 1e-6)
    assert sum(probe.tests for probe in PROBES.values()) * delta_per_test() == pytest.approx(FALSE_ALARMS)


def test_every_fault_of_the_catalogue_can_be_served(folders: tuple[Path, Path]) -> None:
    for name in servable(["F"]):
        assert len(faulty_servers(name, *folders, guarded=True)) == 1
    served = {name.split()[0] for name in servable()} | {"F28", "F31"}
    assert served == {"sound", *(mutant.fault for mutant in MUTANTS.values())}
    assert set(NAMED) <= set(MUTANTS)
    assert BUDGETS["full"].answers > BUDGETS["quick"].answers


def test_an_interrupted_audit_reports_what_it_knows(fake: FakeAudited, server: Client, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(PROBES, "structured output", replace(PROBES["structured output"], run=interrupted))
    monkeypatch.setattr("deploy.probes.audit._in_order", lambda only: [PROBES[name] for name in only])
    audit = run_audit(Lab(server, find_dialect(server), QUICK), only=["nonsense", "structured output", "own alarms"])
    assert [one.reported for one in audit.outcomes[1:]] == ["the audit was interrupted"] * 2
    assert audit.outcomes[0].verdict is ProbeVerdict.PASSED
