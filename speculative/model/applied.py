"""Compares what a loaded model computes with with the tensors that were sent, in the form in which they are served.

Nothing of the loading is trusted: each tensor is read again, and where it belongs is said here once more.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.cpu.native import NativeLinear, NativeNorm, panels_of
from speculative.model.decoder import Decoder
from speculative.model.formats import Served, stacked
from speculative.model.new_weights import Networks, held_tensors
from speculative.model.quantized import Quantized
from speculative.model.served_tensors import ServedTensors

_NORMS = {
    "before": ("input_norm", "mlp_norm"),
    "behind": ("attention_out_norm", "mlp_out_norm"),
    "both": ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
}
_COLUMNS = 1024  # of a digest


def check_applied(decoder: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Compare every parameter of a loaded model with its checkpoint.

    Args:
        decoder: the model, as its kernels have it.
        folder: the checkpoint.
        dtype: of its plain weights, to which tensors are rounded before anything else.

    Raises:
        ConfigError: a tensor is not what was sent; the message names it.
    """
    sent = ServedTensors(folder, decoder.weights, dtype, decoder.device)
    for path, names in _places(decoder):
        for part in ("weight", "bias"):
            own = [name for name in (f"{name}.{part}" for name in names) if name in sent]
            if own and not _holds(decoder, path, part, [sent[name] for name in own], dtype):
                raise ConfigError(
                    f"{folder}: {' and '.join(own)} did not arrive in the model, whose {path or 'embedding'} is "
                    "another; nothing was changed. Send the weights again, and report it if they are refused again."
                )
    if decoder.fused is not None and not decoder.fused.reads(decoder.layers):
        raise ConfigError(f"{folder}: the kernels read other layers than were loaded; restart the replica.")


def digests(networks: Networks) -> dict[str, bytes]:
    """Digests of all tensors that some models hold, by their names in them, and where the kernels read them."""
    found = {name: _digest(tensor) for name, tensor in held_tensors(networks).items()}
    fused = {name: getattr(network, "fused", None) for name, network in networks.items()}
    return found | {f"{name} fused": own.addresses for name, own in fused.items() if own is not None}


def _digest(tensor: Tensor) -> bytes:
    """Sums of a tensor's bytes as integers, by rows and by columns."""
    numbers = _bytes(tensor)
    whole = numbers[: len(numbers) // (8 * _COLUMNS) * 8 * _COLUMNS].view(torch.int64).view(-1, _COLUMNS)
    parts = (whole.sum(0), whole.sum(1), numbers[whole.nbytes :])
    return str((tensor.dtype, tensor.shape)).encode() + b"".join(part.cpu().numpy().tobytes() for part in parts)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _places(decoder: Decoder) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each module with weights, by its path, and the names of its tensors, without `.weight`."""
    form, own = decoder.config.form, decoder.config.names
    places = {path: (name,) for path, name in zip(_NORMS[form.norms], own.norms, strict=True)} | {
        "attention.qkv_proj": own.qkv,
        "attention.qk_norm": ("self_attn.q_norm", "self_attn.k_norm"),
        "attention.o_proj": (own.output,),
        "mlp.gate_up_proj": own.gate_up,
        "mlp.down_proj": (own.down,),
    }
    for index in range(decoder.config.num_layers):
        for path, names in places.items():
            yield f"layers.{index}.{path}", tuple(f"model.layers.{index}.{name}" for name in names)
    yield from {"": ("model.embed_tokens",), "norm": ("model.norm",), "lm_head": ("lm_head",)}.items()


def _holds(decoder: Decoder, path: str, part: str, sent: list[Served], dtype: torch.dtype) -> bool:
    """Return whether a module has these tensors, one below the other."""
    module = decoder.get_submodule(path)
    if path.endswith("qk_norm") and not decoder.config.form.wide_qk_norm:  # one row for all heads
        counts = decoder.config.num_heads, decoder.config.num_kv_heads
        sent = [norm.expand(count, -1) for norm, count in zip(sent, counts, strict=True) if isinstance(norm, Tensor)]
    wanted = stacked(sent)
    if isinstance(module, NativeLinear) and part == "weight":
        assert isinstance(wanted, Tensor | Quantized)
        own = module.struct.weight == module.panels.data_ptr()
        return own and torch.equal(module.panels, panels_of(wanted, module.plain))
    if not isinstance(wanted, Tensor):
        assert not isinstance(wanted, Quantized)
        pairs = [(module.get_parameter(name), own) for name, own in wanted.parameters().items()]
        return all(held.dtype == own.dtype and torch.equal(_bytes(held), _bytes(own)) for held, own in pairs)
    held: Tensor = decoder.embedding if module is decoder else getattr(module, part)
    kept = dtype if decoder.packed is None or module is decoder else torch.float32
    if isinstance(module, NativeNorm) and decoder.config.form.norm_adds_one:
        wanted = 1 + wanted.float()
    return held.dtype == kept and torch.equal(held, wanted.to(kept))
