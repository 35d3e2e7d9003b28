"""The audit of the audit: servers with known faults, audited from outside."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deploy.exchange.client import Client
from deploy.exchange.dialect import find_dialect
from deploy.options import beginning_with
from deploy.probes.audit import Audit, run_audit
from deploy.probes.command import PAGE_HEAD
from deploy.probes.lab import FULL, QUICK, Budget, Lab
from deploy.probes.probes import ProbeVerdict
from deploy.probes.reference import Reference
from deploy.probes.render import SECTION
from deploy.reports.markdown import write_section
from deploy.reports.progress import View
from deploy.reports.provenance import provenance
from speculative.config import DrafterConfig
from tools.faults.mutants import FRONT_END, MUTANTS, Mutant
from tools.faults.served import FOR_MODELS, NGRAM, NOT_SERVABLE, TINY, FaultyServer
from tools.faults.tiny import write_tiny_pair
from tools.faults.traffic import DECODERS, TABLES

_DEEP = replace(FULL, answers=12, plain_share=40, first_tokens=1000)  # some 15,000 tokens at temperature 1
_SHIFTS = ("F6 ", "F7 ", "F8 ")  # faults that only shift the distribution of tokens
_SIZES = ("max_model_len", "kv_cache_tokens")
_SHORT_OF_BLOCKS = 256  # tokens of the KV cache, and of the longest sequence; concurrent requests need more
_PUBLISHING_S = 0.05  # of a server in this process, which counts when asked


@dataclass(frozen=True, slots=True)
class FaultFound:
    """Result of auditing one faulty server.

    way: the drafter.
    found: the faults that the audit named.
    """

    fault: str
    way: str
    found: tuple[str, ...]
    probes: tuple[str, ...]

    @property
    def is_false_alarm(self) -> bool:
        """Return whether something was found in a sound server."""
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
                budget = _DEEP if name.startswith(_SHIFTS) else QUICK
                audit = audit_faulty(server, reference, budget)
                if page is not None:
                    write_faults([(name, way, audit)], page)
                view.say(f"{name}, {way}: {', '.join(audit.faults) or 'nothing found'}")
                failed = tuple(one.probe for one in audit.outcomes if one.findings)
                found.append(FaultFound(name, way, tuple(audit.faults), failed))
    return found


def servable(prefixes: Sequence[str] = ()) -> list[str]:
    """`sound` and the faults that can be served, in the catalogue's order; only those with a prefix, if any is given.

    Raises:
        ConfigError: nothing matches one of the prefixes.
    """
    of_engines = [name for name, mutant in MUTANTS.items() if mutant.traffic != FRONT_END]
    names = [name for name in ("sound", *of_engines) if name not in NOT_SERVABLE]
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
    settings = _settings(mutant)
    if (given := settings.pop("drafter", None)) is not None:  # of its trees only the shape fits this model
        drafters[way] = DrafterConfig("draft_model", str(draft), num_draft_tokens=len(given.tree), tree=given.tree)
    config = replace(TINY, drafter=drafters[way], **settings)
    return {way: FaultyServer(target, FOR_MODELS.get(name, mutant.install), config, guarded, handoffs)}


def _settings(mutant: Mutant) -> dict[str, Any]:
    """Settings of the mutant; its sizes are for another model and only mean that the KV cache should run short."""
    short = dict.fromkeys(_SIZES, _SHORT_OF_BLOCKS) if "kv_cache_tokens" in mutant.settings else {}
    return {name: value for name, value in mutant.settings.items() if name not in _SIZES} | short


def audit_faulty(server: FaultyServer, reference: Reference, budget: Budget = QUICK, only: Sequence[str] = ()) -> Audit:
    """Serve and audit, with the probes in `only`, or all."""
    with server.running() as url, Client(url) as http:
        return run_audit(Lab(http, find_dialect(http), budget, reference, publishing_s=_PUBLISHING_S), only=only)


# -- the table ------------------------------------------------------------------------------------------------------


def write_faults(rows: Sequence[tuple[str, str, Audit]], page: Path) -> None:
    """Write the rows of faults put back, (fault, how it was served, its audit), next to the existing rows."""
    found = provenance()
    origin = f"{found['date'][:10]}, commit {found['commit']}"
    lines = _faults_there(page) | {(fault, way): _fault_row(fault, way, audit, origin) for fault, way, audit in rows}
    order = {name: place for place, name in enumerate(("sound", *MUTANTS))}
    text = [
        "## Faults put back, audited from outside",
        "",
        "Written by `python -m tools.faults find --outside`, row by row. Each fault was served with a tiny model in "
        "float32, with the engine's own rules off, and audited once. Faults found only by `own alarms` were "
        "reported by the server's self-checks in its metrics; other servers have none.",
        "",
        "| fault | drafts | named | probes that failed | tokens replayed | from |",
        "|---|---|---|---|---:|---|",
        *(lines[key] for key in sorted(lines, key=lambda key: (order.get(key[0], len(order)), key))),
    ]
    write_section(page, SECTION, "faults", "\n".join(text), head=PAGE_HEAD)


def _fault_row(fault: str, way: str, audit: Audit, origin: str) -> str:
    own = fault.split()[0]
    named = "yes" if own in audit.faults else "as another" if audit.findings else "not seen"
    if own == "sound":
        named = "FALSE ALARM" if audit.findings else "nothing found"
    failed = ", ".join(one.probe for one in audit.outcomes if one.verdict is ProbeVerdict.FAILED)
    replayed = sum(one.figures.get("tokens", 0) for one in audit.outcomes if one.probe == "replayed logprobs")
    return f"| {fault} | {way} | {named} | {failed} | {replayed:,.0f} | {origin} |"


def _faults_there(page: Path) -> dict[tuple[str, str], str]:
    """The existing rows of the page, by fault and way."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    section = text.partition(f"<!-- {SECTION}: faults -->")[2].partition(f"<!-- end of {SECTION} -->")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| sound ", "| F"))]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    return {(cell[0], cell[1]): line for cell, line in zip(cells, rows, strict=True)}
