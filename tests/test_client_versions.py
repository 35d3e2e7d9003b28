"""docs/clients.md is in step with the clients that are installed and tested; `make test-clients` runs them."""

from pathlib import Path

import pytest

from tests.clients.page import CLIENTS, Client, versions

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_page_has_the_versions_that_are_installed(client: Client) -> None:
    pinned = versions()
    first = client.packages[0].removesuffix(" (npm)")
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {client.name} | {first} ")]
    for package in client.packages:
        assert all(f" {version}" in row for version in pinned[package]), "run make test-clients PAGE=docs/clients.md"


def test_every_file_of_tests_has_a_row() -> None:
    assert {path.name for path in (ROOT / "tests" / "clients").glob("test_*.py")} == {one.file for one in CLIENTS}
