"""The arguments of commands about one application: a model or a file of settings, and settings beside it."""

import atexit
import functools
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
import yaml

from deploy.cli.vllm_flags import ARGS, PAGE, TAKEN, explained, flag_of
from deploy.options import checked_secret
from deploy.run.own_model import OwnModel, settings_of
from deploy.run.what_is import HUB_ID, file_or_model
from serve_app.config.files import check_file, read_yaml
from serve_app.config.serve_file import ServeFile
from speculative.config import WeightsName
from speculative.errors import ConfigError

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


@dataclass(frozen=True, slots=True)
class ServeTarget:
    """Target of a command line: a file of settings or a model of one's own."""

    target: Path | OwnModel
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that were given beside it as flags, by the flag

    @property
    def named(self) -> str:
        """The name of it in messages."""
        return self.target.source if isinstance(self.target, OwnModel) else str(self.target)


class ApplicationCommand(click.Command):
    """A command about one application: its help has groups, and of vLLM's flags it says where their settings are."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, heading by heading; `Options` has those without one."""
        found: dict[str, list[tuple[str, str]]] = {}
        for param in (one for one in self.get_params(ctx) if isinstance(one, click.Option)):
            if (record := param.get_help_record(ctx)) is not None:
                found.setdefault(_HEADINGS.get(param.name or "", "Options"), []).append(record)
        for heading, records in found.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=_COLUMN)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {name for param in self.get_params(ctx) for name in param.opts}
            said = explained(word for word in given if word.startswith("-") and flag_of(word) not in known)
            if error.possibilities and error.option_name not in said:
                raise
            said = said or f"{error.message} --set NAME=VALUE takes any setting, and {PAGE} has vLLM's flags."
            raise click.UsageError(said, ctx) from error
        except click.UsageError as error:
            if "unexpected extra argument" in error.message:
                hint = "; --served-model-name takes one name" if "--served-model-name" in given else ""
                raise click.UsageError(f"{error.message}: give one model or file{hint}.", ctx) from error
            raise


class _Length(click.ParamType[Any]):
    """A number of tokens as vLLM reads it: 32k is 32,000, 32K is 32,768; auto or -1 is as long as there is room."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; auto = as long as there is room."""
        if str(value) in ("auto", "-1"):
            return "auto"
        read = re.fullmatch(r"(\d+)([kmKM]?)|(\d+\.\d+)([kmKM])", str(value))
        if read is None:
            self.fail(f"{value!r} is no number of tokens; give one such as 4096, 32k or 32K, or auto.", param, ctx)
        return int(float(read[1] or read[3]) * _THOUSANDS[read[2] or read[4] or ""])


_COLUMN = 36  # of options in help
_HEADINGS = {
    **dict.fromkeys(("source", "served_model_name", "revision", "max_model_len", "quantization"), "Model"),
    **dict.fromkeys(("drafter", "settings"), "Model"),
    **dict.fromkeys(("engine", "gpus", "address"), "Machine"),
    **dict.fromkeys(("host", "port", "api_key"), "Address"),
}
"""Heading of each option in help, by its parameter."""
_OPTIONS = (
    click.argument("served", type=click.Path(), metavar="MODEL|FILE", required=False),
    click.option("--model", "source", metavar="MODEL", help="The model, where it is not MODEL."),
    click.option("--served-model-name", "--name", metavar="NAME", help="What clients ask for."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub's model."),
    click.option("--max-model-len", type=_Length(), metavar="N", help="Most tokens of a request."),
    click.option("--quantization", "-q", metavar="FORM", help="Form of the weights: fp8, w4a8 ..."),
    click.option("--drafter", metavar="KIND", help="What drafts: ngram, eagle3:FOLDER ..."),
    click.option("--engine", type=click.Choice(["torch", "vllm"]), help="truespec's own engine (torch), or vLLM."),
    click.option("--gpus", type=click.IntRange(min=0), metavar="N", help="GPUs to use; 0 is the CPU."),
    click.option(
        "--set", "settings", metavar="NAME=VALUE", multiple=True, help="Any setting: engine.dtype=float32 ..."
    ),
    click.option("--host", metavar="HOST", help="Listen on this address."),
    click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Listen on this port."),
)


def application_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of a command about one application: it gets them as `asked`, and what they make as `checked`."""

    @functools.wraps(command)
    def with_application(served: str | None, source: str | None, **others: Any) -> Any:
        placed = {name: others.pop(name) for name in ("gpus", "drafter", "engine")}
        placed = {name: value for name, value in placed.items() if value is not None}
        given = {flag: others.pop(flag[2:].replace("-", "_"), None) for flag in TAKEN}
        changes = {flag: value for flag, value in given.items() if value not in (None, ())}
        changes |= dict(map(_setting, others.pop("settings")))
        if served is not None and source is not None:
            raise click.UsageError(f"{served} is given, and --model {source} too; give one of them.")
        if served is None and source is None:
            raise click.UsageError("Give a model (a folder, or a hub id ORG/MODEL) or a file of settings.")
        found = file_or_model(served) if served else source or ""
        if isinstance(found, Path) and placed:
            raise click.UsageError(f"--{next(iter(placed))} goes with a model; {found} has a setting for it.")
        asked = ServeTarget(found if isinstance(found, Path) else OwnModel(found, **placed), changes)
        try:
            return command(asked=asked, checked=application_of(asked), **others)
        except ConfigError as error:
            raise ConfigError(_as_given(str(error), asked, as_values=others.get("as_values", False))) from error

    for option in reversed(_OPTIONS):
        with_application = option(with_application)
    return with_application


def application_of(asked: ServeTarget) -> ServeFile:
    """The checked application of a command line. Raises ConfigError: it cannot be read, or something in it is wrong."""
    data = settings_of(asked.target) if isinstance(asked.target, OwnModel) else read_yaml(asked.target)
    for flag, given in asked.changes.items():
        setting, value = _place_of(flag), given
        if flag == "--max-model-len" and value == "auto":
            value = None
        elif flag == "--quantization" and _get(data, f"{ARGS}.engine.kind") == "vllm":
            setting = f"{ARGS}.vllm.engine_args.quantization"
        elif flag == "--quantization" and value not in get_args(WeightsName):
            raise ConfigError(
                f"--quantization {value}: truespec's engine has {', '.join(get_args(WeightsName))}. Leave it out for "
                "what the checkpoint holds; vLLM's own methods need --engine vllm."
            )
        elif flag == "--revision":
            source = str(_get(data, setting)).partition("@")[0]
            if not HUB_ID.fullmatch(source) or Path(source).is_dir():
                none = f"{source} is no id of a hub, so it has no revisions"
                raise ConfigError(f"--revision {value}: {none}; leave it out.")
            value = f"{source}@{value}"
        elif flag == "--api-key":
            from serve_app.http.access.access import Scope
            from serve_app.http.access.keys import create_key

            folder = Path(tempfile.mkdtemp(prefix="truespec-keys-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            for number, key in enumerate(dict.fromkeys(value), start=1):
                secret = checked_secret(key, "--api-key")
                if secret is None:
                    raise ConfigError("--api-key is empty; give a key, or leave it out to serve without one.")
                create_key(folder / "keys.yaml", f"api-key-{number}", [Scope.USER], secret=secret)
            value = str(folder / "keys.yaml")  # which is gone when this process ends
        section, name = _place(data, setting)
        if isinstance(section, dict):
            section[name] = value
        elif isinstance(data, dict):  # where there are no settings at all, the check below says so
            place = setting.removeprefix(f"{ARGS}.")
            raise ConfigError(f"--set {place}: there is no section of settings that has {name}.")
    return check_file(data, asked.named)


def _as_given(said: str, asked: ServeTarget, *, as_values: bool) -> str:
    """Name in an error flags by their names, a model's settings as --set takes them, and the chart's values as such."""
    for flag in asked.changes:
        setting, called = _place_of(flag), flag.replace("\\", r"\\")
        named = rf"\g<1>{called} ({setting.removeprefix(f'{ARGS}.')}\g<2>): "
        said = re.sub(rf"(^|: ){re.escape(setting)}((?:[.\[][^:\s]*)?): ", named, said, flags=re.MULTILINE)
    if as_values:
        said = re.sub(rf"^{re.escape(asked.named)}: ", "", said, flags=re.MULTILINE)
        said = re.sub(rf"^{re.escape(ARGS)}\.(?!pools)", "config.", said, flags=re.MULTILINE)
        said = re.sub(rf"^{re.escape(ARGS)}\.(pools\.\w+\.)(?:num_(?=[cg]pus))?", r"\1", said, flags=re.MULTILINE)
    return said.replace(f"{ARGS}.", "") if isinstance(asked.target, OwnModel) else said


def _setting(given: str) -> tuple[str, Any]:
    """The flag and the value of --set NAME=VALUE; the value is YAML."""
    name, equals, value = given.partition("=")
    if not equals or not name.strip():
        raise click.UsageError(f"--set {given} has no value; give NAME=VALUE, such as engine.dtype=float32.")
    try:
        return f"--set {name.strip()}", yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise click.UsageError(f"--set {given}: {value!r} is not YAML; put it in quotes.") from error


def _place_of(flag: str) -> str:
    """Where the file has the setting of a flag; --set may leave out the place of the application's arguments."""
    name = flag.removeprefix("--set ")
    of_file = name.partition(".")[0].partition("[")[0] in ServeFile.model_fields
    return TAKEN.get(flag) or (name if of_file else f"{ARGS}.{name}")


def _place(data: Any, setting: str) -> tuple[Any, str]:
    """The section that holds a setting, and the setting's name there; None where there is no such section."""
    *sections, name = re.findall(r"[^.\[\]]+", setting)
    for key in sections:
        if isinstance(data, list):
            data = data[int(key)] if key.isdigit() and int(key) < len(data) else None
        elif isinstance(data, dict):
            data[key] = data.get(key) or {}
            data = data[key]
    return data, name


def _get(data: Any, setting: str) -> Any:
    section, name = _place(data, setting)
    return section.get(name) if isinstance(section, dict) else None
