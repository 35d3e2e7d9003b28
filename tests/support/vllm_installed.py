"""Whether vLLM is there, and the marks of the tests that need it."""

import pytest

from serve_app.backends.vllm_parts.settings import installed_version
from speculative.errors import ConfigError


def _is_installed() -> bool:
    try:
        return bool(installed_version())
    except ConfigError:
        return False


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not _is_installed(), reason="vLLM is not installed here; `make test-vllm` sets it up"),
    pytest.mark.filterwarnings("default"),  # vLLM's own are many
]
