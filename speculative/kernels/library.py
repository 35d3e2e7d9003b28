"""The kernels' library: compiled once for this machine's processor, and kept.

Without a compiler, AVX-512 or AVX2 there is none, and torch's own operators do the work.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from speculative.config import kernels_folder
from speculative.kernels.bindings import Kernels
from speculative.kernels.prefetch import describe_ways, measured_ways
from speculative.kernels.tiles import measured_attention, measured_tiles

_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("avx2.h", "kernels.h", "tiles.h", "attention.cpp", "layers.cpp", "products.cpp", "vocabulary.cpp")
)
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-strict-aliasing",
    "-fopenmp",
    "-fPIC",
    "-fno-semantic-interposition",
    "-shared",
)
_COMPILE_LIMIT_S = 120

_log = logging.getLogger(__name__)
compiling = logging.getLogger(f"{__name__}.compiling")
"""Says when the kernels are compiled, which takes a minute, and how long it took."""


@functools.cache
def find_kernels() -> Kernels | str:
    """The kernels for this machine, compiled at the first call of the first process; or why there are none, and what
    to do about it.

    A built library is kept in the cache folder; a change of source, flags, compiler or instructions triggers a rebuild.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AVX2"):
        return f"torch sees {capability} on this processor, and they need AVX-512 or AVX2; take a machine that has one"
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return f"none of {', '.join(_COMPILERS)} is on PATH to compile them; install g++"
    try:
        library = _built(compiler)
        kernels = Kernels(ctypes.CDLL(str(library)))
        _set_ways(kernels, library)
        _set_tiles(kernels, library)
        return kernels
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(getattr(error, "stderr", None) or error).strip()
        _log.warning("%s does not compile the CPU kernels: %s", compiler, detail)
        return f"{compiler} does not compile them ({detail.splitlines()[0]}); install a current g++"


@functools.cache
def cpu_kernels() -> Kernels | None:
    """The kernels for this machine; None where there are none."""
    found = find_kernels()
    return found if isinstance(found, Kernels) else None


def _built(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_LIMIT_S).stdout
    key = hashlib.blake2b(b"".join(path.read_bytes() for path in _SOURCES), digest_size=12)
    for part in (
        " ".join((compiler, *_FLAGS)).encode(),
        version,
        (processor_says("flags") or platform.processor()).encode(),
    ):
        key.update(part)
    name = f"kernels-{key.hexdigest()}.so"
    try:
        return _kept(compiler, kernels_folder() / name)
    except OSError as error:
        own = _own_folder()
        _log.warning("The CPU kernels cannot be kept in %s (%s); they are kept in %s.", kernels_folder(), error, own)
        return _kept(compiler, own / name)


def _kept(compiler: str, library: Path) -> Path:
    """Return the library, compiled where it is not there yet."""
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:  # another process never loads a partial library
        made = Path(scratch) / library.name
        command = [compiler, *_FLAGS, *(str(path) for path in _SOURCES if path.suffix == ".cpp"), "-o", str(made)]
        compiling.info("compiling the CPU kernels for this processor: once, about 10 s, on a busy machine a minute")
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
        compiling.info("compiled them in %.0f s; they are kept in %s", time.monotonic() - began, library.parent)
        os.replace(made, library)
    return library


def _own_folder() -> Path:
    """Return a folder for temporary files that nobody else can have put a library into."""
    folder = Path(tempfile.gettempdir()) / f"truespec-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="truespec-kernels-"))


def _set_ways(kernels: Kernels, library: Path) -> None:
    """Set how weights are prefetched: as was measured on such a processor, and is kept beside the library."""
    kept = _kept_choice(library, "prefetch")
    with contextlib.suppress(OSError, ValueError, TypeError):  # else it is measured again
        kernels.prefetch(json.loads(kept.read_text(encoding="utf-8")))
        return
    ways = measured_ways(kernels)
    _log.info("Weights are prefetched in the ways that were fastest on this machine: %s.", describe_ways(ways))
    keep_json(kept, ways)


def _set_tiles(kernels: Kernels, library: Path) -> None:
    """Set what is left to AMX: as was measured on such a processor, and is kept."""
    if not kernels.has_tiles:
        return
    if not kernels.permit_tiles():
        _log.info("Linux does not give this process the registers of AMX; AVX-512 computes its products.")
        return
    kept = _kept_choice(library, "tiles")
    with contextlib.suppress(OSError, ValueError, TypeError):  # else it is measured again
        # Both are numbers before the first of them is set.
        products, attention = map(ctypes.c_int64, json.loads(kept.read_text(encoding="utf-8")))
        kernels.by_tiles, kernels.attends_by_tiles = bool(products), bool(attention)
        return
    by_tiles, why = measured_tiles(kernels)
    _log.info("Products of bfloat16s are computed by %s: %s.", "AMX tiles" if by_tiles else "AVX-512", why)
    attends, why = measured_attention(kernels)
    _log.info("Attention over a cache in bfloat16 is computed by %s: %s.", "AMX tiles" if attends else "AVX-512", why)
    keep_json(kept, (by_tiles, attends))


def _kept_choice(library: Path, name: str) -> Path:
    """Return the file of what was measured on processors of this model."""
    model = hashlib.blake2b(processor_says("model name").encode(), digest_size=4).hexdigest()
    return library.with_name(f"{library.stem}-{model}.{name}.json")


def keep_json(path: Path, content: object) -> None:
    """Write a file beside its place, and then rename it: another process never reads half of it. A folder that cannot
    be written to is left as it is."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        written.write_text(json.dumps(content), encoding="utf-8")
        os.replace(written, path)


def processor_says(name: str) -> str:
    """Return what Linux says of the first processor under a name, such as `model name`; "" = nothing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
