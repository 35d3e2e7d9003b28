"""The chaos and load commands, as far as they need no cluster: what is asked, and how answers are judged."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.exchange.client import Attempt
from serve_app.config.files import load_config
from serve_app.config.serve_file import ServeFile
from serve_app.referee.wire.exchange import COMPLETIONS
from serve_app.referee.wire.reply import Choice, Reply
from speculative.errors import ConfigError
from tests.support import fake_openai
from tests.support.fake_openai import FakeOpenAI, failure
from tools.chaos import replicas
from tools.chaos.__main__ import sizes_to_kill
from tools.chaos.replicas import Killer
from tools.chaos.run import ChaosFigures
from tools.chaos.streams import ask_all, complete, differences

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "resilient.yaml"


def answered(error: str = "", **change: Any) -> Attempt:
    choice = Choice(token_ids=[1, 2, 3, 4], logprobs=[-1.0] * 4, text="abc", finish_reason="length")
    return Attempt(COMPLETIONS, {}, 200, Reply(choices={0: replace(choice, **change)}), error)


CALM = answered()
FIGURES = ChaosFigures(
    requests=2, complete=2, identical=2, duplicated_tokens=0, missing_tokens=0, leaks=0, nodes=1, kills=1,
    kills_by_deployment={"DecodeServer": 1}, nodes_killed=0, leaked={}, unpinned_objects=0, resumed=1,
    prefill_failures=0, handoff_mib=3.5, handoff_transfer_ms=7.25, tokens=9, undisturbed_s=1.0, disturbed_s=2.0,
    errors=[],
)  # fmt: skip


@pytest.mark.parametrize(
    ("token_ids", "duplicated", "missing"),
    [
        ([1, 2, 3, 4], 0, 0),
        ([1, 2, 3], 0, 1),
        ([1, 2, 2, 3, 4], 1, 0),
        ([1, 2, 9, 4], 0, 0),
        ([3, 4], 0, 2),
        ([], 0, 4),
    ],
)
def test_lost_and_repeated_tokens_are_reported_apart(token_ids: list[int], duplicated: int, missing: int) -> None:
    found = differences(CALM, answered(token_ids=token_ids))
    assert (found.duplicated_tokens, found.missing_tokens) == (duplicated, missing)
    assert found.identical == (token_ids == [1, 2, 3, 4])


@pytest.mark.parametrize("change", [{"text": "ab"}, {"logprobs": [-1.0] * 3}, {"finish_reason": "stop"}])
def test_the_same_tokens_are_not_all(change: dict[str, object]) -> None:
    assert not differences(CALM, answered(**change)).identical


def test_what_is_broken_off_is_not_complete() -> None:
    assert complete(CALM)
    assert not complete(answered(finish_reason=""))
    assert not complete(answered("the server let go"))


def test_only_pools_that_can_lose_a_replica_are_shot_at() -> None:
    data = yaml.safe_load(CONFIG.read_text())
    assert sizes_to_kill(load_config(CONFIG).application) == {"PrefillServer": 2, "DecodeServer": 2}
    args = data["applications"][0]["args"]
    args["pools"]["prefill"]["replicas"] = 1
    assert sizes_to_kill(ServeFile.model_validate(data).application) == {"DecodeServer": 2}
    args["pools"]["decode"]["replicas"] = 1
    with pytest.raises(ConfigError, match="replicas"):
        sizes_to_kill(ServeFile.model_validate(data).application)
    args["recovery"]["resume"] = False
    del args["pools"]["router"]
    with pytest.raises(ConfigError, match=r"recovery\.resume"):
        sizes_to_kill(ServeFile.model_validate(data).application)


def test_every_second_kill_is_a_whole_node_until_enough_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, killed, lost = {1, 2}, list[int](), list[int]()

    def dies(where: list[int], pid: int) -> None:
        where.append(pid)
        alive.symmetric_difference_update({pid, pid + 2})  # another takes its place

    monkeypatch.setattr(replicas, "replica_pids", lambda app, deployment: sorted(alive))
    monkeypatch.setattr(replicas.os, "kill", lambda pid, number: dies(killed, pid))
    killer = Killer("app", {"DecodeServer": 2}, seed=1, most_nodes=2, replace_node_of=lambda pid: dies(lost, pid))
    order = []
    for _ in range(6):
        killer.kill("DecodeServer")
        order.append((len(killed), len(lost)))
    assert order == [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2), (4, 2)]
    assert (killer.kills, killer.nodes_killed) == ({"DecodeServer": 6}, 2)


@pytest.mark.parametrize(
    "change",
    [{"complete": 1}, {"identical": 1}, {"duplicated_tokens": 1}, {"missing_tokens": 1}, {"leaks": 1}],
    ids=str,
)
def test_every_kind_of_damage_counts(change: dict[str, int]) -> None:
    assert FIGURES.sound
    assert not replace(FIGURES, **change).sound  # type: ignore[arg-type]


# -- against a server that answers as a test says --------------------------------------------------------------------


def streamed(*chunks: dict[str, object], end: str = "data: [DONE]\n\n") -> fake_openai.Reply:
    """A stream of choices."""
    return 200, {}, "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + end


WHOLE = streamed(
    {"text": "ab", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, -2]}, "finish_reason": None},
    {"text": "c", "token_ids": [3], "finish_reason": "length"},
)


def test_streams_are_read_to_their_end_and_refusals_asked_again() -> None:
    server = FakeOpenAI(lambda prompt, times: failure(429, "full") if times == 1 and prompt == "later" else WHOLE)
    with server.running():
        bodies = [{"prompt": prompt, "stream": True} for prompt in ("now", "later")]
        attempts = asyncio.run(ask_all(server.url, bodies, 2))
    choices = [one.reply.first for one in attempts]
    assert [(one.text, one.token_ids, one.logprobs) for one in choices] == [("abc", [1, 2, 3], [-1.0, -2.0])] * 2
    assert all(map(complete, attempts))
    assert server.asked == {"now": 1, "later": 2}
