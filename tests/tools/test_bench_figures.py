"""The bench's figures: what is counted, what is paired with what, and what the tables say."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.exchange.prompts import KINDS
from speculative.errors import ConfigError
from tests.tools.test_bench_run import plan
from tools.bench.figures import acceptance, paired_ratio, rows
from tools.bench.plan import BenchCase
from tools.bench.prompts import read_prompts
from tools.bench.report import tables, write_markdown
from tools.bench.rounds import BenchResult, BenchSample
from tools.bench.workers.channel import BatchOfPrompts, Meter, checked
from tools.bench.workers.http_load import ServerFailed, ServerLoad

pytestmark = pytest.mark.slow


def sample(engine: str, speed: float, number: int = 0, kind: str = "chat", **reported: Any) -> BenchSample:
    """10 tokens at `speed` after a first token that took 0.5 s."""
    timing = {"wall_s": 0.5 + 10 / speed, "num_tokens": 11, "decode_s": 10 / speed, "decode_tokens": 10}
    memory = {"memory": {"resident_mib": 1.0, "peak_mib": 2.0}}
    common = {"first_token_s": [0.5], "token_ids": [[1, 2, 3, 4]], **memory}
    return BenchSample(engine, BenchCase(kind, 1, 0.0), number, {**timing, **common, **reported}, prompt_tokens=100)


def result(samples: Sequence[BenchSample], against: Sequence[str], **changes: Any) -> BenchResult:
    names = list(dict.fromkeys(one.engine for one in samples))
    prompts = {"chat": [[1]], "code": [[1]]}
    bench_plan = plan(*names, prompts=prompts, rounds=3, against=tuple(against), **changes)
    about = {"date": "today", "command": "python -m tools.bench", "commit": "abc", "cpu": "a cpu"}
    about |= {"cpu_flags": ["avx2"]}
    about |= {"cores": 2, "memory_gib": 8.0, "gpu": None, "python": "3", "versions": {"torch": "1"}}
    about |= {"others_before": 0.02, "others_meanwhile": 2.5}
    return BenchResult(bench_plan, about, list(samples), versions={name: {"x": "1"} for name in names})


def test_decoding_is_timed_from_the_last_streams_first_token() -> None:
    meter = Meter(2, began=10.0)
    meter.emit(0, [1, 2], at=11.0)
    meter.emit(0, [3], at=11.5)
    meter.emit(1, [7], at=12.0)
    meter.emit(0, [4, 5], at=12.0)
    meter.emit(1, [8, 9, 10], at=14.0)
    meter.emit(0, [], at=99.0)
    assert meter.sample() == {
        "wall_s": 4.0,
        "first_token_s": [1.0, 2.0],
        "num_tokens": 9,
        "decode_s": 2.0,
        "decode_tokens": 3,
        "token_ids": [[1, 2, 3, 4, 5], [7, 8, 9, 10]],
    }


def test_an_answer_of_another_length_compares_with_nothing() -> None:
    ask = BatchOfPrompts([[1], [2]], 3, 0.0, 0)
    assert checked(ask, {"token_ids": [[1, 2, 3], [4, 5, 6]]})
    with pytest.raises(RuntimeError, match=r"3 tokens .*\[3, 2\]"):
        checked(ask, {"token_ids": [[1, 2, 3], [4, 5]]})


def test_ratios_are_paired() -> None:
    theirs = np.geomspace(1, 1000, 9)  # rounds that differ a thousandfold
    ratio = paired_ratio("b", [(1.5 * speed, speed) for speed in theirs])
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    noisy = paired_ratio("b", [(value, 1.0) for value in (0.9, 1.0, 1.1, 1.2, 1.3)])
    assert noisy.low < 1.1 < noisy.high
    assert noisy.median == pytest.approx(1.1)


def test_engines_are_compared_with_the_best_of_those_named() -> None:
    speeds = {"ours/off": (10, 12, 11), "ours/ngram:k=1": (20, 21, 22), "ours/dynamic": (19, 22, 24)}
    samples = [sample(engine, speed, n) for engine, given in speeds.items() for n, speed in enumerate(given)]
    found = {row.engine: row for row in rows(result(samples, ["ours/off", "ours/ngram:k=1"]))}
    assert found["ours/ngram:k=1"].ratio is None
    dynamic = found["ours/dynamic"]
    assert dynamic.ratio is not None and dynamic.ratio.against == "ours/ngram:k=1"
    assert dynamic.ratio.median == pytest.approx(22 / 21)
    assert (dynamic.speed.low, dynamic.speed.median, dynamic.speed.high) == pytest.approx((19, 22, 24))


def test_the_first_token_can_be_what_is_measured() -> None:
    samples = [sample("a/x", 10.0, first_token_s=[0.5]), sample("b/x", 10.0, first_token_s=[0.25])]
    found = result(samples, ["a/x"], measure="first-token")
    first, second = rows(found)
    assert (first.speed.median, second.speed.median) == pytest.approx((200, 400))
    assert second.ratio is not None and second.ratio.median == pytest.approx(2), "half of the time"
    assert "tokens of the prompts a second, until the first token" in tables(found)[0].title


def test_acceptance_adds_up_over_rounds_of_several_lengths() -> None:
    reported = [
        {"rounds_with_drafts": 4, "drafted_per_position": [4, 2], "accepted_per_position": [3, 1]},
        {"rounds_with_drafts": 6, "drafted_per_position": [6], "accepted_per_position": [3]},
        {"rounds_with_drafts": 0, "drafted_per_position": [], "accepted_per_position": []},
    ]
    found = acceptance([sample("a/x", 1.0, **one) for one in reported])
    assert found is not None
    assert found.length == pytest.approx(1 + 7 / 10)
    assert found.per_position == pytest.approx((6 / 10, 1 / 2))
    assert acceptance([sample("a/x", 1.0)]) is None


def test_a_section_is_written_again_in_its_place(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    for section, speed in (("one", 11.0), ("two", 22.0), ("one", 33.0)):
        write_markdown(result([sample("a/x", speed)], ["a/x"]), page, section)
    text = page.read_text()
    assert text.count("## one") == text.count("## two") == 1
    assert "| 33.0 |" in text and "| 22.0 |" in text and "| 11.0 |" not in text
    assert text.index("## one") < text.index("## two")
    assert "**The machine was not quiet**: others used up to 2.50 cores" in text


def test_prompts_of_the_package_are_many_and_differ(tmp_path: Path, bench_model: Path) -> None:
    prompts = read_prompts(bench_model, KINDS)
    for kind in KINDS:
        assert len({tuple(prompt) for prompt in prompts[kind]}) >= 16, "16 streams ask 16 questions"
    for length in (1000, 4000):
        (long,) = read_prompts(bench_model, (f"{length}-tokens",)).values()
        assert {len(prompt) for prompt in long} == {length}
        assert len({tuple(prompt[:100]) for prompt in long}) >= 16, "no prefix is shared"
    own = tmp_path / "own.json"
    own.write_text('{"mine": ["Hello"]}')
    assert len(read_prompts(bench_model, ("mine",), own)["mine"]) == 1
    own.write_text("[]")
    with pytest.raises(ConfigError, match=r"own\.json"):
        read_prompts(bench_model, ("mine",), own)
    own.write_text('{"mine": ["Hello"]}')
    with pytest.raises(ConfigError, match="no prompts for 9-tokens, 1000-tokens; it has mine, and"):
        read_prompts(bench_model, ("9-tokens", "1000-tokens"), own)


def served(body: bytes, status: bytes = b"200 OK") -> dict[str, Any]:
    """What the load of one stream makes of a fake server's answer, cut into chunks of 7 bytes."""
    chunks = [body[begin : begin + 7] for begin in range(0, len(body), 7)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + coded)
        await writer.drain()
        writer.close()

    async def talk() -> dict[str, Any]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ServerLoad("127.0.0.1", port, "m")._run(BatchOfPrompts([[1, 2]], 3, 0.0, 0))

    return asyncio.run(talk())


def test_the_load_reads_streams_cut_anywhere() -> None:
    events = [b'{"choices": [{"token_ids": [5, 6]}]}', b'{"choices": [{"token_ids": [7]}]}', b'{"choices": []}']
    body = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    assert served(body)["token_ids"] == [[5, 6, 7]]


def test_the_load_reports_what_a_server_refused() -> None:
    with pytest.raises(ServerFailed, match=r"503 .*\n?.*busy"):
        served(b"busy", b"503 No")
    with pytest.raises(ServerFailed, match="lost"):
        served(b'data: {"error": {"message": "lost"}}\n\n')
