"""Finds models for the commands: fetched, with a word on how it goes, or on this machine already."""

from pathlib import Path

from deploy.run.what_is import HUB_ID
from speculative.config import models_folder
from speculative.errors import ConfigError
from speculative.model.catalogue import CATALOGUE, Progress, fetch_model, is_complete


def find_model(name: str, progress: Progress | None = None) -> Path:
    """The folder of a model: of the catalogue, fetched where it is not there yet, or a head that comes with the
    package, or what else `resolve_model` knows.

    Raises:
        ConfigError: there is no such model.
        FetchFailed: it could not be fetched.
    """
    from serve_app.backends.base import SHIPPED_HEADS  # numpy, torch: not before the command line is understood
    from speculative.model.loading import resolve_model

    if name in CATALOGUE:
        return fetch_model(name, progress=progress)
    if progress is not None and HUB_ID.fullmatch(name) and model_here(name) is None:
        progress(f"downloading {name} from the Hugging Face hub")
    return resolve_model(name, SHIPPED_HEADS)


def model_here(name: str) -> Path | None:
    """The folder of a model that is on this machine already; None where `find_model` would have to fetch it. Raises
    ConfigError: there is no such model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from serve_app.backends.base import SHIPPED_HEADS
    from speculative.model.loading import checkpoint_files, resolve_model

    if name in CATALOGUE:
        folder = models_folder() / name
        return folder if is_complete(folder, CATALOGUE[name]) else None
    if not HUB_ID.fullmatch(name) or Path(name).is_dir():
        return resolve_model(name, SHIPPED_HEADS)
    try:
        repository, _, revision = name.partition("@")
        folder = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
        checkpoint_files(folder)  # some of its files alone are here too
    except (LocalEntryNotFoundError, HFValidationError, ConfigError):
        return None
    return folder
