"""`python -m tools.bench`: engines side by side."""

from pathlib import Path
from typing import Any

import click

from deploy.cli.console import Failure, MainCommand, a_file, err, out
from deploy.reports.progress import View
from tools.bench.command import BenchOptions, run_command


@click.command(cls=MainCommand)
@click.option(
    "--model", default="smollm2-135m", show_default=True, help="The model: a catalogue name, a folder or a hub id."
)
@click.option(
    "--engines",
    help="Measure these: family/variant[:option=value]..., separated by commas. The default is all installed ones.",
)
@click.option(
    "--kinds",
    default="chat,code,summarise",
    show_default=True,
    help="Use these kinds of prompts; 1000-tokens are prompts of that length.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Read prompts from this JSON file: a list per kind.")
@click.option("--streams", default="1,4,16", show_default=True, help="Answer this many prompts at once.")
@click.option("--temperatures", default="0,1", show_default=True, help="Measure at these temperatures.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Measure every engine this many times."
)
@click.option(
    "--tokens", type=click.IntRange(min=2), default=96, show_default=True, help="Generate this many tokens per answer."
)
@click.option(
    "--threads",
    help="CPU threads of every engine; the default is all cores. With several (1,2) each engine is measured with each.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Data type of the engines.",
)
@click.option("--against", help="Compare with the best of these engines; the default is the first one.")
@click.option(
    "--measure",
    type=click.Choice(["decode", "whole", "first-token", "prefix-hit"]),
    default="decode",
    show_default=True,
    help="Count tokens a second after the first token, or of the whole batch; or the prompts' until the first token, "
    "where they are new, or were answered just before.",
)
@click.option("--together", is_flag=True, help="Run truespec's engines in one process, on one copy of the weights.")
@click.option("--gpu", is_flag=True, help="Run truespec's engines on a GPU.")
@click.option("--head", help="A trained head, for eagle3 and dynamic.")
@click.option("--draft-model", help="A draft model, for draft_model.")
@click.option(
    "--gguf",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The model as a GGUF file, for llama.cpp.",
)
@click.option("--vllm-python", help="The Python interpreter of the environment that has vllm.")
@click.option("--llama-python", help="The Python interpreter of the environment that has llama-cpp-python.")
@click.option("--json", "json_file", type=a_file, help="Write every sample to this file.")
@click.option("--markdown", type=a_file, help="Put the tables into this page.")
@click.option("--section", default="benchmark", show_default=True, help="Replace this section of the page.")
@click.option(
    "--noisy", is_flag=True, help="Write the page even though other processes use this machine, and say so there."
)
def main(**options: Any) -> None:
    """Measure engines side by side: same model, prompts and sampling, in turns."""
    found = run_command(BenchOptions(**options), View(err), out)
    if not found.samples:
        raise Failure("Nothing was measured; the lines above say why.")


if __name__ == "__main__":
    main()
