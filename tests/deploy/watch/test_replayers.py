"""Whatever computes answers again, it gives the same figures."""

import math
from pathlib import Path

import pytest

from deploy.faults.tiny import write_tiny_pair
from deploy.watch.replayers import EngineName, ReplayerOptions, check_options, make_replayer
from serve_app.backends.base import ModelInfo, Replayed
from speculative.errors import ConfigError, EngineFault, InvalidRequest
from speculative.request import Request, SamplingParams

TOKENS = (5, 6, 7, 8, 20, 21, 22, 23)
REQUEST = Request("r", TOKENS, SamplingParams(temperature=0.7, top_p=0.9, logprobs=0), score_from=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))[0]


async def replayed(options: ReplayerOptions) -> tuple[ModelInfo, Replayed]:
    replayer = make_replayer(options)
    try:
        return await replayer.start(), await replayer.replay(REQUEST)
    finally:
        await replayer.stop()


def check_same(one: Replayed, other: Replayed) -> None:
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert one.replayed is not None
    assert other.replayed is not None
    for row, same in zip(one.replayed, other.replayed, strict=True):
        assert row.expected_surprisal == pytest.approx(same.expected_surprisal, abs=1e-3)
        assert math.isclose(row.outside, same.outside, abs_tol=1e-3)


async def test_our_engine_and_transformers_agree(folder: Path) -> None:
    ours, first = await replayed(ReplayerOptions(folder, threads=1))
    theirs, second = await replayed(ReplayerOptions(folder, engine="transformers", threads=1))
    check_same(first, second)
    assert (ours.vocab_size, ours.max_model_len) == (theirs.vocab_size, theirs.max_model_len)
    assert ours.eos_token_ids == theirs.eos_token_ids


async def test_an_engine_that_stopped_is_loaded_again(folder: Path) -> None:
    replayer = make_replayer(ReplayerOptions(folder, threads=1))
    try:
        await replayer.start()
        before = await replayer.replay(REQUEST)
        with pytest.raises(EngineFault):
            await replayer.replay(Request("broken", (5, 6, 7.5), score_from=1))  # type: ignore[arg-type]
        check_same(before, await replayer.replay(REQUEST))
    finally:
        await replayer.stop()


@pytest.mark.parametrize("token", [-1, 512, 10**30])
@pytest.mark.parametrize("engine", ["torch", "transformers"])
async def test_ids_that_are_no_tokens_are_refused(folder: Path, engine: EngineName, token: int) -> None:
    replayer = make_replayer(ReplayerOptions(folder, engine=engine, threads=1))
    try:
        await replayer.start()
        with pytest.raises(InvalidRequest, match="Token ids"):
            await replayer.replay(Request("r", (5, 6, token), score_from=1))
    finally:
        await replayer.stop()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_ended")
async def test_engines_on_ray_give_the_same(folder: Path) -> None:
    _, here = await replayed(ReplayerOptions(folder, threads=1))
    info, there = await replayed(ReplayerOptions(folder, threads=1, max_replicas=2))
    check_same(here, there)
    assert info.max_model_len == 512


async def test_longer_answers_than_asked_for_are_not_taken(folder: Path) -> None:
    info, _ = await replayed(ReplayerOptions(folder, threads=1, max_model_len=64))
    assert info.max_model_len == 64


@pytest.mark.parametrize(
    ("options", "named"),
    [({"engine": "transformers", "dtype": "bfloat16"}, "--dtype"), ({"address": "auto"}, "--max-replicas")],
)
def test_what_cannot_be_is_refused(folder: Path, options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_options(ReplayerOptions(folder, **options))  # type: ignore[arg-type]
