"""What the proxy adds to a request's time: measured, for each kind of request."""

import json
from pathlib import Path

from click.testing import CliRunner

from tools.bench.proxy import main


def test_every_kind_is_measured_straight_and_through_the_proxy(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(main, ["--requests", "10", "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    figures = json.loads(path.read_text())
    kinds = {f"{kind}.{part}" for kind in ("unwatched", "watched") for part in ("whole", "first_event", "stream")}
    assert figures.keys() == kinds
    for one in figures.values():
        assert one["straight"] > 0
        assert one["proxy"] > 0
    assert figures["watched.stream"]["straight"] >= 15, "the server streams 16 tokens, one each millisecond"
