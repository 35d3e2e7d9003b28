"""The tensors of a checkpoint in the form in which they are served, each read when it is asked for."""

from pathlib import Path

import torch
from torch import Tensor

from speculative.model.config import ModelConfig
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.fp8 import E4M3, Fp8Rows, quantize_rows
from speculative.model.loading import checkpoint_files
from speculative.model.quantized import Quantized, as_quantized, unpacked
from speculative.model.tensor_files import TensorFiles

Served = Tensor | Quantized | Fp8Rows
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ServedTensors:
    """Reads tensors by their names in a checkpoint; a tied LM head is there, too.

    Args:
        folder: the checkpoint.
        form: `w4a8` and `fp8` round the matrices; all others are plain.
        dtype: of plain tensors, and of those that are rounded to four or eight bits.
        device: where to.
    """

    def __init__(self, folder: Path, form: str | None, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._files = TensorFiles(checkpoint_files(folder))
        self._form, self._dtype, self._device = form, dtype, device
        model = ModelConfig.from_folder(folder)
        self._tied, self._matrices = model.tie_word_embeddings, tuple(f"{name}.weight" for name in model.names.matrices)
        quantized = folder / QUANTIZED_FILE
        self._quantized = TensorFiles([quantized] if form == "w4a8" and quantized.is_file() else [])

    def __contains__(self, name: str) -> bool:
        return self._source(name) in self._files

    def __getitem__(self, name: str) -> Served:
        source = self._source(name)
        tensor = self._files[source].to(self._device)
        is_matrix = name.endswith(self._matrices)
        if self._form == "fp8" and is_matrix:
            if tensor.dtype != E4M3:
                return quantize_rows(tensor)
            return Fp8Rows(tensor, self._files[f"{source}_scale"].to(self._device, torch.float32))
        plain = tensor.to(self._dtype)
        if self._form != "w4a8" or not (is_matrix or name == LM_HEAD):
            return plain
        given = unpacked(source, self._quantized) if f"{source}.numbers" in self._quantized else None
        return as_quantized(plain, 8 if name == LM_HEAD else 4, given)

    def floats(self, name: str) -> Tensor:
        """Return a tensor as the float32 numbers that it stands for."""
        served = self[name]
        if isinstance(served, Fp8Rows):
            return served.numbers.float() * served.scales
        return served.to_float() if isinstance(served, Quantized) else served.float()

    def _source(self, name: str) -> str:
        return EMBEDDING if name == LM_HEAD and self._tied else name


def stacked(parts: list[Served]) -> Served:
    """Several tensors of one form as one, row block after row block."""
    if isinstance(parts[0], Quantized):
        return Quantized.stack([part for part in parts if isinstance(part, Quantized)])
    if isinstance(parts[0], Fp8Rows):
        numbers, scales = zip(*parts, strict=True)
        return Fp8Rows(torch.cat(numbers), torch.cat(scales))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])
