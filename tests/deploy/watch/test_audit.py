"""The audit from outside: a sound server passes, each probe finds the fault that it is for, and what cannot be asked is
said."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deploy.cli.main import main
from deploy.exchange.client import Client, ServiceError
from deploy.watch.audit import NAMES, run_probe
from deploy.watch.probes.desk import Desk
from deploy.watch.probes.trial import PROBES, ProbeOutcome, ProbeVerdict
from serve_app.text.tokenizer import Tokenizer
from tests.support.fake_http import QuietHandler, serving
from tools.faults.outside import audit_faulty, faulty_servers, found_in

pytestmark = pytest.mark.slow

FOUND = {  # a fault of our engine for each probe that can find one there; the traffic's are for the referee
    "F12 the first draft is committed unverified": "traffic",
    "F9 sampling parameters skipped on drafted positions": "traffic",
    "F17 unseeded requests share a stream": "twins",
    "F21 a stop inside an accepted run is overlooked": "ends",
    "F11 prompt logprobs damaged at chunk borders": "lengths",
    "F14 a block's name leaves out what stands before it": "warm prefix",
    "F10 logprob 0 for every token": "contract",
    "F18 every draft counts as accepted": "counters",
}


Reply = tuple[int, dict[str, Any]]

DIES = (0, {})
"""In place of a reply: close the connection, and answer nobody any more."""


def uniform_reply(body: dict[str, Any]) -> Reply:
    """Says the token after the last one, with even odds over four candidates."""
    prompt, count = body["prompt"], body.get("max_tokens", 1)
    last = prompt[-1] if isinstance(prompt, list) else 4
    ids = [3 + (last + step) % 50 for step in range(1, count + 1)]
    logprobs = None
    if body.get("logprobs") is not None:
        others = {f"token_id:{token}": -1.39 for token in range(900, 903)}
        logprobs = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [-1.39] * count,
            "top_logprobs": [{f"token_id:{token}": -1.39} | others for token in ids],
            "text_offset": list(range(count)),
        }
    choice = {"index": 0, "text": "a" * count, "finish_reason": "length", "logprobs": logprobs, "token_ids": ids}
    return 200, {"choices": [choice], "usage": {"completion_tokens": count}}


class FakeAudited:
    """`answer` gets the body of a completion."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply] = uniform_reply) -> None:
        self.answer = answer
        self.url = ""
        self.dead = False

    @contextmanager
    def running(self) -> Iterator["FakeAudited"]:
        """Serve until the block ends."""
        fake = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                is_list = self.path == "/v1/models"
                self._reply(*((200, {"data": [{"id": "fake", "max_model_len": 512}]}) if is_list else (404, {})))

            def do_POST(self) -> None:
                body = json.loads(self.sent())
                reply = fake.answer(body)
                fake.dead = fake.dead or reply is DIES
                self._reply(*reply, form=b"data: %s\n\ndata: [DONE]\n\n" if body.get("stream") else b"%s")

            def _reply(self, status: int, answer: dict[str, Any], form: bytes = b"%s") -> None:
                if fake.dead:
                    self.close_connection = True
                else:
                    self.say(status, form % json.dumps(answer).encode())

        with serving(Handler) as self.url:
            yield self


def test_a_sound_server_passes(folders: tuple[Path, Path]) -> None:
    server = faulty_servers("sound", *folders, guarded=True)["draft model"]
    report = audit_faulty(server, folders[0], requests=60)
    probes = report["audit"]["probes"]
    assert found_in(report) == (), [(one["probe"], one["seen"]) for one in probes]
    assert [one["probe"] for one in probes] == list(NAMES) and len(NAMES) == 9
    assert {one["verdict"] for one in probes} == {"passed"}, [(one["probe"], one["seen"]) for one in probes]
    assert report["answers"]["judged"] > 150 and not report["answers"].get("unreadable")


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found_by_the_probe_for_it(fault: str, folders: tuple[Path, Path]) -> None:
    (server,) = faulty_servers(fault, *folders, guarded=False).values()
    only = {FOUND[fault]} | ({"traffic"} if FOUND[fault] == "contract" else set())
    report = audit_faulty(server, folders[0], only, requests=100)
    found = found_in(report)
    assert found if FOUND[fault] == "traffic" else FOUND[fault] in found, report["audit"]["probes"]


# -- servers that talk otherwise, refuse, or die ---------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[FakeAudited]:
    with FakeAudited().running() as running:
        yield running


@pytest.fixture
def ask(fake: FakeAudited, folders: tuple[Path, Path]) -> Iterator[Callable[[str], ProbeOutcome]]:
    """Runs one probe on the fake server."""
    with Client(fake.url, timeout_s=5) as client:
        yield lambda name: run_probe(Desk(client, Tokenizer.from_folder(folders[0]), 0.25), PROBES[name])


def test_a_stream_that_ends_otherwise_is_found(fake: FakeAudited, ask: Callable[[str], ProbeOutcome]) -> None:
    assert ask("streams").verdict is ProbeVerdict.PASSED

    def cut(body: dict[str, Any]) -> Reply:
        status, reply = uniform_reply(body)
        if body.get("stream"):
            reply["choices"][0] |= {"finish_reason": "stop", "text": "a"}
        return status, reply

    fake.answer = cut
    expected = {finding.expected for finding in ask("streams").findings}
    assert expected == {"the same finish_reason", "the same text as a stream and as a whole"}


def test_a_dying_server_is_found_with_the_request_that_did_it(
    fake: FakeAudited, ask: Callable[[str], ProbeOutcome]
) -> None:
    assert ask("nonsense").verdict is ProbeVerdict.PASSED
    fake.answer = lambda body: DIES if body.get("top_p") == 2.0 else uniform_reply(body)
    outcome = ask("nonsense")
    assert outcome.findings[0].request["top_p"] == 2.0
    assert outcome.findings[-1].expected == "a server that still answers"


def test_contradictory_logprobs_are_found_without_the_weights(fake: FakeAudited, folders: tuple[Path, Path]) -> None:
    def wrong(body: dict[str, Any]) -> Reply:
        status, reply = uniform_reply(body)
        if reply["choices"][0]["logprobs"] and body.get("max_tokens", 1) > 1:
            reply["choices"][0]["logprobs"]["token_logprobs"][1] = 0.5
        return status, reply

    fake.answer = wrong
    with Client(fake.url) as client:
        desk = Desk(client, Tokenizer.from_folder(folders[0]), 0.25)
        desk.ask(desk.body(desk.prompt(1)))
        outcome = run_probe(desk, PROBES["contract"])
    assert {one.expected for one in outcome.findings} == {"logprobs of at most 0", "no logprob above the top logprob"}


def test_what_cannot_be_asked_is_said(fake: FakeAudited, ask: Callable[[str], ProbeOutcome]) -> None:
    assert ask("counters").verdict is ProbeVerdict.UNSUPPORTED

    def without_ids(body: dict[str, Any]) -> Reply:
        status, reply = uniform_reply(body)
        del reply["choices"][0]["token_ids"]
        reply["choices"][0]["logprobs"] = None
        return status, reply

    fake.answer = without_ids
    outcome = ask("twins")
    assert outcome.verdict is ProbeVerdict.UNSUPPORTED and outcome.seen == "the server reports no token ids"


def test_who_does_not_answer_cannot_be_audited(fake: FakeAudited, folders: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.from_folder(folders[0])
    with pytest.raises(ServiceError, match="/v1/models: "), Client("http://127.0.0.1:9", timeout_s=2) as nobody:
        Desk(nobody, tokenizer, 0.25)
    fake.answer = lambda body: (500, {"error": "broken"})
    result = CliRunner().invoke(main, ["watch", "audit", fake.url, "--model", str(folders[0])])
    assert result.exit_code == 2 and "does not answer a plain completion" in " ".join(result.output.split())
    result = CliRunner().invoke(main, ["watch", "audit", "127.0.0.1:9", "--model", str(folders[0])])
    assert result.exit_code == 2 and "is not the URL of a server" in " ".join(result.output.split())


def test_the_command_reports_and_exits_by_what_it_found(
    fake: FakeAudited, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The fake server's answers are not the tiny model's."""
    files = {name: tmp_path / f"audit.{name}" for name in ("json", "html")}
    options = ["--json", str(files["json"]), "--html", str(files["html"]), "--requests", "20"]
    result = CliRunner().invoke(main, ["watch", "audit", fake.url, "--model", str(folders[0]), *options])
    assert result.exit_code == 1, result.output
    found = json.loads(files["json"].read_text("utf-8"))
    assert [one["probe"] for one in found["audit"]["probes"]] == list(NAMES)
    page = files["html"].read_text("utf-8")
    assert not re.search(r"<script|https?://(?!127)|@import|url\(", page), "a report loads nothing"
    assert all(name in page and name in result.output for name in NAMES)
