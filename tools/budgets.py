"""The budgets of the tree: `make check` fails where something has outgrown its own. CONTRIBUTING.md says why."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("speculative", "serve_app", "deploy", "dashboards")
CORE = (
    "*.py", "state/*.py", "sampling/*.py", "scheduling/*.py", "step/*.py",
    "drafting/weights.py", "model/arithmetic.py", "model/end_tokens.py",
)  # fmt: skip
"""Modules of `speculative/` between a request and its tokens; `weight_formats` beside them is what `model/` reads."""

_GENERATED_PAGE = re.compile(r"(<!-- )?Made by `|^<!-- Made by ", re.M)
_GENERATED_BLOCK = re.compile(r"^<!-- (?!end of)[^>]*: [^>]*-->\n.*?^<!-- end of [^>]*-->$", re.M | re.S)


def lines(files: Iterable[Path]) -> int:
    """Lines of these files, with comments and blank ones."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def core_modules() -> list[Path]:
    """The modules of the core engine."""
    files = [file for pattern in CORE for file in (ROOT / "speculative").glob(pattern)]
    return [file for file in files if file.name != "weight_formats.py"]


def words(page: str) -> int:
    """Words of a page that somebody wrote: none of a generated page, and none of generated tables."""
    if _GENERATED_PAGE.search("\n".join(page.splitlines()[:5])):
        return 0
    return len(_GENERATED_BLOCK.sub("", page).split())


def counts() -> dict[str, tuple[int, int]]:
    """What is there and what there may be at most, by what is counted."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    return {
        "lines of the product": (lines(file for name in PRODUCT for file in (ROOT / name).rglob("*.py")), 59_000),
        "lines of the core engine": (lines(core_modules()), 6_700),
        "lines of tools/": (lines((ROOT / "tools").rglob("*.py")), 9_000),
        "lines of tests": (lines((ROOT / "tests").rglob("*.py")), 58_000),
        "words of documents": (sum(words(page.read_text(encoding="utf-8")) for page in pages), 34_000),
    }


def main() -> int:
    """Print what is there; 1 = something is above its budget."""
    found = counts()
    for name, (count, most) in found.items():
        excess = f", {count - most} too many: take away, or name what a change replaces" if count > most else ""
        sys.stdout.write(f"{count:6d} {name}, of {most} at most{excess}\n")
    return int(any(count > most for count, most in found.values()))


if __name__ == "__main__":
    sys.exit(main())
