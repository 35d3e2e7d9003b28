"""Our own service behind the proxy: clients get byte for byte what they get without it."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.watch.proxy import ProxyOptions, running_proxy
from serve_app.referee.wire.exchange import COMPLETIONS
from tools.faults.served import TINY, FaultyServer

# What differs from one reply to the next, and how much of the prompt the cache had.
_OWN = re.compile(rb'"(id|system_fingerprint)":"[^"]*"|"(created|cached_tokens)":\d+')

KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": None},
    {"return_token_ids": True, "logprobs": 2},
    {"stream_options": {"include_usage": True}},
    {"stop": ["n"]},
]


@pytest.fixture(scope="module")
def url(folder: Path) -> Any:
    with FaultyServer(folder, config=TINY).running() as address:
        yield address


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=json.dumps)
async def test_replies_are_what_they_are_without_the_proxy(url: str, kind: dict[str, Any], streamed: bool) -> None:
    body = {"model": "audited", "prompt": [5, 6, 7] * 6, "temperature": 0, "max_tokens": 9, **kind}
    body |= {"stream": True} if streamed or "stream_options" in kind else {}
    async with (
        running_proxy(ProxyOptions(url, dialect="truespec", as_sent=0.0)) as (proxied, proxy),
        aiohttp.ClientSession() as http,
    ):
        replies = []
        for address in (url, proxied, proxied):  # the first of its form passes unwatched
            async with http.post(address + COMPLETIONS, json=body) as reply:
                events = _OWN.sub(b"", await reply.read()).splitlines()
                replies.append((reply.status, sorted(events) if "n" in kind else events))  # choices interleave freely
        captured = proxy.counts["captured"]
    assert replies[0][0] == 200
    assert replies[1] == replies[0]
    assert replies[2] == replies[0]
    assert captured >= 1
