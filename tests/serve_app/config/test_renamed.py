"""Old names of settings: read as the new ones, with one warning that names both and the file."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.config.files import load_config, parse_args
from serve_app.config.renamed import RENAMED
from speculative.errors import ConfigError

VALUES: dict[str, Any] = {"engine.weights": "int8"}  # of the others, which are shares: 0.25


def with_setting(path: str, value: object, args: dict[str, Any]) -> dict[str, Any]:
    section, _, name = path.partition(".")
    return {**args, section: {**args.get(section, {}), name: value}}


def args_with(path: str) -> dict[str, Any]:
    base: dict[str, Any] = {"model": {"source": "m"}}
    return with_setting("engine.kind", "vllm", base) if path.startswith("vllm.") else base


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_the_old_name_is_read_with_a_warning_that_names_the_new_one(
    old: str, new: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = VALUES.get(old, 0.25)
    file = tmp_path / "app.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": with_setting(old, value, args_with(old))}]}))
    with caplog.at_level(logging.WARNING):
        read = load_config(file).application.args
        assert [record.getMessage() for record in caplog.records] == [f"{old} is now {new}; rename it in {file}."]
        caplog.clear()
        assert read == parse_args(with_setting(new, value, args_with(new)))
        assert parse_args(read.model_dump(exclude_unset=True)) == read, "as `truespec serve` hands it to Ray"
    assert not caplog.records
    section, _, name = new.partition(".")
    assert getattr(getattr(read, section), name) == value


def test_without_a_file_the_warning_says_args(caplog: pytest.LogCaptureFixture) -> None:
    parse_args({"model": {"source": "m"}, "replay": {"share": 0.5}})
    assert caplog.messages == ["replay.share is now replay.sample_rate; rename it in the application's args."]


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_both_names_at_once_are_refused(old: str, new: str, caplog: pytest.LogCaptureFixture) -> None:
    value = VALUES.get(old, 0.25)
    with pytest.raises(ConfigError) as refused:
        parse_args(with_setting(new, value, with_setting(old, value, args_with(old))))
    assert str(refused.value) == f"args.{old}: is the old name of {new}, and both are set; remove {old}."
    assert not caplog.records


def test_a_wrong_value_under_the_old_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"args\.replay\.sample_rate: .* less than or equal to 1"):
        parse_args({"model": {"source": "m"}, "replay": {"share": 2}})
