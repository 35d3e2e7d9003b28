"""The speed of a handoff from one process to another, beside what shared memory itself does.

Two Ray actors on this machine, as a prefill and a decode replica are. The sender has a finished handoff; the clock
stops when its checksum was checked and its bytes lie in the receiver's cache. The reference is Ray's store without us:
put, get and one copy. Rounds go in turns, so that what else the machine does meets all of them.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray
import torch

from deploy.cli.console import a_file, err, say
from deploy.options import check_writable, write_json
from deploy.reports.progress import View
from serve_app.transport.base import TransferPayload
from serve_app.transport.selection import TRANSPORTS, make_transport
from speculative.errors import ConfigError, EngineFault
from speculative.handoff import ComputedTokenState, Manifest, allocate_blob, decode_state, seal
from tools.console import ToolCommand

_REFERENCE = "put, get, copy"
_MANIFEST = Manifest("synthetic", "bfloat16", 36, 8, 128, "raw_logprobs", "none")  # of a model like Qwen3-8B


class HandoffSender:
    """Has handoffs of one size."""

    def __init__(self, num_bytes: int) -> None:
        self._blob = synthetic_handoff(num_bytes)

    def size(self) -> int:
        """Bytes of a handoff."""
        return self._blob.nbytes

    def send(self, transport: str) -> TransferPayload:
        """Export and pack a handoff, as a prefill replica does."""
        return make_transport(transport).pack(self._blob)

    def put(self) -> list[Any]:
        """The reference's first half."""
        return [ray.put(self._blob)]


class Receiver:
    """Has a cache for them."""

    def __init__(self, num_bytes: int) -> None:
        self._cache = np.zeros(num_bytes, np.uint8)  # touched, as a cache in use is

    def take(self, transport: str, payload: TransferPayload) -> None:
        """Unpack, check and copy a handoff, as a decode replica does."""
        handoff = asyncio.run(make_transport(transport).unpack(payload))
        state = decode_state(handoff, _MANIFEST)
        values = state.kv.reshape(-1).view(torch.uint8)
        torch.from_numpy(self._cache)[: len(values)].copy_(values)

    def get(self, refs: list[Any]) -> None:
        """The reference's second half."""
        blob = ray.get(refs[0])
        self._cache[: blob.nbytes] = blob


def synthetic_handoff(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A sealed handoff of about so many bytes; its keys and values are noise."""
    a_token = math.prod(_MANIFEST.kv_shape(1)) * 2
    num_tokens = max(1, num_bytes // a_token)
    state = ComputedTokenState(tuple(range(num_tokens + 1)), num_tokens + 1, 0, torch.empty(0))
    blob, kv = allocate_blob(state, _MANIFEST)
    kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(0)))
    return seal(blob)


def bench_on_ray(num_bytes: int, transports: Sequence[str], rounds: int) -> dict[str, Any]:
    """`measure` on a Ray of its own on this machine.

    Raises:
        ConfigError: there is no such transport.
    """
    if unknown := [name for name in transports if name not in TRANSPORTS]:
        raise ConfigError(f"--transports: there is no {unknown[0]!r}, only {', '.join(TRANSPORTS)}.")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=8 * num_bytes + 2**28)
    try:
        return measure(num_bytes, transports, rounds)
    finally:
        ray.shutdown()


def measure(num_bytes: int, transports: Sequence[str], rounds: int) -> dict[str, Any]:
    """Median seconds and rates, and each transport's rate as a share of the reference's. Ray must be running.

    Raises:
        EngineFault: a way did not bring the bytes over.
    """
    sender = ray.remote(num_cpus=0)(HandoffSender).remote(num_bytes)
    size = ray.get(sender.size.remote())
    receiver = ray.remote(num_cpus=0)(Receiver).remote(size)

    def reference() -> Any:
        return receiver.get.remote(sender.put.remote())

    def through(transport: str) -> Any:
        return receiver.take.remote(transport, sender.send.remote(transport))

    ways: dict[str, Callable[[], Any]] = {_REFERENCE: reference}
    ways |= {name: partial(through, name) for name in transports}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first touches pages that nobody had before
        for name, way in ways.items():
            began = time.perf_counter()
            try:
                ray.get(way(), timeout=120)
            except ray.exceptions.RayError as error:
                raise EngineFault(f"{name}: {error}") from error
            if number:
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": size,
        "rounds": rounds,
        "ways": {
            name: {
                "median_s": medians[name],
                "gb_per_s": size / medians[name] / 1e9,
                "share_of_reference": medians[_REFERENCE] / medians[name],
            }
            for name in ways
        },
    }


@click.command(cls=ToolCommand)
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
def main(mib: int, rounds: int, transports: str, json_file: Path | None) -> None:
    """Measure how fast handoffs travel between processes, compared with shared memory itself."""
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


if __name__ == "__main__":
    main()
