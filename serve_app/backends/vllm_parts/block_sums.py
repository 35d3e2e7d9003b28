"""A number for what a block of vLLM's cache holds: whether blocks that were copied are the ones that were computed."""

from collections.abc import Iterable, Sequence

import torch

_WORD = 4  # bytes
_AT_ONCE = 32 * 2**20  # bytes of a layer; four times as many are needed beside them


def block_sums(layers: Iterable[tuple[torch.Tensor, Sequence[int]]], num_blocks: int) -> torch.Tensor:
    """A sum over each block, all layers together; it waits for what the device still computes.

    Each word counts by its place and its layer, so that rows, layers, keys and values in another order give another
    sum. It is no checksum against malice.

    Args:
        layers: the cache of each layer, blocks first, and the request's blocks in it, equally many in each.
        num_blocks: that vLLM's scheduler counts; a kernel may have divided each of them.

    Returns:
        [blocks] int64, on the CPU.
    """
    sums: torch.Tensor | int = 0
    for index, (cache, blocks) in enumerate(layers):
        parts = cache.shape[0] // num_blocks
        bytes_per_block = parts * cache[0].numel() * cache.element_size()
        at_once = max(1, _AT_ONCE // bytes_per_block)
        begins = range(0, len(blocks), at_once)
        of_layer = torch.cat([_sums(cache, blocks[begin : begin + at_once], parts) for begin in begins])
        sums = sums + (2 * index + 1) * of_layer  # modulo 2^64
    return torch.as_tensor(sums, dtype=torch.int64).cpu()


def _sums(cache: torch.Tensor, blocks: Sequence[int], parts: int) -> torch.Tensor:
    """Sum some blocks of one layer, each of which is so many rows of its cache; [blocks] int64."""
    wanted = torch.tensor([block * parts + part for block in blocks for part in range(parts)], device=cache.device)
    rows = cache[wanted].reshape(len(blocks), -1).contiguous().view(torch.uint8)  # [blocks, bytes]
    words = (rows.view(torch.int32) if rows.shape[1] % _WORD == 0 else rows).to(torch.int64)
    places = 2 * torch.arange(words.shape[1], dtype=torch.int64, device=cache.device) + 1
    return (words * places).sum(dim=1)
