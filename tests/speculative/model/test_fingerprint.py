"""The fingerprint changes with what is computed, and with nothing else."""

import json
import os
from pathlib import Path

from transformers import AutoModelForCausalLM

from speculative.model.fingerprint import CACHE_FILE, model_fingerprint
from tests.support.tiny_models import write_tiny_model


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_two_copies_agree_and_the_files_time_does_not_matter(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    os.utime(second / "model.safetensors", (1, 1))
    assert model_fingerprint(first) == model_fingerprint(second)
    assert len(model_fingerprint(first)) == 32


def test_fields_that_change_nothing_do_not_count(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    before = model_fingerprint(folder)
    set_config(folder, transformers_version="4.0.0", use_cache=False)
    assert model_fingerprint(folder) == before
    set_config(folder, rms_norm_eps=1e-3)
    assert model_fingerprint(folder) != before


def test_the_second_time_no_weight_is_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    first = model_fingerprint(folder)
    kept = json.loads((folder / CACHE_FILE).read_text())
    (folder / CACHE_FILE).write_text(json.dumps(kept | {"fingerprint": "from the cache"}))
    assert model_fingerprint(folder) == "from the cache"
    (folder / CACHE_FILE).write_text("damaged")
    assert model_fingerprint(folder) == first


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / CACHE_FILE).mkdir()  # nothing can be renamed onto it
    assert model_fingerprint(folder) == model_fingerprint(folder)
    assert [path.name for path in folder.glob(f"{CACHE_FILE}*")] == [CACHE_FILE]


def test_every_shard_counts(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "whole")).save_pretrained(
        folder, max_shard_size="100KB"
    )
    before = model_fingerprint(folder)
    last = max(folder.glob("model-*.safetensors"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    os.utime(last, (1, 1))
    assert model_fingerprint(folder) != before
