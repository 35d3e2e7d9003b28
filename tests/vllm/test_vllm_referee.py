"""vLLM as the referee of watched answers: its logprobs are those of our engine, and it tests no distribution."""

import json
from pathlib import Path

import pytest

from deploy.run.replayers import ReplayerOptions, make_replayer
from speculative.request import Request, SamplingParams
from tests.support.replayer_conformance import CHECKS, MAX_MODEL_LEN, on_trial
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = NEEDS_VLLM
NOT_OF_LLAMA = {"sliding_window": 4, "logit_scale": 3.0}  # vLLM would follow them; transformers' Llama knows neither
TARGET = {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512}

REQUEST = Request("r", tuple(range(5, 25)), SamplingParams(temperature=0.7, logprobs=0), score_from=8)


async def test_it_passes_the_kit_of_all_replayers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", tokenizer=True, **TARGET)
    options = ReplayerOptions(folder, engine="vllm", threads=1, max_model_len=MAX_MODEL_LEN)
    async with on_trial(make_replayer(options), folder, gives_rows=False) as trial:
        for check in CHECKS:
            await check(trial)


async def test_its_logprobs_are_ours(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", tokenizer=True, **TARGET)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | NOT_OF_LLAMA))
    found = []
    for engine in ("torch", "vllm"):
        replayer = make_replayer(ReplayerOptions(folder, engine=engine, threads=1, max_model_len=128))  # type: ignore[arg-type]
        info = await replayer.start()
        found.append(await replayer.replay(REQUEST))
        await replayer.stop()
        assert info.max_model_len == 128
    ours, theirs = found
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-3)
    assert ours.replayed is not None
    assert theirs.replayed is None
