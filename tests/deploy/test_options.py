"""What a command is given is checked before it begins: keys, addresses, numbers, and files that it is to write."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import click
import pytest
from click.testing import CliRunner, Result

from deploy.cli import batch, serving
from deploy.cli.console import CONFIGS, progress_printer
from deploy.cli.main import main
from deploy.options import api_key, check_writable, server_url
from deploy.run.demo import Service
from speculative.errors import ConfigError


def truespec(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environment)


@pytest.mark.parametrize(
    ("text", "key"), [("sk-1", "sk-1"), ("sk-1\n", "sk-1"), (" sk-1\r\n", "sk-1"), ("", None), (" \n", None)]
)
def test_a_key_is_read_without_what_is_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str | None
) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    monkeypatch.setenv("TRUESPEC_API_KEY", "another")
    assert api_key(file) == key
    monkeypatch.setenv("TRUESPEC_API_KEY", text)
    assert api_key() == key
    with Service("http://127.0.0.1:9", "model").client as client:
        assert client._http.headers.get("authorization") == (key and f"Bearer {key}")


@pytest.mark.parametrize("text", ["sk-1\nsk-2\n", "sk-1 sk-2", "sk-\u00e9", "sk-\x07"])
def test_a_key_that_no_request_can_carry_is_refused_and_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "key"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--api-key-file .*key holds spaces") as of_file:
        api_key(file)
    monkeypatch.setenv("TRUESPEC_API_KEY", text)
    with pytest.raises(ConfigError, match=r"^TRUESPEC_API_KEY holds spaces") as of_variable:
        Service("http://127.0.0.1:9", "model")
    assert "sk-" not in str(of_file.value) + str(of_variable.value)


def test_a_token_file_that_is_no_text_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("grafana_api")
    file = tmp_path / "token"
    file.write_bytes(b"glsa_\xe9\n")
    reported = truespec("dashboards", "push", "--url", "http://127.0.0.1:9", "--token-file", str(file))
    assert reported.exit_code == 1 and f"--token-file {file} cannot be read" in reported.output


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://a:b", "http://a:70000"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    for right in ("http://host", "https://host:8443/prefix/v1", "http://[::1]:8000/"):
        assert server_url(right, "--url") == right
    with pytest.raises(ConfigError, match=r"^--url .* is not the URL of a server; give http\(s\)://HOST"):
        server_url(url, "--url")


@pytest.mark.parametrize(
    "arguments",
    [
        ["keys", "create", "--file", "k", "--id", "a", "--expires-days", "1e9"],
        ["keys", "create", "--file", "k", "--id", "a", "--expires-days", "inf"],
        ["batch", "in", "out", "--timeout", "nan"],
    ],
    ids=" ".join,
)
def test_a_number_beyond_use_is_refused(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (batch, serving):
        monkeypatch.setattr(module, "served", started)
    reported = truespec(*arguments)
    assert reported.exit_code == 2 and f"Invalid value for '{arguments[-2]}'" in reported.output, reported.output
    assert not list(tmp_path.iterdir())


def started(*_: object, **__: object) -> Never:
    raise AssertionError("the work began")


@contextmanager
def work(*_: object, **__: object) -> Iterator[Any]:
    started()
    yield


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["demo"], "--json"),
        (["watch", "audit", "http://127.0.0.1:9", "--model", "x"], "--json"),
        (["watch", "audit", "http://127.0.0.1:9", "--model", "x"], "--html"),
        (["dashboards", "build"], "--out"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_file_that_cannot_be_written_is_reported_before_the_work(
    arguments: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batch, serving):
        monkeypatch.setattr(module, "served", work)
    monkeypatch.setattr("deploy.watch.audit.run_audit", started)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    path = in_the_way / "out"
    reported = truespec(*arguments, option, str(path))
    assert reported.exit_code == (2 if "audit" in arguments and arguments[0] == "watch" else 1), reported.output
    assert f"{option} {path}" in reported.output and "cannot be written: " in reported.output


@pytest.mark.parametrize(
    "line",
    [f"{command} --help".strip() for command in ("", "serve", "demo", "watch proxy", "batch")]
    + ["serve no.yaml", "demo --config no.yaml"]
    + [f"{command} {file}.yaml" for command in ("serve", "config check", "config show") for file in ("bad", "list")],
)
def test_a_first_line_waits_for_no_large_library(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- a")
    code = (
        "import atexit, sys; atexit.register(lambda: print('loaded', *sys.modules)); from deploy.cli.main import main"
    )
    command = [sys.executable, "-c", f"{code}; main(sys.argv[1:])", *line.split()]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert "Error: " in ran.stderr or "Usage: " in ran.stdout
    loaded = set(ran.stdout.rpartition("loaded ")[2].split())
    assert "click" in loaded and not loaded & {"torch", "ray", "transformers", "huggingface_hub", "fastapi"}


@pytest.mark.parametrize("group", [[], ["config"], ["keys"], ["model"], ["dashboards"], ["watch"]])
def test_a_list_of_commands_has_a_whole_line_for_each_and_a_mistyped_one_its_near_one(group: list[str]) -> None:
    command, names = main, list(main.list_commands(click.Context(main)))
    if group:
        command = main.get_command(click.Context(main), group[0])
        names = list(command.commands)
    lines = truespec(*group, "--help").output.splitlines()
    for name in names:
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"  {name} ")]
        assert lines[at].endswith(".") and "..." not in lines[at], lines[at : at + 2]
        assert f"Did you mean {name}" in truespec(*group, f"{name}s").output


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    check_writable(None, "--json")
    check_writable(tmp_path / "new" / "file", "--json")
    assert not list((tmp_path / "new").iterdir())
    there = tmp_path / "there"
    there.write_text("old")
    check_writable(there, "--json")
    assert there.read_text() == "old"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe, "--json")  # and does not wait for a reader


def test_what_is_printed_keeps_its_brackets_and_colons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / ("a[b]:smile:" + "long" * 30 + ".yaml")
    file.write_text((CONFIGS / "demo.yaml").read_text())
    assert truespec("config", "check", str(file), "--file-only").output == f"{file}: fine\n"
    progress_printer()("loading [bold]x[/bold] :smile:")
    assert "loading [bold]x[/bold] :smile:" in capsys.readouterr().err
    keys = tmp_path / "[k].yaml"
    made = truespec("keys", "create", "--file", str(keys), "--id", "a")
    revoked = truespec("keys", "revoke", "--file", str(keys), "a")
    assert f"{keys}: added the key a" in made.output and f"{keys}: the key a was revoked" in revoked.output
