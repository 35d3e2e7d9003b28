"""A trainer's rollout group: n choices of one prompt are one prefill and n inserts; each says which weights made it."""

import dataclasses
from pathlib import Path

import pytest

from serve_app.backends.base import Prefilled
from serve_app.backends.torch_backend import TorchBackend
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from speculative.request import Request, SamplingParams, TokenDelta
from tests.support.engines import settings
from tests.support.tiny_models import write_tiny_model

PROMPT = tuple(range(3, 40))
PARAMS = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True, logprobs=0)


class Pools:
    """Two engines of one model, and how often the first was asked."""

    def __init__(self, folder: Path) -> None:
        sizes = settings(kv_cache_tokens=8192, max_num_seqs=16, max_batched_tokens=128)
        self.prefill, self.decode = (TorchBackend(str(folder), "tiny", sizes) for _ in range(2))
        self.num_asked = 0
        self.sink = BufferSink("test")
        metrics = Metrics([self.sink], model_name="tiny", pool="decode")
        self.source = PooledTokenSource(self.decode, metrics, self._ask)

    async def _ask(self, request: Request, first_token: bool) -> Prefilled:
        self.num_asked += 1
        return dataclasses.replace(await self.prefill.prefill(request, first_token=first_token), replica="p")

    async def stream(self, requests: list[Request]) -> list[TokenDelta]:
        return [delta async for delta in self.source.stream(requests)]

    def handoffs(self) -> dict[str, float]:
        counters = self.sink.drain().counters
        return {labels[-1]: value for (name, labels), value in counters.items() if name == "truespec_handoffs_total"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("rollouts")
    return write_tiny_model(base / "old", vocab_size=64), write_tiny_model(base / "new", vocab_size=64, seed=9)


@pytest.mark.parametrize("num_choices", [8, 64])
async def test_a_group_is_computed_once_and_inserted_many_times(folders: tuple[Path, Path], num_choices: int) -> None:
    pools = Pools(folders[0])
    await pools.prefill.start()
    await pools.decode.start()
    try:
        group = [Request(f"g-{n}", PROMPT, PARAMS, seed=n) for n in range(num_choices)]
        deltas = await pools.stream(group)
    finally:
        await pools.prefill.stop()
        await pools.decode.stop()
    reported = {
        one.request_id: [t for d in deltas if d.request_id == one.request_id for t in d.token_ids] for one in group
    }
    assert (
        all(len(tokens) == 4 for tokens in reported.values())
        and len(set(map(tuple, reported.values()))) > num_choices // 2
    )
    assert pools.num_asked == 1
    assert pools.prefill.take_stats().num_prompt_tokens == len(PROMPT) - 1
    assert pools.decode.take_stats().num_prompt_tokens == 0, "a choice had the prompt computed again"
    assert pools.handoffs() == {"ok": num_choices}


async def test_a_handoff_from_before_an_update_is_refused_and_computed_with_the_new_weights(
    folders: tuple[Path, Path],
) -> None:
    pools = Pools(folders[0])
    await pools.prefill.start()
    await pools.decode.start()
    try:
        await pools.decode.load_weights(str(folders[1]))
        await pools.decode.switch_weights("v1")
        mixed = await pools.stream([Request("one", PROMPT, PARAMS, seed=1)])
        assert [delta.weight_version for delta in mixed] == ["default"] + ["v1"] * (len(mixed) - 1)
        assert pools.handoffs() == {"refused": 1}
        await pools.prefill.load_weights(str(folders[1]))
        await pools.prefill.switch_weights("v1")
        pure = await pools.stream([Request("two", PROMPT, PARAMS, seed=1)])
        assert {delta.weight_version for delta in pure} == {"v1"}
        assert pools.handoffs() == {"ok": 1}
    finally:
        await pools.prefill.stop()
        await pools.decode.stop()
