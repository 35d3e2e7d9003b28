"""Runs the commands of the runbooks in bash, after their setup. Where kubectl would enter a pod, it stays here."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from dashboards.build import ALERTS
from dashboards.shell import SETUP

_KUBECTL = """\
#!/bin/bash
case " $* " in
  *" exec "*) until [ "$1" = -- ]; do shift; done; shift; exec "$@" ;;
  *" get pods "*) echo pod/here ;;
  *" get rayservice "*) printf truespec ;;
  *) echo "this kubectl only enters pods" >&2; exit 1 ;;
esac
"""


def commands(*begin: str) -> list[str]:
    """Those commands of all runbooks that begin so, each once."""
    found = dict.fromkeys(command for alert in ALERTS for command in alert.commands)
    return [command for command in found if command.startswith(begin)]


def with_kubectl(folder: Path, script: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a shell for which a script in a folder is kubectl."""
    kubectl = folder / "kubectl"
    kubectl.write_text(script, encoding="utf-8")
    kubectl.chmod(0o755)
    return {**environment, "PATH": f"{folder}{os.pathsep}{environment['PATH']}"}


def run(
    command: str, folder: Path | None, values: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> str:
    """What a command prints; fails the test if it fails, or says something to standard error.

    Args:
        folder: for the kubectl; None = the real one is used.
        values: of the setup's variables, as its reader would write them.
        environment: of the shell.
    """
    for name in ("curl", "jq"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    inside = environment if folder is None else with_kubectl(folder, _KUBECTL, environment)
    setup = SETUP
    for name, value in values.items():
        setup, times = re.subn(rf"(?m)(^|(?<= )){name}=\S*", lambda _, text=f"{name}={value}": text, setup)
        assert times == 1, name
    script = f"set -euo pipefail\n{setup}\n{command}\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=inside, check=False, timeout=300)
    assert done.returncode == 0 and not done.stderr, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
