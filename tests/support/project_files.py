"""The files that are part of the project, committed or about to be."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def project_files(*patterns: str) -> list[str]:
    """Files that git does not ignore, by names from the root; `patterns` are git's. Needs a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
