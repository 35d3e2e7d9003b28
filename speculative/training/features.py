"""Training data of a drafter: the frozen target's features and distributions, computed once and kept on disk."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.errors import ConfigError
from speculative.model.decoder import Decoder
from speculative.training.data import Conversations

Progress = Callable[[int, int], None]

_TOKENS_AT_ONCE = 2048  # of one pass of the target
_ROWS_AT_ONCE = 64  # whose logits are summed at once: 12 MB of 49,152 tokens, which a CPU keeps in its cache
_META = "features.json"
_AUX, _FINAL, _LOG_Z = "aux.bin", "final.bin", "log_z.bin"


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The target's features at every token of the conversations; tensors lie on disk and are read as needed.

    aux: [N, F] the inputs of the layers that a head reads, or None.
    final: [N, hidden] what the LM head reads. Both bfloat16.
    log_z: [N] float32, log of the sum of the exponentiated logits: p(x) = exp(logit of x - log_z).
    """

    conversations: Conversations
    aux: Tensor | None
    final: Tensor
    log_z: Tensor

    @property
    def inputs(self) -> Tensor:
        """[N, F] what a head reads: `aux`, or `final` where it reads no layer's input."""
        return self.final if self.aux is None else self.aux


def compute_features(
    target: Decoder,
    conversations: Conversations,
    folder: Path,
    aux_layers: tuple[int, ...],
    *,
    model_key: str = "",
    progress: Progress | None = None,
) -> Features:
    """Run the target over the conversations, unless `folder` already holds the result.

    Args:
        target: in evaluation mode, on any device.
        conversations: the tokens; each conversation is a context of its own.
        folder: for the cache; 2 * (len(aux_layers) + 1) * hidden_size + 4 bytes a token.
        aux_layers: ascending; () if only `final` is read.
        model_key: identifies the target's weights; a cache of another target is recomputed.
        progress: called with (conversations done, conversations).
    """
    key = _key(conversations, aux_layers, model_key, target.config.hidden_size)
    done = _is_done(folder, key, aux_layers)
    features = _open(folder, conversations, len(aux_layers) * target.config.hidden_size, target.config.hidden_size)
    if done:
        return features
    first = 0
    for stop in _groups(conversations.lengths.tolist()):
        _compute(target, features, range(first, stop), aux_layers)
        first = stop
        if progress is not None:
            progress(stop, len(conversations))
    (folder / _META).write_bytes(_mark(key))
    return features


class PlainAttention:
    """Causal attention over whole sequences, packed one after another; nothing is cached."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim] -> [N, num_heads, head_dim]."""
        del layer
        parts = zip(*(rows.split(self._lengths) for rows in (query, key, value)), strict=True)
        return torch.cat([causal_attention(*part) for part in parts])


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence attends to itself: [L, heads, head_dim] each, fewer heads in key and value."""
    query, key, value = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


@torch.inference_mode()
def _compute(target: Decoder, features: Features, which: range, aux_layers: tuple[int, ...]) -> None:
    conversations = features.conversations
    lengths = conversations.lengths[which.start : which.stop].tolist()
    begin = int(conversations.starts[which.start])
    end = begin + sum(lengths)
    tokens = torch.from_numpy(conversations.token_ids[begin:end].astype(np.int64)).to(target.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(target.device)
    final, aux = target.run(tokens, positions, PlainAttention(lengths), aux_layers)
    if features.aux is not None:
        features.aux[begin:end] = aux.bfloat16().cpu()
    kept = final.bfloat16()
    features.final[begin:end] = kept.cpu()
    kept = kept.to(target.dtype)  # the sum must match the logits that training computes from what is kept
    for start in range(0, end - begin, _ROWS_AT_ONCE):
        log_z = target.logits(kept[start : start + _ROWS_AT_ONCE]).logsumexp(-1)
        features.log_z[begin + start : begin + start + len(log_z)] = log_z.cpu()


def _groups(lengths: list[int]) -> list[int]:
    """Ends of the groups of conversations that are computed together."""
    ends, size = [], 0
    for index, length in enumerate(lengths):
        if size and size + length > _TOKENS_AT_ONCE:
            ends.append(index)
            size = 0
        size += length
    return [*ends, len(lengths)]


def _open(folder: Path, conversations: Conversations, num_aux: int, hidden_size: int) -> Features:
    num_tokens = len(conversations.token_ids)
    if num_tokens == 0:
        raise ConfigError("There are no conversations to train on; give more data.")
    folder.mkdir(parents=True, exist_ok=True)
    aux, final, log_z = (folder / name for name in (_AUX, _FINAL, _LOG_Z))
    return Features(
        conversations,
        aux=_mapped(aux, num_tokens * num_aux, torch.bfloat16).view(num_tokens, num_aux) if num_aux else None,
        final=_mapped(final, num_tokens * hidden_size, torch.bfloat16).view(num_tokens, hidden_size),
        log_z=_mapped(log_z, num_tokens, torch.float32),
    )


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    num_bytes = size * dtype.itemsize
    if not path.exists() or path.stat().st_size != num_bytes:
        with path.open("wb") as file:
            file.truncate(num_bytes)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def _key(conversations: Conversations, aux_layers: tuple[int, ...], model_key: str, hidden_size: int) -> str:
    digest = hashlib.sha256(f"{model_key} {aux_layers} {hidden_size}".encode())
    digest.update(conversations.token_ids.tobytes())
    digest.update(conversations.lengths.tobytes())
    return digest.hexdigest()


def _is_done(folder: Path, key: str, aux_layers: tuple[int, ...]) -> bool:
    """Return whether the cache is complete; if not, its mark is removed before anything is overwritten."""
    meta = folder / _META
    files = (_AUX, _FINAL, _LOG_Z) if aux_layers else (_FINAL, _LOG_Z)
    whole = meta.is_file() and all((folder / name).is_file() for name in files)
    if whole and meta.read_bytes() == _mark(key):
        return True
    meta.unlink(missing_ok=True)
    return False


def _mark(key: str) -> bytes:
    """The content of a complete cache's mark; anything else there, such as a damaged file, marks nothing."""
    return (json.dumps({"key": key}) + "\n").encode()
