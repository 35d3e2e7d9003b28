"""vLLM's keys and values, copied out of its cache to files and back: our handoff through vLLM's connector interface.

vLLM's own `ExampleConnector` serves tests of vLLM: it names files by token ids alone, whatever the model, saves only
what the first chunk of a prompt computed, and stops the engine for prompts that fill their last block. Here each
request names its file, what is saved is saved when the whole prompt is computed, drafter included, and a file that does
not fit makes vLLM compute the prompt itself.

A request asks by its `kv_transfer_params`: `save` (a path) when its prompt is computed, `load` (a path) with
`num_tokens` computed tokens to be found there. Each rank of the model adds its number to the path. The scheduler's half
and the workers' half of the connector are two instances of the class.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from serve_app.backends.vllm_parts.computed import Blocks, ComputedPrompts, Copy

_logger = logging.getLogger("truespec.handoff")


@dataclass
class CopyMetadata(KVConnectorMetadata):
    """The blocks that the workers are to copy in a step."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


class CopyConnector(KVConnectorBase_V1):
    """Copies whole blocks between vLLM's cache and files."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        self._saves = ComputedPrompts(self._block_size)
        self._groups = [tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self._rank: int = vllm_config.parallel_config.rank
        self._loads: list[Copy] = []
        self._loaded: set[str] = set()
        self._waiting: set[str] = set()  # requests with a file that was not looked at
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()

    # -- the scheduler's half -----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request comes; it may have a file."""
        if "load" in (request.kv_transfer_params or {}):
            self._waiting.add(request.request_id)

    def recall(self) -> None:
        """Load nothing that was computed so far: those that wait compute their prompts themselves."""
        self._loaded |= self._waiting
        self._waiting.clear()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many further tokens the request's file has; the last of its prompt is always computed here."""
        params = request.kv_transfer_params or {}
        if "load" not in params or request.request_id in self._loaded:
            return 0, False
        return max(0, min(params["num_tokens"], request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were found for a request; some are to be filled from its file."""
        if num_external_tokens == 0:
            return
        params = request.kv_transfer_params
        num_local = min(params["num_tokens"], request.num_tokens - 1) - num_external_tokens
        self._waiting.discard(request.request_id)
        self._loaded.add(request.request_id)  # a file is there once: what is preempted is computed again
        held = self._saves.of_prompt(blocks.get_block_ids(), request.num_prompt_tokens)
        self._loads.append(Copy(params["load"], held, num_local // self._block_size))

    def build_connector_meta(self, scheduler_output: Any) -> CopyMetadata:
        """Return what is to be copied in this step."""
        loads, self._loads = self._loads, []
        return CopyMetadata(loads, self._saves.take(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: nothing of it is remembered, and its blocks may go."""
        self._loaded.discard(request.request_id)
        self._waiting.discard(request.request_id)
        self._saves.forget(request.request_id)
        return False, None

    # -- the workers' half --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the cache's tensors, blocks first, by layer."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill blocks from files, before the step computes anything."""
        for copy in self._get_connector_metadata().loads:
            try:
                self._load(copy)
            except (OSError, ValueError, RuntimeError) as error:
                _logger.warning("%s cannot be loaded; its prompt is computed here: %s", copy.path, error)
                self._failed.update(block for ids in copy.blocks for block in ids[copy.first :])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved after the step."""

    def wait_for_save(self) -> None:
        """Write what was computed, the drafter's part included: vLLM calls this after it has drafted."""
        for copy in self._get_connector_metadata().saves:
            self._save(copy)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be filled, since the last time."""
        failed, self._failed = self._failed, set()
        return failed

    def _layers(self, blocks: Blocks) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Each layer's cache, and the blocks of a request in it; in the same order everywhere."""
        for names, ids in zip(self._groups, blocks, strict=True):
            for name in sorted(names):
                yield self._caches[name], ids

    def _save(self, copy: Copy) -> None:
        path = Path(f"{copy.path}.{self._rank}")
        with path.open("wb") as file:
            for cache, ids in self._layers(copy.blocks):
                rows = cache[torch.tensor(ids, device=cache.device)].contiguous().cpu()
                file.write(rows.view(torch.uint8).numpy().tobytes())

    def _load(self, copy: Copy) -> None:
        content = memoryview(bytearray(Path(f"{copy.path}.{self._rank}").read_bytes()))
        begin = 0
        for cache, ids in self._layers(copy.blocks):
            num_bytes = len(ids) * cache[0].numel() * cache.element_size()
            if begin + num_bytes > len(content):
                raise ValueError("it is shorter than the blocks to fill.")
            rows = torch.frombuffer(content[begin : begin + num_bytes], dtype=cache.dtype)
            rows = rows.view(len(ids), *cache.shape[1:])
            begin += num_bytes
            wanted = torch.tensor(ids[copy.first :], dtype=torch.long, device=cache.device)
            cache[wanted] = rows[copy.first :].to(cache.device)
        if begin != len(content):
            raise ValueError("it is longer than the blocks to fill.")
