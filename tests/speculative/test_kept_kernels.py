"""The folder in which Triton keeps what it compiles."""

from pathlib import Path

import pytest

from speculative.gpu.triton_here import keep_triton_kernels


def test_kernels_are_kept_in_the_cache_unless_somebody_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert keep_triton_kernels() == tmp_path / "elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path / "cache"))
    assert keep_triton_kernels() == tmp_path / "cache" / "kernels" / "triton"
    knobs = pytest.importorskip("triton").knobs
    assert knobs.cache.dir == str(tmp_path / "cache" / "kernels" / "triton")


def test_a_cache_that_cannot_be_written_to_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path / "cache"))
    assert keep_triton_kernels() is None
    assert "each start compiles them again" in caplog.text
