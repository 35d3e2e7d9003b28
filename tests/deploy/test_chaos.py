"""The chaos and load commands, as far as they need no cluster: what is asked, and how answers are judged."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deploy.chaos import replicas
from deploy.chaos.command import sizes_to_kill
from deploy.chaos.load import LoadFigures, quantile, run_load, saturation_per_s
from deploy.chaos.nodes import POOL_LABEL, NodeShape, one_node_a_replica
from deploy.chaos.page import write_chaos, write_load
from deploy.chaos.replicas import Killer, memory_bytes, replica_pids
from deploy.chaos.run import ChaosFigures
from deploy.chaos.streams import ask_all, complete, differences, plan
from deploy.exchange.answers import Choice, Reply
from deploy.exchange.client import Attempt
from deploy.exchange.exchanges import COMPLETIONS
from deploy.run.processes import process_tree
from serve_app.config.files import load_config, parse_args
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError
from tests.support import fake_openai
from tests.support.fake_openai import BREAK, FakeOpenAI, failure

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
LOADED = LoadFigures(2.0, 60.0, {"200": 9, "429": 3}, 0, 0.15, 0.1, 0.2, 1.0, 2.0, 3.0, 500.0, 501.0)


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


def test_the_plan_is_a_function_of_its_seed() -> None:
    bodies = plan("m", 40, 3, 96)
    assert bodies == plan("m", 40, 3, 96) != plan("m", 40, 4, 96)
    assert all(body["reproducible"] and 24 <= body["max_tokens"] <= 96 for body in bodies)
    assert len({body["seed"] for body in bodies}) == 40


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


def test_each_replica_gets_a_node_and_the_head_is_left_alone() -> None:
    data = yaml.safe_load(CONFIG.read_text())
    args = data["applications"][0]["args"]
    args["pools"]["decode"]["num_cpus"] = 0.5
    data["applications"][0]["deployments"] = [{"name": "DecodeServer", "num_replicas": 3}]
    placed, head, nodes = one_node_a_replica(ServeFile.model_validate(data))
    assert head == NodeShape(0, {POOL_LABEL: "head"})
    assert nodes == [NodeShape(1, {POOL_LABEL: "prefill"})] * 2 + [NodeShape(1, {POOL_LABEL: "decode"})] * 3
    config = parse_args(placed.application.args.model_dump(exclude_unset=True))  # as the application is built from it
    for name in config.pool_names:
        assert config.pool(name).label_selector == {POOL_LABEL: name}
        assert config.pool(name).num_cpus == 1, "a node has room for one replica"
    assert config.pool("decode").replicas == 3
    assert config.router is not None and config.router.label_selector == {POOL_LABEL: "head"}
    args["pools"]["decode"]["num_gpus"] = 1
    with pytest.raises(ConfigError, match=r"pools\.decode\.num_gpus is 1: .*--kill-nodes 0"):
        one_node_a_replica(ServeFile.model_validate(data))


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


def test_all_below_a_process_is_found() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(end=str(1), flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read(1) == b"1"
        found = process_tree(process.pid)
        assert found[0] == process.pid and len(found) == 2
        assert {os.getpid(), *found} <= {*process_tree(os.getpid())}
        process.stdin.close()


@pytest.mark.parametrize(
    "change",
    [{"complete": 1}, {"identical": 1}, {"duplicated_tokens": 1}, {"missing_tokens": 1}, {"leaks": 1}],
    ids=str,
)
def test_every_kind_of_damage_counts(change: dict[str, int]) -> None:
    assert FIGURES.sound
    assert not replace(FIGURES, **change).sound  # type: ignore[arg-type]


def test_only_service_and_polite_refusals_are_in_order() -> None:
    assert LOADED.in_order
    assert not replace(LOADED, statuses={"200": 9, "500": 1}).in_order
    assert not replace(LOADED, statuses={"0": 1}).in_order
    assert not replace(LOADED, broken=1).in_order


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.95, 1.0)] == [50, 95, 100]
    assert quantile([], 0.5) == 0


def test_the_page_keeps_one_section_of_each_command_and_model(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "reliability.md"
    write_chaos(page, FIGURES, "truespec chaos", "tiny")
    assert "| held with nobody there | nothing |" in page.read_text()
    assert "| 3.5 MiB, 7.25 ms within the node |" in page.read_text()
    write_chaos(page, replace(FIGURES, nodes=5, nodes_killed=1), "truespec chaos --kill-nodes 1", "tiny")
    write_load(page, [LOADED, LOADED], "truespec load", "tiny")
    leaky = replace(FIGURES, requests=77, leaks=1, leaked={"requests": 0.0, "pinned_objects": 3})
    write_chaos(page, leaky, "truespec chaos", "tiny")
    text = page.read_text()
    assert text.startswith("# Reliability")
    assert text.count("<!-- chaos: tiny -->") == text.count("<!-- load: tiny -->") == 1
    assert text.count("<!-- chaos: tiny on 5 nodes -->") == text.count("| of them with their whole node | 1 |") == 1
    assert "## Nodes killed under load: tiny on 5 nodes" in text and "7.25 ms from node to node" in text
    assert "| held with nobody there | 3 pinned objects |" in text
    assert "| requests | 77 |" in text and "9 × 200, 3 × 429" in text
    assert time.strftime("%Y-%m-%d") in text


def test_figures_are_json() -> None:
    reported = json.loads(json.dumps(FIGURES.as_dict()))
    assert {"requests", "complete", "identical", "duplicated_tokens", "missing_tokens", "leaks", "kills"} <= set(
        reported
    )


_MAPS_A_FILE = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
sum(pages[::4096])
print(".", end="", flush=True)
sys.stdin.read()
"""
_STARTS_TWO = """
import subprocess, sys
code, file, app, session = sys.argv[1:]
children = [subprocess.Popen([sys.executable, "-c", code, file, f"ray::ServeReplica:{app}:D"]) for _ in range(2)]
[child.wait() for child in children]
"""


def test_memory_that_replicas_share_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for replicas: two processes under a replica's title that map the same 64 MiB, and their parent, which
    like a raylet has its cluster's session in its arguments."""
    file, app = tmp_path / "shared", f"app-{tmp_path.name}"
    file.write_bytes(bytes(64 * 2**20))
    monkeypatch.setattr(
        replicas.ray, "is_initialized", lambda: False
    )  # as other tests of this process may have left it
    assert memory_bytes(app) == 0
    command = [sys.executable, "-c", _STARTS_TWO, _MAPS_A_FILE, str(file), app, "session-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.read(2) == "..", "both have mapped it"
        held = memory_bytes(app) / 2**20
        monkeypatch.setattr(replicas.ray, "is_initialized", lambda: True)
        there = []
        for session in ("session-1", "session-2"):
            monkeypatch.setattr(replicas.global_worker, "node", SimpleNamespace(session_name=session))
            there.append(len(replica_pids(app, "")))
        parent.stdin.close()
    assert 64 < held < 64 + 60, "three small interpreters, and the file once"
    assert there == [2, 0], "another cluster's application of the same name is not ours"


# -- against a server that answers as a test says --------------------------------------------------------------------


def streamed(*chunks: dict[str, object], end: str = "data: [DONE]\n\n") -> fake_openai.Reply:
    """A stream of choices."""
    return 200, {}, "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + end


WHOLE = streamed(
    {"text": "ab", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1, -2]}, "finish_reason": None},
    {"text": "c", "token_ids": [3], "finish_reason": "length"},
)
BROKEN_OFF = streamed({"text": "ab", "token_ids": [1, 2]}, end='data: {"error": {"message": "gone"}}\n\n')


def test_streams_are_read_to_their_end_and_refusals_asked_again() -> None:
    server = FakeOpenAI(lambda prompt, times: failure(429, "full") if times == 1 and prompt == "later" else WHOLE)
    with server.running():
        bodies = [{"prompt": prompt, "stream": True} for prompt in ("now", "later")]
        attempts = asyncio.run(ask_all(server.url, bodies, 2))
    choices = [one.reply.first for one in attempts]
    assert [(one.text, one.token_ids, one.logprobs) for one in choices] == [("abc", [1, 2, 3], [-1.0, -2.0])] * 2
    assert all(map(complete, attempts))
    assert server.asked == {"now": 1, "later": 2}


@pytest.mark.parametrize(
    ("reply", "statuses", "broken"),
    [
        (WHOLE, {"200"}, False),
        (failure(429, "full"), {"429"}, False),
        (BROKEN_OFF, {"200"}, True),
        (failure(500, "fault"), {"500"}, True),
        (BREAK, {"0"}, True),
    ],
    ids=["served", "refused", "broken off", "a fault", "no answer"],
)
def test_load_reports_order_from_disorder(reply: fake_openai.Reply, statuses: set[str], broken: bool) -> None:
    server = FakeOpenAI(lambda prompt, times: reply)
    bodies = [{"prompt": str(number), "stream": True} for number in range(5)]
    with server.running():
        figures = run_load(server.url, bodies, rate_per_s=30, seconds=0.5, memory_bytes=lambda: 2**20, seed=1)
    assert set(figures.statuses) == statuses
    assert sum(figures.statuses.values()) == sum(server.asked.values()) > 3
    assert figures.in_order != broken
    assert (figures.memory_begin_mib, figures.memory_end_mib) == (1, 1)
    assert (figures.whole_max_s > 0) == (reply is WHOLE)


def test_saturation_counts_what_is_complete() -> None:
    bodies = [{"prompt": prompt, "stream": True} for prompt in ("a", "b")]
    with FakeOpenAI(lambda prompt, times: WHOLE).running() as server:
        assert saturation_per_s(server.url, bodies, concurrency=2, seconds=0.2) > 0
    with FakeOpenAI(lambda prompt, times: BROKEN_OFF).running() as server:
        assert saturation_per_s(server.url, bodies, concurrency=1, seconds=0.1) == 0


def test_a_cluster_that_is_still_starting_ends_with_the_command(tmp_path: Path) -> None:
    """On SIGTERM, too: it would go on without anybody who knows of it."""
    code = (
        "import subprocess, sys, time\n"
        "from deploy.chaos import nodes\n"
        "def waiting(process, port, output):\n"
        "    print(process.pid, output.parent, flush=True)\n"
        "    time.sleep(60)\n"
        "nodes._ray_start = lambda *_: subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "nodes._wait_until_it_listens = waiting\n"
        "with nodes.local_cluster(nodes.NodeShape(1, {}), []):\n"
        "    pass"
    )
    environment = os.environ | {"HOME": str(tmp_path)}  # Ray writes its token there
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pid, folder = process.stdout.readline().split()
        process.terminate()
        process.wait(30)
    assert not Path("/proc", pid).exists() and not Path(folder).exists()
