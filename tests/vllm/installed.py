"""Whether vLLM is there."""

from serve_app.backends.vllm_parts.settings import installed_version
from speculative.errors import ConfigError


def has_vllm() -> bool:
    """Whether a version that the engine knows is installed."""
    try:
        installed_version()
    except ConfigError:
        return False
    return True
