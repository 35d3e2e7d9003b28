import pytest

from tests.support.backend_conformance import Conformance
from tests.support.fake_backend import FakeBackend, FakeConfig

CONFIG = FakeConfig(vocab_size=97, multiplier=3, run_length=4)


class TestConformance(Conformance):
    """What the fake does is what every backend does: tests over it say something about the product."""

    vocab_size = CONFIG.vocab_size

    @pytest.fixture
    async def backend(self) -> FakeBackend:
        return await started()

    @pytest.fixture
    async def other(self) -> FakeBackend:
        return await started()


async def started() -> FakeBackend:
    backend = FakeBackend(CONFIG)
    await backend.start()
    return backend
