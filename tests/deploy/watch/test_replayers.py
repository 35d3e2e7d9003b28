"""Whatever computes answers again passes one kit, and each has something of its own."""

from pathlib import Path

import pytest

from deploy.run.replayers import EngineName, ReplayerOptions, make_replayer
from speculative.errors import EngineFault
from speculative.request import Request
from tests.support.replayer_conformance import CHECKS, MAX_MODEL_LEN, SAMPLED, TOKENS, Check, on_trial

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("engine", ["torch", "transformers"])
async def test_a_replayer_in_this_process(folder: Path, engine: EngineName, check: Check) -> None:
    options = ReplayerOptions(folder, engine, threads=1, max_model_len=MAX_MODEL_LEN)
    async with on_trial(make_replayer(options), folder) as trial:
        await check(trial)


async def test_an_engine_that_stopped_is_loaded_again(folder: Path) -> None:
    request = Request("r", TOKENS, SAMPLED, score_from=4)
    async with on_trial(make_replayer(ReplayerOptions(folder, threads=1)), folder) as trial:
        before = await trial.replayer.replay(request)
        with pytest.raises(EngineFault):
            await trial.replayer.replay(Request("broken", (5, 6, 7.5), score_from=1))  # type: ignore[arg-type]
        assert (await trial.replayer.replay(request)).logprobs == pytest.approx(before.logprobs, abs=1e-4)


async def test_our_engine_and_transformers_say_the_same_of_a_model(folder: Path) -> None:
    said = []
    for engine in ("torch", "transformers"):
        options = ReplayerOptions(folder, engine, threads=1)  # type: ignore[arg-type]
        async with on_trial(make_replayer(options), folder) as trial:
            said.append((trial.info.vocab_size, trial.info.max_model_len, trial.info.eos_token_ids))
    assert said == [(512, 512, (2,))] * 2
