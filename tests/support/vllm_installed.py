"""Whether vLLM is there, and the marks of the tests that need it."""

import pytest

from serve_app.backends.vllm_parts.settings import installed_version
from speculative.errors import ConfigError


def has_vllm() -> bool:
    """Whether a version that the engine knows is installed."""
    try:
        installed_version()
    except ConfigError:
        return False
    return True


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed here; `make test-vllm` sets it up"),
    pytest.mark.filterwarnings("default"),  # vLLM's own are many
]
