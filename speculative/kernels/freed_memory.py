"""Memory that freed tensors leave behind."""

import ctypes


def give_back_freed_memory() -> None:
    """Return to the system what malloc keeps of freed tensors; only glibc's has such a call, others keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
