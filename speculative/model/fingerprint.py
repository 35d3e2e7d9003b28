"""Tells whether two engines serve the same model: one hash over what is computed and with which weights."""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from speculative.kernels.library import keep_json
from speculative.model.config import ModelConfig
from speculative.model.eagle3 import Eagle3Config
from speculative.model.forms import own_files
from speculative.model.loading import checkpoint_files
from speculative.weight_formats import is_rounded

CACHE_FILE = ".truespec-fingerprint.json"
_CHUNK_BYTES = 1 << 24


def model_fingerprint(folder: Path, config: Eagle3Config | None = None, *, weights: str | None = None) -> str:
    """XXH3-128 (32 hex digits) of the configuration that matters and of every byte of the safetensors files.

    Kept beside the model, where its folder can be written, for as long as no file changes size or time. `config` is
    that of a draft head; a model's own is read from the folder. `weights` in a format that rounds count as others.

    Raises:
        ConfigError: the folder holds no readable checkpoint.
        UnsupportedModel: the model needs something this engine does not do.
    """
    canonical = json.dumps(dataclasses.asdict(config or ModelConfig.from_folder(folder)), sort_keys=True)
    files = checkpoint_files(folder)
    if weights is not None and is_rounded(weights):
        canonical += f"\0{weights}"
        files += own_files(folder, weights)
    status = {file.name: file.stat() for file in files}
    key = {"config": canonical, "files": {name: [one.st_size, one.st_mtime_ns] for name, one in status.items()}}
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))
        if isinstance(kept, dict) and kept.get("key") == key:
            return str(kept["fingerprint"])
    try:
        import xxhash
    except ModuleNotFoundError:  # as on a machine with a GPU that a checkout was carried to: slower, never the same
        digest: Any = hashlib.blake2b(digest_size=16)
    else:
        digest = xxhash.xxh3_128()
    digest.update(canonical.encode())
    for path in files:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    fingerprint = str(digest.hexdigest())
    keep_json(folder / CACHE_FILE, {"key": key, "fingerprint": fingerprint})  # else the next start takes some seconds
    return fingerprint
