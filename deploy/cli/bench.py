"""`truespec bench` and `truespec bench-handoff`."""

from pathlib import Path
from typing import Any

import click

from deploy.cli.console import Failure, a_file, err, out, say
from deploy.options import check_writable, write_json
from deploy.reports.progress import View


@click.command()
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
@click.option("--streams", help="Answer this many prompts at once.  [default: 1,4,16; with --gpu 1,4,16,64]")
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
@click.option("--profile", is_flag=True, help="Show where the time of truespec's steps goes.")
@click.option("--together", is_flag=True, help="Run truespec's engines in one process, on one copy of the weights.")
@click.option(
    "--own-tools",
    is_flag=True,
    help="Compare vllm and llama.cpp with their own benchmark tools; fail if they are slower here.",
)
@click.option(
    "--gpu",
    is_flag=True,
    help="Run truespec's engines on a GPU: off, n-gram, the head; with CUDA graphs and without.",
)
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
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="Draw PNG and SVG plots here.")
@click.option(
    "--noisy", is_flag=True, help="Write the page even though other processes use this machine, and say so there."
)
def bench(**options: Any) -> None:
    """Measure engines side by side: same model, prompts and sampling, in turns."""
    from deploy.bench.command import BenchOptions, run_command

    found = run_command(BenchOptions(**options), View(err), out)
    if not found.samples:
        raise Failure("Nothing was measured; the lines above say why.")
    slower = [f"{one.engine} ({one.case}): {one.share:.2f}" for one in found.own_tools if not one.fair]
    if slower:
        raise Failure(
            f"Slower here than by their own benchmark tools, so the bench handicaps them: {'; '.join(slower)}. "
            "Measure again on a quiet machine; if that stays so, do not publish these figures."
        )


@click.command("bench-handoff")
@click.option("--mib", type=click.IntRange(min=1), default=300, show_default=True, help="Size of a handoff in MiB.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Send this many handoffs each way."
)
@click.option(
    "--transports",
    default="plasma",
    show_default=True,
    help="Values of handoff.transport to measure, separated by commas.",
)
@click.option("--json", "json_file", type=a_file, help="Write the figures to this file.")
def bench_handoff(mib: int, rounds: int, transports: str, json_file: Path | None) -> None:
    """Measure how fast handoffs travel between processes, compared with shared memory itself."""
    from deploy.bench.handoff import bench_on_ray

    check_writable(json_file, "--json")
    with View(err) as view:
        view.stage(f"handing {mib} MiB over, {rounds} rounds of {transports}")
        found = bench_on_ray(mib * 2**20, [name.strip() for name in transports.split(",")], rounds)
    for name, way in found["ways"].items():
        say(
            f"{name}: {1e3 * way['median_s']:.1f} ms, {way['gb_per_s']:.2f} GB/s, "
            f"{way['share_of_reference']:.2f} of the reference"
        )
    write_json(json_file, found, indent=1)


@click.command("bench-proxy")
@click.option(
    "--requests",
    type=click.IntRange(min=10),
    default=500,
    show_default=True,
    help="Send this many of each kind each way.",
)
@click.option("--json", "json_file", type=a_file, help="Write the figures to this file.")
def bench_proxy(requests: int, json_file: Path | None) -> None:
    """Measure what the proxy of `truespec watch` adds to a request's time, watched and unwatched."""
    from deploy.bench.proxy import added_latency

    check_writable(json_file, "--json")
    with View(err) as view:
        view.stage(f"sending {requests} requests of each kind straight and through the proxy")
        found = added_latency(requests)
    for name, way in found.items():
        added = f"{way['added']:+.2f} ms by the proxy, {way['added_p90']:+.2f} at the 90th percentile"
        say(f"{name}: {way['straight']:.2f} ms straight, {added}")
    write_json(json_file, found, indent=1)
