"""The tensors of a checkpoint in the format in which they are served, each read when it is asked for."""

from pathlib import Path

import torch
from torch import Tensor

from speculative.model.config import ModelConfig
from speculative.model.formats import EMBEDDING, LM_HEAD, Format, Served
from speculative.model.forms import own_files
from speculative.model.loading import checkpoint_files
from speculative.model.tensor_files import TensorFiles


class ServedTensors:
    """Reads tensors by their names in a checkpoint; a tied LM head is there, too.

    Args:
        folder: the checkpoint.
        form: the format of the matrices; all others are plain.
        dtype: of plain tensors.
        device: where to.
    """

    def __init__(self, folder: Path, form: Format, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._files = TensorFiles([*checkpoint_files(folder), *own_files(folder, form.name)])
        self._form, self._dtype, self._device = form, dtype, device
        model = ModelConfig.from_folder(folder)
        self._tied = model.tie_word_embeddings
        self._matrices = (*(f"{name}.weight" for name in model.names.matrices), LM_HEAD)

    def __contains__(self, name: str) -> bool:
        return self._source(name) in self._files

    def __getitem__(self, name: str) -> Served:
        source = self._source(name)
        tensor = self._files[source].to(self._device)
        if name.endswith(self._matrices):
            return self._form.read(source, tensor, self._files, self._dtype)
        return tensor.to(self._dtype)

    def floats(self, name: str) -> Tensor:
        """Return a tensor as the float32 numbers that it stands for."""
        served = self[name]
        return served.float() if isinstance(served, Tensor) else served.to_float()

    def _source(self, name: str) -> str:
        return EMBEDDING if name == LM_HEAD and self._tied else name
