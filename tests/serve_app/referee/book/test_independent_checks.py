"""An independent referee on tiny models: faults that the engine's own replays repeat, and what it cannot check."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.backends.base import Replayed, ServedWeights, Shard
from serve_app.cluster.desired_state import WeightsRef
from serve_app.cluster.weight_transfer import digest_of, fetched
from serve_app.errors import UpdateRefused
from serve_app.guard.referee_counts import count_independent
from serve_app.referee.book import transformers_model as transformers_referee
from serve_app.referee.book.independent_checks import IndependentChecks, IndependentResult
from serve_app.referee.book.transformers_model import TransformersModel, TransformersReferee
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.verdicts import Verdict
from speculative.config import DrafterConfig
from speculative.model.config import ModelConfig
from speculative.model.fingerprint import model_fingerprint
from speculative.model.rotary import Rope
from speculative.request import DEFAULT_VERSION, Request, SamplingParams
from tests.support.engines import NGRAM, NO_DRAFTS, tiny_engine
from tests.support.referees import NUM_TOKENS, TOLERANCE, Court, EngineReplay, Replayer, serve, served
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

PLAIN = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0)
KINDS = (
    PLAIN,
    dataclasses.replace(PLAIN, temperature=0.8, top_p=0.9, logprobs=None),
    dataclasses.replace(PLAIN, temperature=0),
    dataclasses.replace(PLAIN, top_k=40, min_p=0.01, repetition_penalty=1.1, logit_bias=((40, 3.0),)),
    dataclasses.replace(PLAIN, reproducible=True, logprobs=None),
)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("drafter") / "tiny", seed=1)


def weights(folder: Path, **changes: str | None) -> ServedWeights:
    known = ServedWeights(str(folder), str(folder), "float32", model_fingerprint(folder), DEFAULT_VERSION)
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


def requests(count: int) -> Iterator[Request]:
    """Of every kind, with prompts that repeat themselves."""
    numbers = random.Random(0)
    for index in range(count):
        words = [numbers.randrange(3, 512) for _ in range(12)]
        yield Request(f"cmpl-{index}-0", (*words, *words[:8]), KINDS[index % len(KINDS)], seed=numbers.getrandbits(63))


Replay = Callable[[Request], Awaitable[Replayed]]


def test_a_window_that_a_model_knows_nothing_of_hides_nothing_from_the_referee(tmp_path: Path) -> None:
    """Neither at once nor behind a prefix whose keys and values are kept: transformers' cache goes by the field."""
    plain, windowed = (
        TransformersModel(write_tiny_model(tmp_path / str(window), sliding_window=window)) for window in (None, 4)
    )
    tokens = list(range(3, 35))
    windowed.logits(tokens[:24], 20)
    for start in (24, 1):
        assert (windowed.logits(tokens, start) - plain.logits(tokens, start)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["gemma3", "granite4", "olmo3"])
def test_a_prefix_that_is_kept_is_rewound_into_a_window(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers' own cache would have dropped what lies before."""
    monkeypatch.setattr(transformers_referee, "_BLOCK", 16)
    folder, tokens = write_tiny_model(tmp_path, family), list(range(3, 75))
    kept = TransformersModel(folder)
    for own, start in ((tokens[:60], 40), (tokens[:40] + tokens[60:], 45), (tokens[:30], 20)):
        expected = TransformersModel(folder).logits(own, start)
        assert (kept.logits(own, start) - expected).abs().max() < 1e-4


def by_transformers(served: ServedWeights) -> Replay:
    referee = TransformersReferee(bytes)

    async def replay(request: Request) -> Replayed:
        return await asyncio.to_thread(referee.replay, request, served)

    return replay


class Bench:
    """The court, and beside it an independent referee that is shown every verified answer."""

    def __init__(self, court: Court, rate: float = 1.0, replay: Replay | None = None, **rounding: float) -> None:
        self.court = court
        self.other = Replayer()  # of the independent referee, unless there is another
        self.results: Counter[str] = Counter()
        counted = count_independent(court.metrics)

        def ended(result: IndependentResult) -> None:
            self.results[result] += 1
            counted(result)

        self.now = 0.0
        self.checks = IndependentChecks(
            replay or (lambda request: self.other(request, ())),
            dataclasses.replace(TOLERANCE, **rounding),
            court.book,
            rate=rate,
            ended=ended,
            clock=lambda: self.now,
        )
        court.checker.verified = lambda answer, _: self.checks.offer(answer)

    async def judge(self, *answers: Answer) -> list[str]:
        """Have the engine's own referee and then this one check answers; the own verdicts."""
        verdicts = [(await self.court.checker.check(answer)).verdict.value for answer in answers]
        waiting, before = self.checks._queue.qsize(), self.num_checked
        work = asyncio.create_task(self.checks.run())
        while self.num_checked < before + waiting:
            await asyncio.sleep(0)
        work.cancel()
        return verdicts

    @property
    def num_checked(self) -> int:
        return self.results.total() - self.results["skipped"]

    def verdict(self, number: int = 0) -> dict[str, Any]:
        """What is known of an answer now."""
        reply = self.court.book.verdicts.reply(f"cmpl-{number}")
        assert reply is not None
        return reply["choices"][0]  # type: ignore[no-any-return]


async def judged(court: Court, folder: Path, count: int, drafts: DrafterConfig = NGRAM, **changes: str) -> Bench:
    """So many answers of an engine, which another one like it verified."""
    engine = tiny_engine(folder, drafter=drafts, **changes)
    court.checker.replay = EngineReplay(tiny_engine(folder, drafter=NO_DRAFTS, **changes))
    rounding = {"edge_nats": 0.5} if changes.get("dtype") == "bfloat16" else {}
    # Without kernels of ours a row's bits depend on the rows beside it, and in bfloat16 replays differ.
    court.checker.judge = Judge(dataclasses.replace(TOLERANCE, **rounding)).judge
    bench = Bench(court, replay=by_transformers(weights(folder)), **rounding)
    for request in requests(count):
        assert await bench.judge(serve(engine, request)) == [Verdict.VERIFIED]
    return bench


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_sound_engine_is_never_suspected(court: Court, folder: Path, drafter: Path, dtype: str) -> None:
    sampled = DrafterConfig(kind="draft_model", model=str(drafter), num_draft_tokens=3)
    drafts = sampled if dtype == "float32" else NGRAM
    assert (await judged(court, folder, 100, drafts, dtype=dtype)).results["agrees"] == 100


@pytest.mark.parametrize(("field", "wrong"), [("rope", Rope.plain(11_000.0, 16)), ("rms_norm_eps", 1e-4)])
async def test_a_fault_of_every_forward_pass_is_found_though_the_engines_own_replays_share_it(
    court: Court, folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, wrong: Any
) -> None:
    sound = ModelConfig.from_folder
    monkeypatch.setattr(ModelConfig, "from_folder", lambda path: dataclasses.replace(sound(path), **{field: wrong}))
    bench = await judged(court, folder, 20)
    assert bench.results["disagrees"] >= 10
    assert bench.results["agrees"] + bench.results["disagrees"] == 20
    reasons = [one["reason"] for one in court.book.overview()["latest"] if one["verdict"] == "suspect"]
    assert all(reason.startswith("transformers disagrees: ") for reason in reasons)
    assert any("draws: token " in reason for reason in reasons)
    assert any("logprobs are off" in reason for reason in reasons)


async def test_an_answer_it_disagrees_with_is_suspect_and_dumped_and_nobody_trips(court: Court) -> None:
    bench = Bench(court)
    bench.other.drift = -0.01
    court.on_heartbeat("r1")
    assert await bench.judge(served()) == [Verdict.VERIFIED]
    assert bench.results["disagrees"] == 1
    assert [one["kind"] for one in court.book.overview()["incidents"]] == ["independent"]
    found = bench.verdict()
    assert (found["verdict"], found["replayed_by"]) == ("suspect", "p9")
    assert found["reason"] == "p9 disagrees: drift: too many logprobs are off by more than 0.002 nats"
    assert court.on_heartbeat("r1").findings == (), "speculation is not the cause"
    assert court.value("truespec_verdicts_total", verdict="suspect") == 1
    await court.dump("*disagrees*")


async def test_what_its_replays_show_does_not_mix_with_what_the_engines_own_show(court: Court) -> None:
    bench = Bench(court)
    bench.other.drift = -0.0005
    await bench.judge(served())
    assert bench.results["agrees"] == 1
    assert court.value("truespec_replay_tokens_total", stratum="all") == NUM_TOKENS
    assert court.value("truespec_replay_tme_excess_total", stratum="all") == 0
    assert bench.verdict()["verdict"] == "verified"


@pytest.mark.parametrize(
    ("changes", "free_bytes"),
    [
        ({"fingerprint": "0" * 32}, 2**40),  # the files were changed
        ({"source": "/no/such/folder"}, 2**40),
        ({}, 10_000),
    ],
    ids=str,
)
async def test_weights_that_it_cannot_have_are_said_once_and_counted(
    court: Court,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    free_bytes: int,
) -> None:
    monkeypatch.setattr(transformers_referee, "free_host_bytes", lambda: free_bytes)
    bench = Bench(court, replay=by_transformers(weights(folder, **changes)))
    await bench.judge(served(0), served(1))
    assert bench.results["unsupported"] == 2
    assert bench.verdict()["verdict"] == "verified"
    assert caplog.text.count("answers cannot be checked independently: ") == 1


async def test_it_loads_what_is_served_by_now(folder: Path, drafter: Path) -> None:
    referee = TransformersReferee(bytes)
    for source, version in ((folder, "default"), (drafter, "v1")):
        answer = serve(tiny_engine(source), next(requests(1)))
        replayed = referee.replay(answer.scored("again"), weights(source, version=version))
        assert replayed.weight_version == version
        assert replayed.logprobs == pytest.approx(answer.logprobs, abs=1e-4)


async def test_weights_that_came_over_the_wire_are_read_from_their_shards(folder: Path, drafter: Path) -> None:
    """Which are put together as they were where the answer was made; a damaged one is no replay."""
    content = (drafter / "model.safetensors").read_bytes()
    shard = Shard(content, digest_of(content), len(content))

    async def pull(content: bytes) -> bytes:
        return content

    answer = serve(tiny_engine(drafter), next(requests(1)))
    async with fetched(WeightsRef(1, "v1", shards=(shard,)), SimpleNamespace(folder=str(folder)), pull) as (made, _):
        fingerprint = model_fingerprint(Path(made))
    sent = weights(folder, source=None, fingerprint=fingerprint, version="v1")
    replayed = await by_transformers(dataclasses.replace(sent, shards=(shard,)))(answer.scored("again"))
    assert replayed.weight_version == "v1"
    assert replayed.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    damaged = dataclasses.replace(shard, content=content[:-1] + b"\0")
    with pytest.raises(UpdateRefused, match="damaged"):
        await by_transformers(dataclasses.replace(sent, shards=(damaged,)))(answer.scored("again"))


async def test_answers_of_other_weights_are_not_compared(court: Court) -> None:
    bench = Bench(court)
    bench.other.drift = -3.0

    async def now(request: Request, avoid: object) -> Replayed:
        return dataclasses.replace(await court.replayer(request, ()), weight_version="v1")

    court.checker.replay = now
    assert await bench.judge(served(weight_versions=("v1",))) == [Verdict.VERIFIED]
    assert bench.results["outdated"] == 1
    assert bench.verdict()["verdict"] == "verified"


async def test_only_answers_that_a_client_got_and_the_engine_verified_are_offered(court: Court) -> None:
    bench = Bench(court)
    canary = served()
    await bench.judge(dataclasses.replace(canary, request=dataclasses.replace(canary.request, canary=True)))
    court.replayer.drift = -2.0
    assert await bench.judge(served(1)) == [Verdict.SUSPECT]
    assert bench.results.total() == 0


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.2, 20, 60)])
async def test_it_checks_a_share_and_skips_what_is_too_much(court: Court, rate: float, least: int, most: int) -> None:
    bench = Bench(court, rate)
    for number in range(200):
        bench.checks.offer(served(number))
    assert least <= bench.checks._queue.qsize() + bench.results["skipped"] <= most
    assert bench.checks._queue.qsize() <= 4
    long = Bench(court)
    for number in range(3):
        long.checks.offer(dataclasses.replace(served(number), token_ids=(1,) * 5000))
    assert (long.checks._queue.qsize(), long.results["skipped"]) == (1, 3), "the first, not as one of the share"


async def test_a_check_that_fails_is_counted_and_the_next_goes_on(court: Court) -> None:
    bench = Bench(court)
    bench.other.fails = 1
    await bench.judge(served(0), served(1))
    assert (bench.results["failed"], bench.results["agrees"]) == (1, 1)


# -- shapes of a pass --------------------------------------------------------------------------------------------------

RARELY = 1e-9


def of_length(num_rows: int, number: int = 0, num_cached: int = 0) -> Answer:
    """An answer to a prompt of which so many rows were computed."""
    request = Request(f"cmpl-{number}-0", (1,) * (num_rows + num_cached), SamplingParams(max_tokens=NUM_TOKENS))
    return served(number, request=request, num_cached=num_cached, max_model_len=8192)


async def test_a_fault_of_one_remainder_is_found_within_as_many_answers_as_there_are_remainders(court: Court) -> None:
    """Engine and replays are wrong where a kernel's last tile has 77 rows of 128."""
    other = Replayer()

    async def replay(request: Request) -> Replayed:
        other.drift = -0.01 if (request.score_from or 0) % 128 == 77 else 0.0
        return await other(request, ())

    bench = Bench(court, RARELY, replay)
    lengths = random.Random(0).sample(range(256, 384), 128)
    for round_ in range(2):
        for number, length in enumerate(lengths):
            answer = of_length(length, 128 * round_ + number, num_cached=64 * round_)
            assert await bench.judge(answer) == [Verdict.VERIFIED]
    assert bench.results == {"disagrees": 1, "agrees": 127}, "each once, whatever was found in a cache"
    assert bench.verdict(lengths.index(256 + 77))["verdict"] == "suspect"


async def test_a_fault_behind_a_blocks_border_or_a_length_is_found_before_any_further_remainder(court: Court) -> None:
    """Engine and replays are wrong behind position 512, and behind 4,096 tokens: answers that tell most come first."""
    other = Replayer()

    async def replay(request: Request) -> Replayed:
        bench.now, length = bench.now + 1.0, len(request.prompt_token_ids)
        other.drift = -0.01 if 512 < length <= 512 + NUM_TOKENS or length > 4096 else 0.0
        return await other(request, ())

    bench = Bench(court, RARELY, replay)
    await bench.judge(of_length(100))
    for number, length in enumerate((300, 5000, 301, 511, 302), start=1):
        await bench.judge(of_length(length, number))  # while it rests
    for number in (6, 7):
        bench.now += 80
        await bench.judge(of_length(300 + number, number))
        if number == 6:
            await bench.judge(of_length(511, 8))
    assert [bench.verdict(number)["verdict"] for number in (2, 8)] == ["suspect"] * 2
    assert bench.num_checked == 3


async def test_shapes_that_are_due_never_fill_the_queue(court: Court) -> None:
    bench = Bench(court, RARELY)
    for num_rows in range(1, 200):
        bench.checks.offer(of_length(num_rows, num_rows))
    assert bench.checks._queue.qsize() == 1
    assert bench.results == {}, "a shape that waits for its turn is not an answer that was skipped"
    nothing = Bench(court, 0.0)
    nothing.checks.offer(of_length(1))
    assert nothing.checks._queue.empty()


async def test_a_shape_is_due_until_one_of_its_answers_was_checked(court: Court) -> None:
    other, versions = Replayer(), iter(["v1", DEFAULT_VERSION, "never"])

    async def replay(request: Request) -> Replayed:
        return dataclasses.replace(await other(request, ()), weight_version=next(versions))

    bench = Bench(court, RARELY, replay)
    await bench.judge(*(of_length(7, number) for number in range(2)))
    await bench.judge(of_length(7, 2))
    await bench.judge(of_length(7, 3))
    assert bench.results == {"outdated": 1, "agrees": 1}


async def test_shapes_take_a_fortieth_of_the_time(court: Court) -> None:
    other = Replayer()

    async def replay(request: Request) -> Replayed:
        bench.now += 2.0
        return await other(request, ())

    bench = Bench(court, RARELY, replay)
    for number in range(100):
        await bench.judge(of_length(1 + number, number))
        bench.now += 4.0
    assert 4 <= bench.num_checked <= 6, "two seconds each, in four hundred"


async def test_a_referee_without_the_weights_is_not_asked_for_every_shape(court: Court, folder: Path) -> None:
    bench = Bench(court, RARELY, by_transformers(weights(folder, source=None)))
    for num_rows in range(1, 30):
        await bench.judge(of_length(num_rows, num_rows))
    assert bench.results == {"unsupported": 1}
