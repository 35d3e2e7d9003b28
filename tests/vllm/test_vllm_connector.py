"""The connector without an engine: what it copies out of one cache and into another, block by block."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = NEEDS_VLLM
BLOCK = 4
LAYERS = ("layers.0", "layers.1", "drafter.layers.0")


def connector() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from serve_app.backends.vllm_parts.connector import CopyConnector

    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        parallel_config=SimpleNamespace(rank=0),
        kv_transfer_config=SimpleNamespace(),
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=LAYERS)])
    return CopyConnector(config, KVConnectorRole.WORKER, groups)


def caches(seed: int, num_blocks: int = 10) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(num_blocks, 2, BLOCK, 3, generator=generator).to(torch.bfloat16) for name in reversed(LAYERS)
    }


@pytest.fixture
def pair() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """A sender and a receiver, and the caches of each."""
    sender, receiver, ours, theirs = connector(), connector(), caches(1), caches(2)
    sender.register_kv_caches(ours)
    receiver.register_kv_caches(theirs)
    return sender, receiver, ours, theirs


def new(request_id: str, prompt: list[int], blocks: list[int], **transfer: Any) -> SimpleNamespace:
    """A request as the scheduler hands it to the workers."""
    params = SimpleNamespace(extra_args={"kv_transfer_params": transfer})
    return SimpleNamespace(
        req_id=request_id, prompt_token_ids=prompt, block_ids=(blocks,), num_computed_tokens=0, sampling_params=params
    )


def step(
    news: tuple[SimpleNamespace, ...] = (),
    cached: tuple[tuple[str, list[int] | None, int], ...] = (),
    scheduled: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
) -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=list(news),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in cached],
            num_computed_tokens=[num for _, _, num in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
    )


def run(one: Any, output: SimpleNamespace) -> None:
    """A step: metadata, loads before it, saves after it."""
    one.bind_connector_metadata(one.build_connector_meta(output))
    one.start_load_kv(None)
    one.wait_for_save()
    one.clear_connector_metadata()


def asking(prompt: list[int], **transfer: Any) -> SimpleNamespace:
    return SimpleNamespace(
        request_id="d", kv_transfer_params=transfer, num_tokens=len(prompt), num_prompt_tokens=len(prompt)
    )


def load(one: Any, request: SimpleNamespace, blocks: list[int], num_local: int = 0) -> tuple[int, bool]:
    """Admit a request as the scheduler does, and let the workers load it."""
    num_external, later = one.get_num_new_matched_tokens(request, num_local)
    held = SimpleNamespace(get_block_ids=lambda: (blocks,))
    one.update_state_after_alloc(request, held, num_external)
    run(one, step())
    return num_external, later


def test_a_prompt_computed_in_chunks_arrives_whole_in_other_blocks(pair: Any, tmp_path: Path) -> None:
    prompt, path = list(range(10)), str(tmp_path / "kv")
    sender, receiver, ours, theirs = pair
    run(sender, step((new("p", prompt, [7, 2], save=path),), scheduled={"p": 6}))
    assert not list(tmp_path.iterdir()), "it is not computed yet"
    run(sender, step(cached=(("p", [5, 9], 6),), scheduled={"p": 4}))
    before = {name: cache.clone() for name, cache in theirs.items()}
    assert load(receiver, asking(prompt, load=path, num_tokens=9), [1, 3, 0, 8]) == (9, False)
    for name in LAYERS:
        assert torch.equal(theirs[name][[1, 3, 0]], ours[name][[7, 2, 5]])
        untouched = [2, 4, 5, 6, 7, 8, 9]
        assert torch.equal(theirs[name][untouched], before[name][untouched])
    assert receiver.get_block_ids_with_load_errors() == set()


def test_blocks_that_are_cached_already_are_left_alone(pair: Any, tmp_path: Path) -> None:
    prompt, path = list(range(10)), str(tmp_path / "kv")
    sender, receiver, ours, theirs = pair
    run(sender, step((new("p", prompt, [7, 2, 5], save=path),), scheduled={"p": 10}))
    before = {name: cache.clone() for name, cache in theirs.items()}
    assert load(receiver, asking(prompt, load=path, num_tokens=9), [1, 3, 0], num_local=8) == (1, False)
    for name in LAYERS:
        assert torch.equal(theirs[name][[1, 3]], before[name][[1, 3]])
        assert torch.equal(theirs[name][0], ours[name][5])


def test_a_preempted_prompt_is_saved_from_its_new_blocks_and_loaded_only_once(pair: Any, tmp_path: Path) -> None:
    prompt, path = list(range(8)), str(tmp_path / "kv")
    sender, receiver, ours, theirs = pair
    run(sender, step((new("p", prompt, [7], save=path),), scheduled={"p": 4}))
    run(sender, step(cached=(("p", [6, 4], 0),), scheduled={"p": 8}, resumed=("p",)))
    request = asking(prompt, load=path, num_tokens=7)
    load(receiver, request, [1, 3])
    assert torch.equal(theirs["layers.0"][[1, 3]], ours["layers.0"][[6, 4]])
    assert receiver.get_num_new_matched_tokens(request, 0) == (0, False)
    receiver.request_finished(request, [1, 3])
    assert receiver.get_num_new_matched_tokens(request, 0) == (7, False)


def test_what_waits_is_recalled_and_what_comes_later_is_loaded() -> None:
    one = connector()
    early, late = (asking(list(range(8)), load="path", num_tokens=7) for _ in range(2))
    late.request_id = "late"
    one.on_new_request(early)
    one.recall()
    one.on_new_request(late)
    assert one.get_num_new_matched_tokens(early, 0) == (0, False)
    assert one.get_num_new_matched_tokens(late, 0) == (7, False)


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_a_file_that_does_not_fit_is_reported_and_not_used(pair: Any, tmp_path: Path, damage: str) -> None:
    prompt, path = list(range(10)), str(tmp_path / "kv")
    sender, receiver, _, _ = pair
    run(sender, step((new("p", prompt, [7, 2, 5], save=path),), scheduled={"p": 10}))
    file = tmp_path / "kv.0"
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-1] if damage == "short" else content + b"x")
    load(receiver, asking(prompt, load=path, num_tokens=9), [1, 3, 0])
    assert receiver.get_block_ids_with_load_errors() == {1, 3, 0}
    assert receiver.get_block_ids_with_load_errors() == set()


def test_requests_that_ask_for_nothing_are_left_alone(tmp_path: Path) -> None:
    one = connector()
    one.register_kv_caches(caches(1))
    assert load(one, asking([1, 2, 3]), [1]) == (0, False)
    run(one, step((new("p", [1, 2], [4]),), scheduled={"p": 2}))
    assert not list(tmp_path.iterdir())
