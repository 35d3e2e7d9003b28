"""Versions of what is installed."""

import importlib.metadata


def version_of(package: str) -> str:
    """Return the version that is installed; "none" where it is not, as on a machine that a checkout was carried to."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
