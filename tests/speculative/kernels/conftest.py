"""Threads for tests of the kernels, and the tiles of AMX, emulated in C++ and compiled once."""

import ctypes
import shutil
from collections.abc import Iterator

import pytest
import torch

from speculative.kernels import library as kernels_library
from speculative.kernels.bindings import Kernels


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    compiler = next(path for name in kernels_library._COMPILERS if (path := shutil.which(name)))
    library = tmp_path_factory.mktemp("tiles") / "kernels-emulated.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_library, "_FLAGS", (*kernels_library._FLAGS, "-DTRUESPEC_EMULATE_TILES"))
        kernels = Kernels(ctypes.CDLL(str(kernels_library._kept(compiler, library))))
    if not kernels.has_tiles:
        pytest.skip("tiles go with AVX512-BF16, which this processor lacks")
    return kernels


@pytest.fixture
def tiles(emulation: Kernels) -> Iterator[Kernels]:
    num_threads = torch.get_num_threads()
    assert emulation.permit_tiles()
    emulation.by_tiles = True
    yield emulation
    emulation.by_tiles = emulation.attends_by_tiles = False
    torch.set_num_threads(num_threads)
