"""The page of error codes lists what the service returns, and nothing else."""

import re
from pathlib import Path

from serve_app import errors
from serve_app.errors import reply_for, route_error

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_page_has_every_status_type_and_code() -> None:
    known = {(rule.status, rule.kind, rule.code) for rule in errors._RULES.values()}
    known |= {(reply.status, reply.kind, reply.code) for reply in (route_error(code, "") for code in (400, 404, 405))}
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \| .+ \| .+ \| (yes|no|later) \|$", PAGE.read_text(), re.M)
    assert {(int(status), kind, code) for status, kind, code, _ in rows} == known
    assert len(rows) == len(known) == PAGE.read_text().count("\n| ") - 1
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)


def test_what_may_be_retried_says_when() -> None:
    text = PAGE.read_text()
    for kind in errors._RULES:
        try:
            reply = reply_for(kind("x", "y", 2.0) if issubclass(kind, errors.NoRoom) else kind("x", 2.0))
        except TypeError:
            continue
        row = next(line for line in text.splitlines() if f"`{reply.code}`" in line)
        assert ("Retry-After" in row) == ("retry-after" in reply.headers), reply.code
