"""Servers with known faults, by the drafter with which each shows, and the audit of one from outside."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.run.replayers import ReplayerOptions
from deploy.watch.audit import NAMES, AuditOptions, run_audit
from deploy.watch.referee import RefereeOptions
from serve_app.referee.judge.tolerance import Tolerance
from speculative.config import DrafterConfig
from tools.faults.mutants import MUTANTS, Mutant
from tools.faults.served import FOR_MODELS, NGRAM, TINY, FaultyServer
from tools.faults.traffic import DECODERS, TABLES

_SIZES = ("max_model_len", "kv_cache_tokens")
_SHORT_OF_BLOCKS = 256  # tokens of the KV cache, and of the longest sequence; concurrent requests need more
_PUBLISHING_S = 0.05  # of a server in this process, which counts when asked


def found_in(report: dict[str, Any]) -> tuple[str, ...]:
    """The probes that failed, and the referee's alarms."""
    failed = [one["probe"] for one in report["audit"]["probes"] if one["findings"]]
    return (*failed, *sorted({f"alarm: {one['alarm']}" for one in report["findings"]}))


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
        return asyncio.run(run_audit(options, referee, ReplayerOptions(folder, threads=1)))
