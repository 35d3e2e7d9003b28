"""An environment with the packages of a bare GPU machine, and no others: links to those that are installed here."""

import importlib.metadata
import re
import venv
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "pytest", "pytest-xdist")
_NOT_THERE = {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "xxhash", "httpx"}
"""What other versions of these packages may ask for."""
_NAME = re.compile(r"[\w.-]+")


def make_bare_environment(folder: Path) -> Path:
    """Return its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    (there,) = folder.glob("lib/python*/site-packages")
    for name in _with_requirements(PACKAGES):
        distribution = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}:
            link = there / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name in _NOT_THERE:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        waiting += [_NAME.match(one)[0] for one in required if "extra ==" not in one]  # type: ignore[index]
    return found
