"""Device memory: what steps may take, and how many tokens the KV cache may hold beside them."""

import contextlib
import gc
import logging
import time

import torch

from speculative.config import EngineConfig
from speculative.drafting.neural_drafter import DraftModel
from speculative.errors import ConfigError
from speculative.gpu.buckets import Buckets
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import MOST_SEQUENCES, prompt_sizes
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.step.prompt_scorer import ROWS_AT_ONCE

_logger = logging.getLogger("truespec.engine")

PIECE_BYTES, NUM_PIECES = 2**24, 16  # of what handoffs pass through
_KEPT_FREE = 0.05  # of the device's memory, or of a share of it, for what is not counted here
_OF_A_PROCESS = 3 * 2**28  # estimated: what CUDA, its libraries and compiled kernels take, of which torch knows nothing
_claims: dict[torch.device, tuple[int, int]] = {}  # of engines: their share, and what of it handoffs may not take
_STEADY_S, _MOST_S, _LOOK_EVERY_S = 3.0, 60.0, 0.5  # of waiting for memory that others give back


def graph_bytes(
    decoder: Decoder, buckets: Buckets, sizes: AttentionSizes, draft_model: DraftModel | None, prompts: tuple[int, ...]
) -> int:
    """An upper estimate of the device memory that captured steps hold.

    The graphs share one pool, so the largest counts: a pass through the layers with attention's workspace, the logits
    of a verification, or those of drafts. Each graph has block tables of its own. A drafting model's q [K x B, W] and
    what a pass gives outlive their graphs. prompts: the rows of each captured pass of prompts, ascending.
    """
    model, (num_seqs, num_queries), itemsize = decoder.config, buckets.largest, decoder.dtype.itemsize
    num_rows, vocab_size = num_seqs * num_queries, model.vocab_size
    layers = _activation_bytes(model, max(num_rows, *prompts), itemsize)
    layers += sizes.workspace_bytes(num_rows, model.num_heads, model.head_dim)
    # The LM head's output, and partial sums of blocks. In float32 what edits made of it; for more logprobs it once
    # more, their matrix, and a comparison of that.
    logits = num_rows * ((itemsize + 3 * 4 + 1) * vocab_size + vocab_size // 4 + 1024)
    drafts = statics = 0
    num_features = 0 if draft_model is None else draft_model.num_features
    num_tables = sum(bucket.num_seqs for bucket in buckets.packed) + len(prompts) * MOST_SEQUENCES
    num_tables += num_seqs  # of those that decode beside prompts
    if draft_model is not None:
        width = vocab_size if draft_model.ids is None else len(draft_model.ids)
        drafts = num_seqs * width * (itemsize + 1)  # the LM head's output, and a few numbers of each block of it
        statics = num_seqs * width * 4 * buckets.most_made
        num_tables += sum(bucket.num_seqs for own in (buckets, buckets.of_drafts(varying=True)) for bucket in own)
    statics += (prompts[-1] + num_rows) * (model.hidden_size + num_features) * itemsize
    return max(layers, logits, drafts) + statics + num_tables * sizes.max_blocks * 8


def step_bytes(config: EngineConfig, decoder: Decoder, draft_model: DraftModel | None) -> int:
    """An upper estimate of the device memory that steps, and handoffs beside them, take beside weights and KV cache.

    What graphs hold stays theirs. What runs eagerly has one memory beside it, by turns: a pass through the layers, such
    as a graph is warmed up with, and then what torch's operators verify a part of its rows in, nine matrices [R, V] of
    float32, three of them for filters; three more are of a model's drafts.
    """
    model, num_rows = decoder.config, config.max_batched_tokens
    num_features = 0 if draft_model is None else draft_model.num_features
    verified = ROWS_AT_ONCE * model.vocab_size * 4 * (9 if draft_model is None else 12)
    eager = max(_activation_bytes(model, num_rows, decoder.dtype.itemsize), verified)
    eager += num_rows * (model.hidden_size + num_features) * decoder.dtype.itemsize  # what a pass gives
    eager += NUM_PIECES * PIECE_BYTES
    if config.cuda_graphs is False:
        return eager
    longest = config.max_model_len or model.max_position_embeddings
    buckets = Buckets.of(config.max_num_seqs, config.drafter.max_drafts, config.drafter.num_draft_tokens)
    sizes = AttentionSizes(config.block_size, buckets.largest.num_queries, -(-longest // config.block_size))
    return eager + graph_bytes(decoder, buckets, sizes, draft_model, prompt_sizes(num_rows))


def free_bytes(device: torch.device, share: float) -> tuple[int, int]:
    """Return what is free of an engine's share of a CUDA device's memory, and all of the share.

    A part of a device is a part of all its memory: what is free of that, an engine that starts at the same time may be
    about to take. What the allocator keeps does not count as taken: graphs have a pool of their own. Where others hold
    memory that this engine might have, it is read until it no longer grows: a process that ends gives its memory back
    some time later.
    """
    gc.collect()  # graphs of engines that this process had, if anything still holds them
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    whole = int(share * total)
    alone = whole - _OF_A_PROCESS - torch.cuda.memory_reserved(device)
    began = grew = time.monotonic()
    if free < alone:
        _logger.info(
            "%.1f GiB of the GPU's memory are free, and other processes have some; waiting until none has given any "
            "back for %.0f s, at most %.0f s",
            *(free / 2**30, _STEADY_S, _MOST_S),
        )
    while free < alone and time.monotonic() < min(grew + _STEADY_S, began + _MOST_S):
        time.sleep(_LOOK_EVERY_S)
        before, (free, _) = free, torch.cuda.mem_get_info(device)
        if free > before:
            grew = time.monotonic()
    return (free if share == 1 else min(free, alone)), whole


def cache_tokens(config: EngineConfig, decoder: Decoder, draft_model: DraftModel | None) -> int:
    """Tokens of the KV cache: as many as are set, or as fill the memory which is free once the weights are loaded, in
    whole blocks.

    Args:
        config: of the engine.
        decoder: the target, on the GPU.
        draft_model: of the drafter, on the GPU; None where it has none.

    Raises:
        ConfigError: not even one block fits, or not as many as are set.
    """
    model = decoder.config
    shapes = [model.kv_shape] + ([] if draft_model is None else [draft_model.kv_shape])
    num_features = 0 if draft_model is None else draft_model.num_features  # kept for the last position of a block
    num_values = sum(shape.num_values for shape in shapes) * config.block_size + num_features
    block_bytes: int = num_values * getattr(torch, config.dtype).itemsize
    steps = step_bytes(config, decoder, draft_model)
    free, total = free_bytes(decoder.device, config.gpu_share)
    _claims[decoder.device] = total, steps + int(_KEPT_FREE / 2 * total)
    wanted = 1 if config.kv_cache_tokens is None else config.num_blocks
    kept = int(_KEPT_FREE * total) if config.kv_cache_tokens is None else 0
    num_blocks = (free - kept - steps) // block_bytes - 1  # less the block of padding rows
    if num_blocks < wanted:
        whose = "the GPU" if config.gpu_share == 1 else f"the engine's {config.gpu_share:g} of the GPU"
        raise ConfigError(
            f"{whose} has {free / 2**30:.1f} GiB free beside the weights, and steps of {config.max_num_seqs} sequences "
            f"may take {steps / 2**30:.1f} GiB: {'nothing' if num_blocks < 1 else 'too little'} is left for the KV "
            "cache; lower max_num_seqs, max_batched_tokens or kv_cache_tokens, take a smaller model, or a GPU that "
            "nothing else uses."
        )
    num_tokens = config.kv_cache_tokens or num_blocks * config.block_size
    _logger.info(
        "The KV cache has %d tokens; steps of up to %d sequences may take %.1f GiB beside it",
        *(num_tokens, config.max_num_seqs, steps / 2**30),
    )
    return num_tokens


def room_on_device(num_bytes: int) -> torch.Tensor | None:
    """Memory for a handoff, on the device of this process's engine; what was launched before may still use it. None =
    there is no engine on a device, or no room beside what its steps may take and half of what is not counted."""
    for device, (whole, claimed) in _claims.items():
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        idle = min(free, whole - _OF_A_PROCESS - reserved) + reserved - torch.cuda.memory_allocated(device)
        with contextlib.suppress(torch.OutOfMemoryError):  # it may lie in pieces
            if num_bytes <= idle - claimed:
                return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return None


def _activation_bytes(model: ModelConfig, num_rows: int, itemsize: int) -> int:
    """Estimate one layer's activations; some models that are not of Llama's shape compute in float32."""
    widest = max(model.intermediate_size * 3, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * 3)
    return num_rows * (widest + 8 * model.hidden_size) * (itemsize if model.has_llama_shape else 4)
