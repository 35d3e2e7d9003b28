"""docs/clients.md names the versions of the clients that are installed and tested; `make test-clients` runs them."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "tests" / "clients"


def test_the_page_has_the_versions_that_are_installed() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| [^|]+ \| ([\w-]+) ([\d.]+)[^|]* \|", page, re.M)
    pins = "".join(path.read_text(encoding="utf-8") for path in CLIENTS.glob("requirements*.txt"))
    pinned = re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.]+)$", pins, re.M)
    pinned += json.loads((CLIENTS / "package.json").read_text(encoding="utf-8"))["dependencies"].items()
    assert len(named) >= 10 and set(named) <= set(pinned)
