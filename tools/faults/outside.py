"""The audit of the audit: servers with known faults, audited from outside."""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deploy.options import beginning_with
from deploy.reports.model import ReportTable
from deploy.reports.progress import View
from deploy.run.replayers import ReplayerOptions
from deploy.watch.audit import NAMES, AuditOptions, run_audit
from deploy.watch.referee import RefereeOptions
from serve_app.referee.tolerance import Tolerance
from speculative.config import DrafterConfig
from tools.faults.mutants import FRONT_END, MUTANTS, Mutant
from tools.faults.served import FOR_MODELS, NGRAM, NOT_SERVABLE, TINY, FaultyServer
from tools.faults.tiny import write_tiny_pair
from tools.faults.traffic import DECODERS, TABLES
from tools.markdown import table, write_section
from tools.provenance import provenance

_SIZES = ("max_model_len", "kv_cache_tokens")
_SHORT_OF_BLOCKS = 256  # tokens of the KV cache, and of the longest sequence; concurrent requests need more
_PUBLISHING_S = 0.05  # of a server in this process, which counts when asked


@dataclass(frozen=True, slots=True)
class FaultFound:
    """Result of auditing one faulty server.

    way: the drafter.
    found: the probes that failed, and the referee's alarms.
    """

    fault: str
    way: str
    found: tuple[str, ...]

    @property
    def is_false_alarm(self) -> bool:
        """Return whether something was found in a sound server."""
        return self.fault == "sound" and bool(self.found)

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def audit_faults(names: Sequence[str], page: Path | None, view: View | None = None) -> list[FaultFound]:
    """Serve a tiny model with each of these faults (`sound` = none), audit each server, and write a table of them."""
    view, found = view or View(), []
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = write_tiny_pair(Path(scratch))
        for number, name in enumerate(names, start=1):
            view.stage(f"fault {number} of {len(names)}, {name}")
            for way, server in faulty_servers(name, target, draft, guarded=name == "sound").items():
                found.append(FaultFound(name, way, found_in(audit_faulty(server, target))))
                view.say(f"{name}, {way}: {', '.join(found[-1].found) or 'nothing found'}")
    if page is not None:
        _write(found, page)
    return found


def found_in(report: dict[str, Any]) -> tuple[str, ...]:
    """The probes that failed, and the referee's alarms."""
    failed = [one["probe"] for one in report["audit"]["probes"] if one["findings"]]
    return (*failed, *sorted({f"alarm: {one['alarm']}" for one in report["findings"]}))


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


def audit_faulty(
    server: FaultyServer, folder: Path, only: Collection[str] = NAMES, requests: int = 200
) -> dict[str, Any]:
    """Serve and audit, with the probes in `only`."""
    referee = RefereeOptions(tolerance=Tolerance.against_float32("float32"))
    with server.running() as url:
        options = AuditOptions(url, requests=requests, only=only, publishing_s=_PUBLISHING_S)
        return run_audit(options, referee, ReplayerOptions(folder, threads=1))


def _write(found: Sequence[FaultFound], page: Path) -> None:
    origin = provenance()
    rows = [(one.fault, one.way, ", ".join(one.found) or "nothing") for one in found]
    text = [
        "## Faults put back, audited from outside",
        "",
        f"`python -m tools.faults find --outside`: {origin['date'][:10]}, commit {origin['commit']}, {origin['cpu']}.",
        "",
        "Each fault was served with a tiny model in float32, with the engine's own rules off, and audited once by "
        "`truespec watch audit`.",
        "",
        table(ReportTable("", ("fault", "drafts", "found by"), rows)),
    ]
    write_section(page, "watch audit", "faults", "\n".join(text), head="# Audits that were run\n")
