"""What a caller sees of an error that was raised in another replica."""

from ray.exceptions import RayTaskError

from speculative.errors import TruespecError


def own_error(error: RayTaskError, otherwise: type[Exception] = ConnectionError) -> Exception:
    """What a replica raised: our own exceptions as they are, anything else as work that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else otherwise(f"a replica failed: {cause}")
