"""Whether vLLM is there, and the marks of the tests that need it."""

import pytest

from serve_app.backends.vllm_parts.settings import installed_version
from speculative.errors import ConfigError


def version_here() -> str:
    """The version of vLLM that is installed; empty where none is."""
    try:
        return installed_version()
    except ConfigError:
        return ""


def not_with(minor: str, reason: str) -> pytest.MarkDecorator:
    """The mark of a test that a version of vLLM cannot pass, with the reason."""
    return pytest.mark.skipif(version_here().startswith(f"{minor}."), reason=f"vLLM {minor}: {reason}")


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not version_here(), reason="vLLM is not installed here; `make test-vllm` sets it up"),
    pytest.mark.filterwarnings("default"),  # vLLM's own are many
]
