"""Two replicas in each pool: prompts find the cache that has their prefix, whichever decode replica asks."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.services import MODEL, Service, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

POOLS = {"prefill": {"replicas": 2, "num_cpus": 0.5}, "decode": {"replicas": 2, "num_cpus": 0.5}}
SESSIONS = "abcdefghijklmn"  # all of one replica: one time in eight thousand
PROMPTS = [[3 + (number * 31 + index * 7) % 400 for index in range(80)] for number in range(6)]


@pytest.fixture(scope="module")
def service(ray_port: int, tiny_folder: Path) -> Iterator[Service]:
    args = app_args(tiny_folder, "disaggregated", pools=POOLS, routing={"period_s": 0.5})
    with deployed(ray_port, "prefixes", args) as running:
        yield running


def ask(service: Service, prompt: list[int], session: str, max_tokens: int = 4) -> dict[str, Any]:
    with service.http() as http:
        reply = http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True},
            headers={"x-session-id": session},
        )
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_same_prefix_goes_to_the_prefill_replica_that_has_it(service: Service) -> None:
    assert [cached(ask(service, prompt, "first")) for prompt in PROMPTS] == [0] * len(PROMPTS)

    def found(sessions: list[str]) -> bool:  # not while the replica that has it is busy with replays
        return all(cached(ask(service, prompt, session)) == 64 for session in sessions for prompt in PROMPTS)

    wait_for(lambda: found(["first"]), "the decode replica that sent them finding them again")
    others = itertools.count(5)  # a prompt that was asked before is found by itself
    wait_for(lambda: cached(ask(service, [*PROMPTS[0][:50], next(others)], "first")) == 48, "a shared part being found")
    # Other sessions are another replica's, which knows only what it is sent.
    everybody = [f"session-{number}" for number in range(6)]
    wait_for(lambda: found(everybody), "every decode replica knowing what the prefill replicas have cached")


def test_a_session_stays_with_its_replica_and_sessions_are_shared_out(service: Service) -> None:
    lengths = itertools.count(5)  # each answer has one of its own, by which its replay is known

    def served_by(sessions: str) -> dict[str, str]:
        asked = dict(zip(lengths, sessions, strict=False))
        for length, session in asked.items():
            ask(service, PROMPTS[0], session, length)
        replicas: dict[str, str] = {}

        def reported() -> bool:
            with service.http() as http:
                latest = http.get("/status").json()["latest"]
            replicas.update((asked[one["num_tokens"]], one["replica"]) for one in latest if one["num_tokens"] in asked)
            return len(replicas) == len(sessions)

        wait_for(reported, "the replays of the answers")
        return replicas

    halves = SESSIONS[::2], SESSIONS[1::2]  # as many as the status keeps
    homes = served_by(halves[0]) | served_by(halves[1])
    assert len(set(homes.values())) == 2
    assert served_by(halves[0]) | served_by(halves[1]) == homes
