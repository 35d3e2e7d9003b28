"""Where the commands find models."""

from pathlib import Path

import pytest

from deploy.run.models import find_model, model_here
from serve_app.backends.base import SHIPPED_HEADS
from speculative.errors import ConfigError
from speculative.model.loading import resolve_model


def test_a_head_that_comes_with_the_package_is_found_and_only_its_package_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESPEC_CACHE", str(tmp_path))
    name = "smollm2-135m-eagle3"
    assert find_model(name) == model_here(name) == SHIPPED_HEADS / name
    with pytest.raises(ConfigError, match="No model"):
        resolve_model(name)
