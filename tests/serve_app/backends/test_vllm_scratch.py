"""A folder in memory goes with its process, however that ends."""

import subprocess
import sys
from pathlib import Path

from serve_app.backends.vllm_parts.scratch import Scratch

OWNER = """
import sys, time
from pathlib import Path
from serve_app.backends.vllm_parts.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.folder / "keys and values").write_text("many")
print(scratch.folder, flush=True)
time.sleep(600)
"""


def owner(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_goes_and_what_others_use_stays(tmp_path: Path) -> None:
    other = tmp_path / "truespec-vllm-of-somebody"
    other.mkdir()
    (killed, left), (running, used) = owner(tmp_path), owner(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert (left / "keys and values").is_file()
        own = Scratch(tmp_path)
        assert not left.exists()
        assert (used / "keys and values").is_file()
        assert other.is_dir(), "nobody knows whose it is"
        own.remove()
        assert not own.folder.exists()
    finally:
        for process in (killed, running):
            process.kill()
            process.communicate()
