"""The application that serves a model given on the command line, without a configuration file."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from speculative.config import KINDS_WITH_WEIGHTS, drafter_kinds
from speculative.errors import ConfigError

BASE = Path(__file__).parents[1] / "configs" / "own.yaml"

_MOST_SEQUENCES = ((1, 64), (20, 32), (60, 64), (math.inf, 128))  # on a GPU with less GiB than this
_CPUS_BESIDE_A_GPU = 4


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model and where it is to run; whatever else there is to set is own.yaml's.

    gpus: GPUs to compute on: a replica on each, or with vLLM one replica over all of them; None = one where this
        machine has any.
    """

    source: str  # a folder, a catalogue name, or a hub id
    gpus: int | None = None
    drafter: str | None = None  # KIND, or KIND:SOURCE for a drafter with weights; None = own.yaml's
    engine: str = "torch"  # torch or vllm


def settings_of(own: OwnModel) -> Any:
    """The settings of a file that serves a model, not yet checked. Raises ConfigError: what was given is wrong or does
    not go together; the message names the flag."""
    if not own.source.strip():  # as of a variable that a shell does not know
        raise ConfigError("The model is empty; give a folder, or a hub id (ORG/MODEL).")
    data = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    args: dict[str, Any] = data["applications"][0]["args"]
    args["model"] = {"source": _absolute(own.source)}
    args["engine"]["kind"] = own.engine
    if own.drafter is not None:
        args["drafter"] |= _drafter(own.drafter)
        if own.engine == "vllm" and args["drafter"]["kind"] == "suffix":
            args["drafter"]["length"] = "static"  # vLLM drafts as far as a match promises
    pool = args["pools"]["monolith"]
    gpus, there = own.gpus, tuple[int, ...]()
    if gpus != 0:
        from deploy.run.machine import Machine  # torch

        there = Machine.here().gpu_bytes
        gpus = min(1, len(there)) if gpus is None else gpus
    if own.engine == "vllm":
        pool["num_gpus"] = gpus
        if gpus > 1:
            args["vllm"] = {"engine_args": {"tensor_parallel_size": gpus}}
    elif gpus:
        pool |= {"replicas": gpus, "num_gpus": 1}
    if gpus:
        args["engine"] |= sizes_on_a_gpu(min(there, default=0))
    pool["num_cpus"] = _CPUS_BESIDE_A_GPU if gpus else os.cpu_count() or 1
    return data


def sizes_on_a_gpu(num_bytes: int) -> dict[str, int]:
    """Sizes of steps on a GPU of so much memory; 0 = unknown. The fewer sequences, the more is left for their cache."""
    most = next(most for gib, most in _MOST_SEQUENCES if num_bytes < gib * 2**30)
    return {"max_num_seqs": most, "max_batched_tokens": 2048}


def _absolute(source: str) -> str:
    """A folder by a path that replicas find from wherever they run; any other source as it is."""
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def _drafter(given: str) -> dict[str, Any]:
    kind, _, source = given.partition(":")
    if kind not in drafter_kinds():
        raise ConfigError(f"--drafter {given}: the kinds are {', '.join(drafter_kinds())}; give KIND or KIND:SOURCE.")
    if kind in KINDS_WITH_WEIGHTS and not source:
        raise ConfigError(f"--drafter {given}: {kind} drafters have weights; give {kind}:FOLDER or {kind}:HUB-ID.")
    if source and kind not in KINDS_WITH_WEIGHTS:
        raise ConfigError(f"--drafter {given}: only {', '.join(KINDS_WITH_WEIGHTS)} take weights; give {kind} alone.")
    return {"kind": kind} | ({"model": _absolute(source)} if source else {})
