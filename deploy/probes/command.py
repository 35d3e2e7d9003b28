"""`truespec audit server`: from its options to an audit, and from the audit to files."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deploy.exchange.client import Client
from deploy.exchange.dialect import find_dialect
from deploy.options import nearest, write_json
from deploy.probes.audit import Audit, run_audit
from deploy.probes.lab import FULL, QUICK, Budget, Lab
from deploy.probes.page import html_page
from deploy.probes.probes import PROBES
from deploy.probes.reference import Reference
from deploy.probes.render import PROBES_MARK, print_audit, write_page, write_probes
from deploy.reports.progress import View
from deploy.run.models import find_model
from speculative.errors import ConfigError

BUDGETS: Mapping[str, Budget] = {"quick": QUICK, "full": FULL}
PAGE_HEAD = "# Audits that were run\n"


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of `truespec audit server`.

    model: whose weights to compare with: a catalogue name, a folder or a hub id.
    served: which of the server's models.
    only: names of probes; empty = all.
    """

    url: str
    model: str | None = None
    served: str | None = None
    beside: str | None = None
    api_key: str | None = None
    destructive: bool = False
    budget: str = "quick"
    timeout_s: float = 120.0
    only: tuple[str, ...] = ()


def audit_url(options: AuditOptions, view: View, json_file: Path | None = None) -> Audit:
    """Audit a running server. The results so far stand in `json_file` after every probe.

    Raises:
        AuditFailed: no server answers there, or the weights to compare with cannot be loaded.
        ConfigError: a name in `only` is not a probe.
    """
    for name in options.only:
        if name not in PROBES:
            raise ConfigError(f"--only: there is no probe {name!r}; {nearest(name, PROBES)}")
    with ExitStack() as stack:
        server = stack.enter_context(Client(options.url, options.api_key, options.timeout_s))
        dialect = find_dialect(server, options.served)
        view.say(f"{server.url} serves {dialect.model}")
        beside = None
        if options.beside is not None:
            other = stack.enter_context(Client(options.beside, options.api_key, options.timeout_s))
            beside = (other, find_dialect(other))
        reference = None
        if options.model is not None:
            view.stage(f"loading {options.model}")
            reference = Reference(find_model(options.model, view.say))
        lab = Lab(server, dialect, BUDGETS[options.budget], reference, beside, options.destructive)

        def keep(so_far: Audit) -> None:
            write_json(json_file, so_far.as_dict() | {"complete": False}, indent=1)

        return run_audit(lab, view, options.only, keep)


def show(audit: Audit, out: Console, json_file: Path | None, html_file: Path | None) -> None:
    """Print an audit and write its files."""
    print_audit(audit, out)
    write_json(json_file, audit.as_dict() | {"complete": True}, indent=1)
    if html_file is not None:
        html_file.parent.mkdir(parents=True, exist_ok=True)
        html_file.write_text(html_page(audit), encoding="utf-8")


def put_into(page: Path, audit: Audit, name: str) -> None:
    """Write an audit into a section of a page, and the table of probes if the page has one."""
    if page.is_file() and PROBES_MARK in page.read_text(encoding="utf-8"):
        write_probes(page, PAGE_HEAD)
    write_page(audit, page, name, PAGE_HEAD)
