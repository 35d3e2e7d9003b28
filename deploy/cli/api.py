"""`truespec api`: document the API."""

from pathlib import Path

import click

from deploy.cli.console import Failure, a_file, out
from deploy.options import check_writable


@click.group()
def api() -> None:
    """Document the API."""


@api.command("reference")
@click.option("--out", "page", type=a_file, help="Write the tables into this page instead of printing them.")
@click.option("--check", is_flag=True, help="With --out: write nothing, and fail if the page is out of date.")
def api_reference(page: Path | None, check: bool) -> None:
    """Print the tables of all endpoints and fields as Markdown (docs/api.md)."""
    from deploy.reports.api_reference import api_reference as sections
    from deploy.reports.api_reference import with_reference

    if page is None:
        out.print("\n\n".join(sections().values()), markup=False, soft_wrap=True)
        return
    now = page.read_text(encoding="utf-8") if page.is_file() else ""
    text = with_reference(now)
    if check:
        if now != text:
            raise Failure(f"{page} is out of date; run `truespec api reference --out {page}`.")
        return
    check_writable(page, "--out")
    page.write_text(text, encoding="utf-8")
