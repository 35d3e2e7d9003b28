"""The output shown on the architecture page is the engine's."""

import re
import subprocess
import sys

import pytest

from speculative.kernels.library import cpu_kernels
from speculative.model.catalogue import FetchFailed, fetch_model
from tools.chart import ROOT

_ENGINE = re.compile(r"^```python\n(from pathlib[^`]*)^```\n\n```\n([^`]*)^```", re.M)


@pytest.mark.slow
def test_the_engine_without_a_server_gives_the_output_that_is_shown() -> None:
    ((code, shown),) = _ENGINE.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    try:
        fetch_model("smollm2-135m")
    except FetchFailed as error:
        pytest.skip(str(error))
    if cpu_kernels() is None:
        pytest.skip("the answer that is shown is that of the CPU kernels")
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, cwd=ROOT
    )
    assert made.stdout == shown
