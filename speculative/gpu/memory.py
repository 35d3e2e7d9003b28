"""How many tokens the KV cache of a GPU may hold: what weights and steps leave free."""

import torch

from speculative.config import EngineConfig
from speculative.drafting.neural_drafter import DraftModel
from speculative.errors import ConfigError
from speculative.gpu.buckets import Buckets
from speculative.gpu.graph_step import graph_bytes
from speculative.gpu.paged_attention import AttentionSizes
from speculative.model.decoder import Decoder

_KEPT_FREE = 0.05  # of the device's memory, for what is not counted here


def tokens_that_fit(config: EngineConfig, decoder: Decoder, draft_model: DraftModel | None, token_bytes: int) -> int:
    """Tokens of a KV cache that fills the memory which is free once the weights are loaded, in whole blocks.

    Args:
        config: of the engine.
        decoder: the target, on the GPU.
        draft_model: of the drafter, on the GPU; None where it has none.
        token_bytes: of a token in the caches of target and drafter.

    Raises:
        ConfigError: not even one block fits.
    """
    model = decoder.config
    longest = config.max_model_len or model.max_position_embeddings
    buckets = Buckets.of(config.max_num_seqs, config.drafter.max_drafts)
    sizes = AttentionSizes(config.block_size, buckets.largest.num_queries, -(-longest // config.block_size))
    # Steps that cannot be replayed take as much as the captured ones beside the graphs' pool.
    steps = 2 * graph_bytes(decoder, buckets, sizes, draft_model)
    prompts = config.max_batched_tokens * (3 * model.intermediate_size + 12 * model.hidden_size) * 4
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)
    room = int(free - _KEPT_FREE * total) - steps - prompts
    num_blocks = room // (token_bytes * config.block_size) - 1  # less the block of padding rows
    if num_blocks < 1:
        raise ConfigError(
            f"the GPU has {free / 2**30:.1f} GiB free beside the weights, and steps of {config.max_num_seqs} sequences "
            f"may take {(steps + prompts) / 2**30:.1f} GiB: nothing is left for the KV cache; lower max_num_seqs or "
            "max_batched_tokens, take a smaller model, or a GPU that nothing else uses."
        )
    return num_blocks * config.block_size
