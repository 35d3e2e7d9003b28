"""`truespec audit server`, and the audit of the audit: servers with known faults, audited from outside."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.audit.blackbox.audit import Audit, run_audit
from deploy.audit.blackbox.dialect import find_dialect
from deploy.audit.blackbox.exchange import Server
from deploy.audit.blackbox.lab import FULL, QUICK, Budget, Lab
from deploy.audit.blackbox.page import html_page
from deploy.audit.blackbox.probes import PROBES
from deploy.audit.blackbox.reference import Reference
from deploy.audit.blackbox.render import PROBES_MARK, print_audit, write_faults, write_page, write_probes
from deploy.audit.blackbox.served import FOR_MODELS, NGRAM, NOT_SERVABLE, TINY, FaultyServer
from deploy.audit.blackbox.tiny import write_tiny_pair
from deploy.audit.mutants import MUTANTS, Mutant
from deploy.audit.traffic import DECODERS, TABLES
from deploy.models import find_model
from deploy.options import beginning_with, nearest, write_json
from deploy.progress import View
from speculative.config import DrafterConfig
from speculative.errors import ConfigError

BUDGETS: Mapping[str, Budget] = {"quick": QUICK, "full": FULL}
PAGE_HEAD = "# Audits that were run\n"
_DEEP = replace(FULL, answers=12, plain_share=24, first_tokens=1000)  # some 9,000 tokens at temperature 1
_SHIFTS = ("F6 ", "F7 ", "F8 ")
_SIZES = ("max_model_len", "kv_cache_tokens")
_SHORT_OF_BLOCKS = 256  # tokens of the KV cache, and of the longest sequence; concurrent requests need more
_PUBLISHING_S = 0.05  # of a server in this process, which counts when asked


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of `truespec audit server`.

    model: whose weights to compare with: a catalogue name, a folder or a hub id. served: which of the server's models.
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
        server = stack.enter_context(Server(options.url, options.api_key, options.timeout_s))
        dialect = find_dialect(server, options.served)
        view.say(f"{server.url} serves {dialect.model}")
        beside = None
        if options.beside is not None:
            other = stack.enter_context(Server(options.beside, options.api_key, options.timeout_s))
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


# -- known faults ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FaultFound:
    """Result of auditing one faulty server. way: the drafter. found: the faults that the audit named."""

    fault: str
    way: str
    found: tuple[str, ...]
    probes: tuple[str, ...]

    @property
    def is_false_alarm(self) -> bool:
        """Whether something was found in a sound server."""
        return self.fault == "sound" and bool(self.probes)

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def audit_faults(names: Sequence[str], page: Path | None, view: View | None = None) -> list[FaultFound]:
    """Serve a tiny model with each of these faults (`sound` = none) and audit each server; rows are written to the
    page one by one."""
    view, found = view or View(), []
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = write_tiny_pair(Path(scratch))
        reference = Reference(target)
        for number, name in enumerate(names, start=1):
            view.stage(f"fault {number} of {len(names)}, {name}")
            for way, server in faulty_servers(name, target, draft, guarded=name == "sound").items():
                audit = audit_faulty(server, reference, budget_for(name))
                if page is not None:
                    write_faults([(name, way, audit)], page, PAGE_HEAD)
                view.say(f"{name}, {way}: {', '.join(audit.faults) or 'nothing found'}")
                failed = tuple(one.probe for one in audit.outcomes if one.findings)
                found.append(FaultFound(name, way, tuple(audit.faults), failed))
    return found


def servable(prefixes: Sequence[str] = ()) -> list[str]:
    """`sound` and the faults that can be served, in the catalogue's order; only those with a prefix, if any is given.

    Raises:
        ConfigError: nothing matches one of the prefixes.
    """
    names = [name for name in ("sound", *MUTANTS) if name not in NOT_SERVABLE]
    return beginning_with(prefixes, names, "fault that can be served")


def faulty_servers(name: str, target: Path, draft: Path, *, guarded: bool) -> dict[str, FaultyServer]:
    """The servers in which a fault shows, by drafter; for `sound` all of them."""
    model = DrafterConfig(kind="draft_model", model=str(draft), num_draft_tokens=NGRAM.num_draft_tokens)
    drafters = {"n-gram": NGRAM, "draft model": model}
    if name == "sound":
        ways = {
            f"{way}{', handoffs' * handoffs}": (one, handoffs)
            for way, one in drafters.items()
            for handoffs in (False, True)
        }
        return {
            way: FaultyServer(target, config=replace(TINY, drafter=one), guarded=guarded, handoffs=handoffs)
            for way, (one, handoffs) in ways.items()
        }
    mutant = MUTANTS[name]
    table, requests = TABLES.get(mutant.traffic), DECODERS.get(mutant.traffic)
    sampled = requests.drafted if requests else table is not None and not table.table.get("deterministic")
    way = "draft model" if sampled and mutant.fault != "F19" else "n-gram"  # a dead drafter's drafts are not sampled
    handoffs = requests is not None and requests.handoffs
    config = replace(TINY, drafter=drafters[way], **_settings(mutant))
    return {way: FaultyServer(target, FOR_MODELS.get(name, mutant.install), config, guarded, handoffs)}


def budget_for(name: str) -> Budget:
    """The budget for a fault: larger if it only shifts the distribution of tokens."""
    return _DEEP if name.startswith(_SHIFTS) else QUICK


def _settings(mutant: Mutant) -> dict[str, Any]:
    """Settings of the mutant; its sizes are for another model and only mean that the KV cache should run short."""
    short = dict.fromkeys(_SIZES, _SHORT_OF_BLOCKS) if "kv_cache_tokens" in mutant.settings else {}
    return {name: value for name, value in mutant.settings.items() if name not in _SIZES} | short


def audit_faulty(server: FaultyServer, reference: Reference, budget: Budget = QUICK, only: Sequence[str] = ()) -> Audit:
    """Serve and audit, with the probes in `only`, or all."""
    with server.running() as url, Server(url) as http:
        return run_audit(Lab(http, find_dialect(http), budget, reference, publishing_s=_PUBLISHING_S), only=only)
