"""vLLM's `NixlConnector`, which copies keys and values from GPU to GPU, with the check that it lacks.

The prefill side keeps the blocks of a computed prompt, and the decode side reads them out of its memory. vLLM reuses
the blocks when their lease expires, and a decode side that reads them later gets whatever is there. So the prefill side
computes a checksum of each block, the checksums travel with the handoff, and the decode side compares: a handoff that
differs from what was computed fails. That also makes it safe to reclaim blocks early, which is needed when what was
computed cannot be trusted.

A request asks by its `kv_transfer_params`, besides vLLM's own: `save` (a path) where the checksums are to be written,
`load` (a path) where those of its handoff are. Each rank of the model adds its number to the path. Our own
requests carry orders: `release` (the request whose handoff nobody takes), `recall` (of all), `decline` (a handoff of
another engine that is not taken, in vLLM's own terms).
"""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from serve_app.backends.vllm_parts.block_sums import block_sums
from serve_app.backends.vllm_parts.computed import Blocks, ComputedPrompts

_logger = logging.getLogger("truespec.handoff")
_NOW = 0.0  # a lease that has run out


class NixlConnector(NixlPullConnector):
    """vLLM's, but handoffs are compared with what was computed, and can be recalled.

    vLLM checks its settings by this class name.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError(
                "This model's layers keep blocks of several kinds, which handoffs do not hold: set "
                "vllm.engine_args.disable_hybrid_kv_cache_manager to true, or topology to monolith."
            )
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)  # on a CPU it leaves one to its worker, which is to compute on all
        self._rank: int = vllm_config.parallel_config.rank
        self._groups = [tuple(sorted(group.layer_names)) for group in kv_cache_config.kv_cache_groups]
        self._num_blocks: int = kv_cache_config.num_blocks
        self._saves = ComputedPrompts(vllm_config.cache_config.block_size)
        self._held: set[str] = set()  # finished here, not yet read by others
        self._wanted: dict[str, Any] = {}  # requests that are to read
        self._caches: dict[str, Any] = {}
        self._paths: dict[str, str] = {}  # of the checksums, by reading request

    # -- the scheduler's half -----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A new request: a handoff to be read, an order, or neither."""
        asked = request.kv_transfer_params or {}
        if "release" in asked:
            self._expire({held for held in self._held if get_base_request_id(held) == asked["release"]})
        elif "recall" in asked:
            self.recall()
        elif "decline" in asked:
            self._decline(request)
        elif asked.get("do_remote_prefill"):
            self._wanted[request.request_id] = request
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated for a request; they are to be read now."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._wanted.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM's own metadata, plus which prompts to checksum, and where the checksums of others are."""
        reading = {
            request_id: request.kv_transfer_params["load"]
            for request_id, (request, *_, waits) in self.connector_scheduler._reqs_need_recv.items()
            if waits
        }
        metadata = super().build_connector_meta(scheduler_output)
        metadata.saves, metadata.reading = self._saves.take(scheduler_output), reading
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; the blocks of a prompt that is to be read are kept."""
        self._saves.forget(request.request_id)
        self._wanted.pop(request.request_id, None)
        keeps, reported = super().request_finished_all_groups(request, block_ids)
        if keeps:
            self._held.add(request.request_id)
        return keeps, reported

    def update_connector_output(self, connector_output: Any) -> None:
        """Blocks that were read, or have waited too long, are freed."""
        super().update_connector_output(connector_output)
        self._held.difference_update(connector_output.finished_sending or ())

    def recall(self) -> None:
        """Keep everything computed so far from being read, here or elsewhere."""
        self._expire(self._held)
        for request in self._wanted.values():
            self._decline(request)
            request.kv_transfer_params["do_remote_prefill"] = False
        self._wanted.clear()

    def _expire(self, request_ids: Iterable[str]) -> None:
        self.connector_scheduler._reqs_need_send.update(dict.fromkeys(request_ids, _NOW))

    def _decline(self, request: Any) -> None:
        """Have the workers release the other side's blocks, as vLLM does for requests that end early."""
        self.connector_scheduler._reqs_need_recv[request.request_id] = (request, [], (), False)

    # -- the workers' half --------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """Layout of a block's bytes: kernels, and their order of the cache's dimensions."""
        worker = self.connector_worker
        return " ".join([*sorted({one.get_name() for one in worker.attn_backends}), worker.kv_cache_layout])

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the cache's tensors, blocks first, by layer."""
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to read."""
        self._paths |= self._connector_metadata.reading
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Checksum what was computed, including the drafter's part: vLLM calls this after it has drafted."""
        super().wait_for_save()
        for copy in self._connector_metadata.saves:
            sums = np.concatenate(list(self._sums(copy.blocks)))
            Path(f"{copy.path}.{self._rank}").write_bytes(sums.tobytes())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what was read and what was sent; reads that differ from what was computed have failed."""
        reading = {name: meta.local_block_ids for name, meta in self.connector_worker._recving_metadata.items()}
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            path = self._paths.pop(request_id, None)
            if request_id not in results.failed_recving and not self._is_whole(reading[request_id], path):
                results.failed_recving.add(request_id)
        return results

    def _is_whole(self, blocks: Blocks, path: str | None) -> bool:
        """Return whether the blocks read match the last ones of those with checksums."""
        try:
            reported = np.frombuffer(Path(f"{path}.{self._rank}").read_bytes(), np.int64).reshape(len(blocks), -1)
        except (OSError, ValueError):  # the request has ended, and its file is gone
            return False
        ours = zip(reported, self._sums(blocks), strict=True)
        same = all(np.array_equal(group[len(group) - len(sums) :], sums) for group, sums in ours)
        if not same:
            _logger.warning("the blocks read for a handoff differ from those computed: %s", path)
        return same

    def _sums(self, blocks: Blocks) -> Iterator[np.ndarray[Any, Any]]:
        for names, ids in zip(self._groups, blocks, strict=True):
            yield block_sums(((self._caches[name], ids) for name in names), self._num_blocks).numpy()
