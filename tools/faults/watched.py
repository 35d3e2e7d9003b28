"""Known faults put back into our service, which is then watched from outside until the referee finds them."""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.exchange.traffic import Traffic, drive
from deploy.reports.progress import View
from deploy.run.replayers import ReplayerOptions
from deploy.watch.app import referee_app
from deploy.watch.proxy import ProxyOptions, running_proxy
from deploy.watch.referee import Referee, RefereeOptions
from deploy.watch.run import running_referee
from serve_app.referee.judge.tolerance import Tolerance
from tools.faults.outside import faulty_servers
from tools.faults.served import FaultyServer, serving
from tools.faults.tiny import VOCAB_SIZE, write_tiny_pair
from tools.markdown import write_section
from tools.provenance import provenance

SOUND = "sound"
FAULTS = (
    "F1 stale drafts near the length limit",
    "F5 a reused slot's last token after a handoff",
    "F13 the handoff's last position is not computed",
    "F14 a block of the prefix cache holds other tokens",
    "F14 a block's name leaves out what stands before it",
    "F3 draft probabilities of an earlier step",
    "F4 draft probabilities in another order",
    "F7 q at another temperature",
    "F8 argmax match at T > 0",
    "F8 the residual is drawn from p",
    "F12 the first draft is committed unverified",
    "F10 logprob 0 for every token",
    "F10 logprobs of another row",
)
"""Faults that change more than a few served tokens in ten thousand; docs/runs/watch.md names others."""

_MOST_TOKENS = 60_000
_SECONDS = 300.0
_NUM_PROMPTS = 96
_SEED = 20_261


@dataclass(frozen=True, slots=True)
class WatchedFault:
    """The result of watching one fault."""

    fault: str
    way: str  # in which it was served
    found: str  # the referee's first finding, with its stratum; "" = none
    tokens: int  # judged until then, or until the end
    answers: int  # judged until then, or until the end

    @property
    def is_wrong(self) -> bool:
        """Return whether a sound server was found at fault, or a fault was missed."""
        return bool(self.found) == (self.fault == SOUND)

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def watch_faults(names: Sequence[str], view: View | None = None, most_tokens: int = _MOST_TOKENS) -> list[WatchedFault]:
    """Serve a tiny model with each of these faults (`sound` = none), and watch each server through the proxy until its
    fault is found, or for so many tokens."""
    view, found = view or View(), list[WatchedFault]()
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = write_tiny_pair(Path(scratch))
        for number, name in enumerate(names, start=1):
            view.stage(f"fault {number} of {len(names)}, {name}", lambda: f"{len(found)} servers watched so far")
            for way, server in faulty_servers(name, target, draft, guarded=name == SOUND).items():
                one = asyncio.run(_watch(name, way, server, target, most_tokens))
                view.say(f"{name}, {way}: {one.found or 'nothing found'} in {one.tokens:,} tokens")
                found.append(one)
    return found


async def _watch(name: str, way: str, server: FaultyServer, folder: Path, most_tokens: int) -> WatchedFault:
    options = RefereeOptions(tolerance=Tolerance.against_float32("float32"))
    with contextlib.ExitStack() as stack:
        url = await asyncio.to_thread(stack.enter_context, server.running())
        async with (
            running_referee(options, ReplayerOptions(folder, threads=1)) as referee,
            serving_app(referee) as judge,
            running_proxy(ProxyOptions(url, dialect="truespec", referee=judge)) as (proxied, _),
        ):
            until = time.monotonic() + _SECONDS

            def enough() -> bool:
                seen = referee.num_tokens
                return bool(referee.first_finding) or seen >= most_tokens or time.monotonic() > until

            await drive(proxied, Traffic("audited", _prompts(), max_tokens=(24, 48, 96), at_once=8), enough)
            first = referee.first_finding
            if first is None:
                return WatchedFault(name, way, "", referee.num_tokens, referee.judged.num_answers)
            return WatchedFault(name, way, first.found, first.tokens_in_all, first.answers)


def write_table(found: Sequence[WatchedFault], page: Path) -> None:
    """Write what became of the faults into a section of the page."""
    origin = provenance()
    lines = [
        "## Known faults of our own service, watched from outside",
        "",
        f"`python -m tools.faults find --watched`: {origin['date'][:10]}, commit {origin['commit']}, {origin['cpu']}.",
        "",
        "Each fault was served by a tiny model in float32 with the engine's own rules off, behind the proxy with a "
        f"share of 1, until the referee raised an alarm or had judged {_MOST_TOKENS:,} tokens. The traffic mixes "
        "sampling parameters, streams and lengths. Each was served once, so a delay shows its order of magnitude.",
        "",
        "| fault | drafts | found by (stratum) | after tokens | after answers |",
        "|---|---|---|---:|---:|",
        *(
            f"| {one.fault} | {one.way} | {one.found or 'nothing'} | {one.tokens:,} | {one.answers:,} |"
            for one in found
        ),
    ]
    write_section(page, "watch", "faults", "\n".join(lines), head="# The watch: what was run\n")


def _prompts() -> Sequence[dict[str, Any]]:
    """Token ids: some repeat themselves, so that there is something to draft, and some share a passage behind different
    beginnings, so that blocks of the prefix cache hold the same tokens."""
    draw = random.Random(_SEED)
    passage = [draw.randrange(3, VOCAB_SIZE) for _ in range(24)]
    prompts = []
    for number in range(_NUM_PROMPTS):
        ids = [draw.randrange(3, VOCAB_SIZE) for _ in range(8 + number % 4)]
        prompts.append({"prompt": [ids * 4, ids * 2, ids[:8] + passage][number % 3]})
    return prompts


@contextlib.asynccontextmanager
async def serving_app(referee: Referee) -> AsyncIterator[str]:
    """The referee's routes on a free port of this process; its URL."""
    started: list[str] = []
    async with serving(referee_app(referee), started):
        yield started[0]
