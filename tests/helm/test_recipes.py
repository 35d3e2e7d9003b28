"""Configurations that come with truespec: what their values install is what the file says."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from deploy.cli.console import CONFIGS
from deploy.cli.main import main
from serve_app.config.app_config import AppConfig
from serve_app.config.files import load_config, parse_args
from tests.support.chart import MINIMAL, Object, config_check_here, merged, one, ray_pods, serve_config, template
from tools.chart import ROOT

RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))


def command_of(recipe: Path) -> tuple[list[str], list[str]]:
    """The words of truespec and of helm in the comment that says how a recipe is installed."""
    text = recipe.read_text().replace("\\\n#", "")
    (line,) = re.findall(r"^#   (truespec config values .+)$", text, re.MULTILINE)
    ours, theirs = line.split(" | ")
    return shlex.split(ours), shlex.split(theirs)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_command_of_a_recipe_installs_what_the_file_says(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (_, *words), (helm, install, name, chart, *options) = command_of(recipe)
    assert (helm, install, options[:2]) == ("helm", "install", ["-f", "-"])
    printed = CliRunner().invoke(main, words)
    assert printed.exit_code == 0, printed.output
    objects = template(yaml.safe_load(printed.output), *options[2:], name=name, chart=Path(chart))
    said, installed = said_and_installed(recipe, objects, tmp_path)
    for name in said.pool_names:
        pool, made = said.pool(name), installed.pool(name)
        assert (made.num_cpus, made.num_gpus) == (pool.num_cpus, pool.num_gpus)
        (container, *_) = ray_pods(objects)[name]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(int(pool.num_gpus))


SHIPPED = sorted(CONFIGS.glob("*.yaml"))
WITHOUT_A_FORM = {
    "own": "model.source is ./my-model, a folder of this machine",
    "vllm": "vLLM on CPUs has no form in the",
}


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.stem)
def test_the_values_of_a_configuration_install_what_it_says_or_it_says_that_there_are_none(
    config: Path, tmp_path: Path
) -> None:
    printed = CliRunner().invoke(main, ["config", "values", config.stem])
    if config.stem in WITHOUT_A_FORM:
        assert printed.exit_code == 1
        assert WITHOUT_A_FORM[config.stem] in " ".join(printed.output.split())
        return
    objects = template(merged({"image": MINIMAL["image"]}, yaml.safe_load(printed.output)))
    said, _ = said_and_installed(config, objects, tmp_path)
    for name in said.pool_names:
        (fetcher,) = ray_pods(objects)[name]["spec"]["initContainers"]
        assert fetcher["args"] == [said.model.source]


def said_and_installed(file: Path, objects: list[Object], folder: Path) -> tuple[AppConfig, AppConfig]:
    """A file and what a render has of it, which both pass the chart's check and differ in their pools at most."""
    said = load_config(file).application.effective_args
    installed = parse_args(serve_config(objects)["applications"][0]["args"])
    assert installed.model_dump(exclude={"pools"}) == said.model_dump(exclude={"pools"})
    status, output = config_check_here(one(objects, "Job"), folder)
    assert status == 0, output
    return said, installed
