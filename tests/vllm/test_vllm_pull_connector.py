"""Our `NixlConnector` without an engine and without NIXL: what its scheduler's half sends the workers of handoffs, and
which blocks are taken for what was computed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_installed import NEEDS_VLLM
from tests.vllm.test_vllm_connector import new, step

pytestmark = NEEDS_VLLM
BLOCK = 4
LAYERS = ("layers.10", "layers.9", "drafter.layers.0")
SOURCE = {
    "remote_engine_id": "there", "remote_request_id": "p-0123abcd", "remote_block_ids": [[7, 2, 5]],
    "remote_host": "192.0.2.1", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip


def connector(**kv_cache: Any) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from serve_app.backends.vllm_parts.pull_connector import NixlConnector

    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, mamba_cache_mode="none"),
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", engine_id="here"),
        num_prefill_lookahead_tokens=0,
        parallel_config=SimpleNamespace(
            data_parallel_index=0, decode_context_parallel_size=1, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, rank=0, tensor_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )  # fmt: skip
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=SimpleNamespace(prefix_replay_tokens=0))
    groups = {
        "kv_cache_groups": [group], "transfer_groups": [group], "has_mamba_layers": False, "num_blocks": 10,
        "select_transfer_block_ids": lambda block_ids: block_ids,
    }  # fmt: skip
    return NixlConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(**groups | kv_cache))


def request(name: str, **transfer: Any) -> Any:
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        request_id=name, kv_transfer_params=transfer or None, num_computed_tokens=10, prompt_token_ids=list(range(10)),
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )  # fmt: skip


def report(one: Any, **order: Any) -> Any:
    """What the workers are reported in the step after an order."""
    one.on_new_request(request("order", **order))
    return one.build_connector_meta(step())


def computed(one: Any, name: str) -> None:
    """A prompt is computed, and waits to be read."""
    keeps, reported = one.request_finished_all_groups(request(name, do_remote_decode=True), ([7, 2, 5],))
    assert keeps and reported["remote_block_ids"] == ([7, 2, 5],)
    assert one.build_connector_meta(step()).reqs_to_send.keys() == {name}


def test_what_nobody_takes_is_let_go_and_nothing_else() -> None:
    one = connector()
    for name in ("p-0123abcd", "q-0123abcd"):
        computed(one, name)
    assert report(one, release="other").reqs_to_send == {}
    assert report(one, release="p").reqs_to_send == {"p-0123abcd": 0.0}
    one.update_connector_output(SimpleNamespace(finished_sending={"p-0123abcd"}, finished_recving=None))
    assert report(one, release="p").reqs_to_send == {}
    assert report(one, recall=True).reqs_to_send == {"q-0123abcd": 0.0}


def test_a_handoff_that_is_declined_is_not_read_and_the_other_side_hears_of_it() -> None:
    reported = report(connector(), decline=True, **SOURCE)
    (name,) = reported.reqs_to_recv
    asked = reported.reqs_to_recv[name]
    assert asked.remote.request_id == "p-0123abcd" and asked.remote.engine_id == "there"
    assert not asked.awaiting_kvs and not asked.local_block_ids and reported.reading == {}


def test_what_waits_to_read_is_recalled_and_what_comes_later_is_read() -> None:
    one = connector()
    early, late = (request(name, do_remote_prefill=True, load=name, **SOURCE) for name in ("early", "late"))
    one.on_new_request(early)
    assert one.get_num_new_matched_tokens(early, 0) == (10, True)
    reported = report(one, recall=True)
    assert not reported.reqs_to_recv["early"].awaiting_kvs
    assert one.get_num_new_matched_tokens(early, 0) == (0, False)
    one.on_new_request(late)
    blocks = SimpleNamespace(blocks=([],), get_unhashed_block_ids_all_groups=lambda: ([1, 3, 0],))
    one.update_state_after_alloc(late, blocks, 10)
    reported = one.build_connector_meta(step())
    assert reported.reqs_to_recv["late"].awaiting_kvs and reported.reading == {"late": "late"}
    assert report(one, recall=True).reqs_to_recv == {}, "it is being read already"


@pytest.mark.parametrize("damage", [None, "word", "layer", "gone", "cut"])
def test_only_what_was_computed_is_taken(tmp_path: Path, damage: str | None) -> None:
    import torch

    sender, receiver = connector(), connector()
    generator = torch.Generator().manual_seed(1)
    ours = {name: torch.randn(10, 2, BLOCK, 3, generator=generator) for name in LAYERS}
    theirs = {name: torch.zeros_like(cache) for name, cache in ours.items()}
    for name, cache in theirs.items():
        cache[[1, 3, 0]] = ours[name][[7, 2, 5]]
    sender._caches, receiver._caches = ours, theirs
    path = tmp_path / "sums"
    reported = sender.build_connector_meta(
        step((new("p", list(range(10)), [7, 2, 5, 8], save=str(path)),), scheduled={"p": 10})
    )
    (copy,) = reported.saves
    assert copy.blocks == ([7, 2, 5],), "without those for drafts"
    (sums,) = sender._sums(copy.blocks)
    Path(f"{path}.0").write_bytes(sums.tobytes())
    if damage == "word":
        theirs["drafter.layers.0"][3, 1, 2, 1] += 1e-3
    elif damage == "layer":
        theirs["layers.9"][0], theirs["layers.10"][0] = theirs["layers.10"][0].clone(), theirs["layers.9"][0].clone()
    elif damage == "gone":
        Path(f"{path}.0").unlink()
    elif damage == "cut":
        Path(f"{path}.0").write_bytes(sums.tobytes()[:-3])
    assert receiver._is_whole(([1, 3, 0],), str(path)) == (damage is None)
    assert receiver._is_whole(([3, 0],), str(path)) == (damage is None), "the first block is cached"
    assert not receiver._is_whole(([3, 1, 0],), str(path))


def test_models_whose_layers_keep_blocks_of_several_kinds_are_refused() -> None:
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=None)
    with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager to true"):
        connector(kv_cache_groups=[group, group])
