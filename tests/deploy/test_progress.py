"""Long commands are never silent for long: lines in a log, a bar on a terminal."""

import io

from rich.console import Console

from deploy.reports.progress import View
from tests.support.waiting import wait_for


def test_a_log_says_what_goes_on_when_nothing_else_was_said() -> None:
    stream, counted = io.StringIO(), iter([RuntimeError("dictionary changed size during iteration"), *range(1000)])

    def note() -> str:
        if isinstance(found := next(counted), RuntimeError):
            raise found
        return f"{found} requests sent"

    with View(Console(file=stream), silent_s=0.01) as view:
        view.stage("probe 2 of 30, surprisal", note)
        wait_for(lambda: "probe 2 of 30, surprisal, 1 requests sent" in stream.getvalue(), "its line")
        view.stage("answering")
        view.count(3, 12, "prompts")
        wait_for(lambda: "answering, 25%, 3 of 12 prompts" in stream.getvalue(), "its line")
    busy = io.StringIO()
    with View(Console(file=busy), silent_s=60) as view:
        view.stage("a stage")
        view.say("[one] of :two:")
    assert [line.split(" s  ", 1)[-1] for line in busy.getvalue().splitlines()] == ["a stage", "[one] of :two:"]


def test_a_terminal_has_a_bar_with_the_note() -> None:
    stream = io.StringIO()
    with View(Console(file=stream, force_terminal=True, width=120), silent_s=0.01) as view:
        view.stage("judging", lambda: "7 answers")
        wait_for(lambda: "7 answers" in stream.getvalue(), "the note")
        view.count(2, 4)
        wait_for(lambda: "50%" in stream.getvalue(), "the bar")
        view.say("a line that stays")
    assert "judging" in stream.getvalue() and "a line that stays" in stream.getvalue()
