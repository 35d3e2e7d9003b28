"""Long commands are never silent for long: lines in a log, a bar on a terminal."""

import io
import time

from rich.console import Console

from deploy.reports.progress import View


def lines_of(stream: io.StringIO) -> list[str]:
    return [line.split(" s  ", 1)[-1] for line in stream.getvalue().splitlines()]


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.005)


def test_a_log_says_what_goes_on_when_nothing_else_was_said() -> None:
    stream, counted = io.StringIO(), iter(range(1000))
    with View(Console(file=stream), silent_s=0.01) as view:
        view.stage("probe 2 of 30, surprisal", lambda: f"{next(counted)} requests sent")
        wait_for(stream, "probe 2 of 30, surprisal, 1 requests sent")
        view.stage("answering")
        view.count(3, 12, "prompts")
        wait_for(stream, "answering, 25%, 3 of 12 prompts")
        view("a line")
    assert "a line" in lines_of(stream)


def test_a_log_of_a_busy_command_has_its_own_lines_only() -> None:
    stream = io.StringIO()
    with View(Console(file=stream), silent_s=60) as view:
        view.stage("a stage")
        view.say("[one] of :two:")
    assert lines_of(stream) == ["a stage", "[one] of :two:"]


def test_a_note_that_fails_while_it_is_counted_is_asked_again() -> None:
    stream, tries = io.StringIO(), iter([RuntimeError("dictionary changed size during iteration"), None])

    def note() -> str:
        if error := next(tries, None):
            raise error
        return "counted"

    with View(Console(file=stream), silent_s=0.01) as view:
        view.stage("counting", note)
        wait_for(stream, "counting, counted")


def test_a_terminal_has_a_bar_with_the_note() -> None:
    stream = io.StringIO()
    with View(Console(file=stream, force_terminal=True, width=120), silent_s=0.01) as view:
        view.stage("judging", lambda: "7 answers")
        wait_for(stream, "7 answers")
        view.advance(0.5, "half")
        wait_for(stream, "50%")
        view.say("a line that stays")
    assert "judging" in stream.getvalue() and "a line that stays" in stream.getvalue()


def test_a_view_of_nothing_says_nothing() -> None:
    with View() as view:
        view.stage("x")
        view.say("y")
        view.advance(0.5, "z")
