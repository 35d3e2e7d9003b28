"""Device memory: what captured steps may take, and how many tokens the KV cache may hold beside them."""

import gc

import torch

from speculative.config import EngineConfig
from speculative.drafting.neural_drafter import DraftModel
from speculative.errors import ConfigError
from speculative.gpu.buckets import Buckets
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import MOST_SEQUENCES, prompt_sizes
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder

_KEPT_FREE = 0.05  # of the device's memory, or of a share of it, for what is not counted here
_OF_A_PROCESS = 3 * 2**28  # estimated: what CUDA, its libraries and compiled kernels take, of which torch knows nothing


def graph_bytes(
    decoder: Decoder, buckets: Buckets, sizes: AttentionSizes, draft_model: DraftModel | None, prompts: tuple[int, ...]
) -> int:
    """An upper estimate of the device memory that captured steps hold.

    The graphs share one pool, so the largest counts: verification, the activations of a layer, attention's workspace.
    Each graph has block tables of its own. A drafting model's q [K x B, W] and what a prompt's pass gives outlive their
    graphs. prompts: the rows of each captured pass of prompts, ascending.
    """
    model, (num_seqs, num_queries) = decoder.config, buckets.largest
    num_rows = num_seqs * num_queries
    vocab_size = model.vocab_size
    # The LM head's output, its logits and logprobs in float32 with a comparison of these, and partial sums of blocks.
    needed = num_rows * ((decoder.dtype.itemsize + 9) * vocab_size + vocab_size // 4 + 1024)
    needed += _activation_bytes(model, max(num_rows, *prompts))
    needed += sizes.workspace_bytes(num_rows, model.num_heads, model.head_dim)
    num_features = 0 if draft_model is None else draft_model.num_features
    needed += prompts[-1] * (model.hidden_size + num_features) * decoder.dtype.itemsize
    num_tables = sum(bucket.num_seqs for bucket in buckets.packed) + len(prompts) * MOST_SEQUENCES
    num_tables += num_seqs  # of those that decode beside prompts
    if draft_model is not None:
        width = vocab_size if draft_model.ids is None else len(draft_model.ids)
        # Drafts are sampled from the LM head's output, with a few numbers of each block of it.
        needed += num_seqs * width * (4 * buckets.most_made + decoder.dtype.itemsize + 1)
        num_tables += sum(bucket.num_seqs for own in (buckets, buckets.of_drafts(varying=True)) for bucket in own)
    return needed + num_tables * sizes.max_blocks * 8


def free_bytes(device: torch.device, share: float) -> tuple[int, int]:
    """Return what is free of an engine's share of a CUDA device's memory, and all of the share.

    A part of a device is a part of all its memory: what is free of that, an engine that starts at the same time may be
    about to take. What the allocator keeps does not count as taken: graphs have a pool of their own.
    """
    gc.collect()  # graphs of old weights, if anything still holds them
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share == 1:
        return free, total
    whole = int(share * total)
    return min(free, whole - _OF_A_PROCESS - torch.cuda.memory_reserved(device)), whole


def tokens_that_fit(config: EngineConfig, decoder: Decoder, draft_model: DraftModel | None) -> int:
    """Tokens of a KV cache that fills the memory which is free once the weights are loaded, in whole blocks.

    Args:
        config: of the engine.
        decoder: the target, on the GPU.
        draft_model: of the drafter, on the GPU; None where it has none.

    Raises:
        ConfigError: not even one block fits.
    """
    model = decoder.config
    shapes = [model.kv_shape] + ([] if draft_model is None else [draft_model.kv_shape])
    num_features = 0 if draft_model is None else draft_model.num_features  # kept for the last position of a block
    num_values = sum(shape.num_values for shape in shapes) * config.block_size + num_features
    block_bytes: int = num_values * getattr(torch, config.dtype).itemsize
    longest = config.max_model_len or model.max_position_embeddings
    buckets = Buckets.of(config.max_num_seqs, config.drafter.max_drafts, config.drafter.num_draft_tokens)
    sizes = AttentionSizes(config.block_size, buckets.largest.num_queries, -(-longest // config.block_size))
    steps = graph_bytes(decoder, buckets, sizes, draft_model, prompt_sizes(config.max_batched_tokens))
    steps += _activation_bytes(model, config.max_batched_tokens)
    # torch's operators verify what no graph does, beside the graphs' pool, in nine matrices [R, V] of float32, three of
    # them for filters; three more are of a model's drafts.
    num_rows = config.max_num_seqs * (1 + config.drafter.max_drafts)
    steps += num_rows * model.vocab_size * 4 * (9 if draft_model is None else 12)
    free, total = free_bytes(decoder.device, config.gpu_share)
    room = int(free - _KEPT_FREE * total) - steps
    num_blocks = room // block_bytes - 1  # less the block of padding rows
    if num_blocks < 1:
        whose = "the GPU" if config.gpu_share == 1 else f"the engine's {config.gpu_share:g} of the GPU"
        raise ConfigError(
            f"{whose} has {free / 2**30:.1f} GiB free beside the weights, and steps of {config.max_num_seqs} sequences "
            f"may take {steps / 2**30:.1f} GiB: nothing is left for the KV cache; lower max_num_seqs or "
            "max_batched_tokens, take a smaller model, or a GPU that nothing else uses."
        )
    return num_blocks * config.block_size


def _activation_bytes(model: ModelConfig, num_rows: int) -> int:
    """Of one layer, in float32."""
    widest = max(model.intermediate_size * 3, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * 3)
    return num_rows * (widest + 8 * model.hidden_size) * 4
