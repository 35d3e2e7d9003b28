"""Prompts that a vLLM step completes, and their blocks: both of our connectors save these."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Blocks = tuple[list[int], ...]
"""A request's block numbers, one list per group of layers."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks and the file that belongs to them; `first` is the number of leading blocks that are skipped."""

    path: str
    blocks: Blocks
    first: int = 0


@dataclass(slots=True)
class _Prompt:
    path: str
    num_tokens: int
    blocks: Blocks


@dataclass(slots=True)
class ComputedPrompts:
    """Follows prompts that ask for it (`save` in their `kv_transfer_params`) until all their tokens are computed."""

    block_size: int  # of vLLM's cache, tokens
    _prompts: dict[str, _Prompt] = field(default_factory=dict)

    def take(self, scheduler_output: Any) -> list[Copy]:
        """The prompts that this step completes, each returned once."""
        done = dict(self._computed(scheduler_output))
        ready = [request_id for request_id, num in done.items() if num >= self._prompts[request_id].num_tokens]
        prompts = [self._prompts.pop(request_id) for request_id in ready]
        return [Copy(prompt.path, self.of_prompt(prompt.blocks, prompt.num_tokens)) for prompt in prompts]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._prompts.pop(request_id, None)

    def of_prompt(self, blocks: Blocks, num_tokens: int) -> Blocks:
        """The blocks of a prompt, without those reserved for drafts."""
        return tuple(list(ids[: math.ceil(num_tokens / self.block_size)]) for ids in blocks)

    def _computed(self, scheduler_output: Any) -> Iterator[tuple[str, int]]:
        """For prompts to be saved, how many tokens will be computed after the step; also updates their blocks."""
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            path = ((new.sampling_params.extra_args or {}).get("kv_transfer_params") or {}).get("save")
            if path is not None:
                blocks = tuple(list(ids) for ids in new.block_ids)
                self._prompts[new.req_id] = _Prompt(path, len(new.prompt_token_ids), blocks)
                yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            added = cached.new_block_ids[index]
            if added is not None and request_id in cached.resumed_req_ids:
                prompt.blocks = tuple(list(ids) for ids in added)
            elif added is not None:
                prompt.blocks = tuple(old + list(ids) for old, ids in zip(prompt.blocks, added, strict=True))
            yield request_id, cached.num_computed_tokens[index] + scheduled[request_id]
