"""What the runbooks have one type about a watched server: on a referee's report, and on logs of its pods."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_http import QuietHandler, serving
from tests.support.runbook_shell import commands, run, with_kubectl

REPORT = {
    "requests": {"captured": 3},
    "answers": {"read": 3},
    "findings": [{"alarm": "surprisal", "stratum": "all", "replica": "r", "tokens": 9, "example": {"id": "cmpl-7"}}],
    "unreadable": {},
    "untested": {},
}


@pytest.fixture
def url() -> Iterator[str]:
    """Of something that has a report."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            found = self.path == "/report.json"
            self.say(200 if found else 404, json.dumps(REPORT).encode() if found else b"")

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("command", commands("watch_report"))
def test_the_commands_on_the_report_run(command: str, url: str, tmp_path: Path) -> None:
    shown = run(command, tmp_path, {"WATCH": url})
    assert json.loads(shown)
    if "findings" in command:
        assert json.loads(shown)["id"] == "cmpl-7"


@pytest.mark.parametrize("command", commands("watch_logged"))
def test_the_commands_on_logs_show_the_lines_that_match(command: str, tmp_path: Path) -> None:
    container = command.split()[1]
    lines = [
        "replay of cmpl-1 failed: out of memory",
        "The referee at http://r cannot be reached (ClientError); trying again.",
        "the referee missed the change (seed) made to cmpl-1, replayed by p: its verdict was verified",
        "The server refuses return_token_ids; asking for less (dialect vllm).",
    ]
    script = f"""#!/bin/bash
case " $* " in
  *" get rayservice "*) ;;
  *" -n demo logs -l app.kubernetes.io/instance=demo,app.kubernetes.io/component in (watch,watch-{container}) "*)
    printf '%s\\n' quiet "{'" "'.join(lines)}" ;;
  *) exit 1 ;;
esac
"""
    inside = with_kubectl(tmp_path, script)
    shown = run(command, None, {"NAMESPACE": "demo", "RELEASE": "demo"}, inside).splitlines()
    assert shown and "quiet" not in shown and set(shown) <= set(lines)
