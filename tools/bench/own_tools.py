"""Checks that the bench is fair to others: on the same prompts each is as fast here as its own benchmark tool says."""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from serve_app.text.tokenizer import Tokenizer
from tools.bench.engines import LLAMA, VLLM, Launch, LeftOut
from tools.bench.plan import BenchCase, BenchPlan
from tools.bench.process import EngineFailed, EngineProcess, engine_environment
from tools.bench.workers.channel import BatchOfPrompts

LEAST_SHARE = 0.9
"""Least share of the figure of an engine's own tool; below it, the bench handicaps the engine."""

_ROUNDS = 3  # of the bench's worker and the tool, in turns
_LLAMA_TOOL = "llama-batched-bench"

# `vllm bench throughput` without the command line around it, which does not start in the CPU build.
_VLLM_TOOL = """
from vllm.benchmarks.throughput import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True, slots=True)
class ToolSpeed:
    """Tokens a second of one engine: by this bench, and by the engine's own tool. Medians of rounds taken in turns."""

    engine: str
    case: BenchCase
    here: float
    own: float

    @property
    def share(self) -> float:
        """The bench's part of what the tool reports."""
        return self.here / self.own

    @property
    def fair(self) -> bool:
        """Return whether the engine is about as fast here as its own tool has it."""
        return self.share >= LEAST_SHARE

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "engine": self.engine,
            **asdict(self.case),
            "tokens_per_s": self.here,
            "own_tool_tokens_per_s": self.own,
        }


@dataclass(frozen=True, slots=True)
class _Tool:
    """An engine's own benchmark program.

    temperature: at which it samples.
    tokens: field of a worker's samples that it counts as tokens.
    seconds: field of a worker's samples that it counts as time.
    run: returns the tokens a second that it reports, of these prompts and with so many streams.
    """

    temperature: float
    tokens: str
    seconds: str
    run: Callable[[Sequence[Sequence[int]], int], float]


def compare_with_own_tools(
    plan: BenchPlan, launches: Sequence[Launch], engines: Mapping[str, EngineProcess], folder: Path
) -> tuple[list[ToolSpeed], list[LeftOut]]:
    """Measure each other engine's worker and its own tool in turns, for all kinds of prompts and numbers of streams.

    Args:
        plan: what is measured.
        launches: how the engines were started.
        engines: the processes that are alive.
        folder: for the tools' input and output.

    Returns:
        The speeds, and the engines that have no tool here, or whose tool failed, with the reason.
    """
    found: list[ToolSpeed] = []
    left_out: list[LeftOut] = []
    for launch in launches:
        if launch.name.family not in (LLAMA, VLLM) or launch.name.text not in engines:
            continue
        tool = (_llama_tool if launch.name.family == LLAMA else _vllm_tool)(plan, launch, folder)
        if isinstance(tool, LeftOut):
            left_out.append(tool)
            continue
        try:
            for kind, streams in product(plan.prompts, plan.streams):
                case = BenchCase(kind, streams, tool.temperature)
                found.append(_compare(plan, case, tool, launch.name.text, engines[launch.name.text]))
        except EngineFailed as error:
            left_out.append(LeftOut(launch.name.text, f"its own tool failed: {error}"))
    return found, left_out


def _compare(plan: BenchPlan, case: BenchCase, tool: _Tool, name: str, engine: EngineProcess) -> ToolSpeed:
    here, own = [], []
    num_batches = max(1, len(plan.prompts[case.kind]) // case.streams)
    batches = [plan.round_prompts(case, number) for number in range(num_batches)]
    for number in range(_ROUNDS):
        asks = [BatchOfPrompts(batch, plan.tokens, case.temperature, number + 1, engine=name) for batch in batches]
        samples = [engine.run(ask) for ask in asks]
        here.append(sum(one[tool.tokens] for one in samples) / sum(one[tool.seconds] for one in samples))
        own.append(tool.run([prompt for batch in batches for prompt in batch], case.streams))
    return ToolSpeed(name, case, median(here), median(own))


def _vllm_tool(plan: BenchPlan, launch: Launch, folder: Path) -> _Tool:
    """`vllm bench throughput`: the same prompts, as text, at T = 1; the time of the whole, prompts included."""
    tokenizer = Tokenizer.from_folder(plan.model)
    llm = launch.settings["llm"]
    flags = [f"--{name.replace('_', '-')}={llm[name]}" for name in ("model", "dtype", "max_model_len", "seed")]
    flags += ["--enforce-eager"] if llm["enforce_eager"] else []
    if "speculative_config" in llm:
        flags.append(f"--speculative-config={json.dumps(llm['speculative_config'])}")
    questions, report = folder / "prompts.json", folder / "own-tool.json"

    def run(prompts: Sequence[Sequence[int]], streams: int) -> float:
        texts = [tokenizer.decode(prompt, skip_special=False) for prompt in prompts]
        turns = [{"conversations": [{"value": text}, {"value": ""}]} for text in texts]
        questions.write_text(json.dumps(turns), encoding="utf-8")
        source = ["--dataset-name=sharegpt", f"--dataset-path={questions}", f"--output-len={plan.tokens}"]
        counts = [f"--num-prompts={len(texts)}", f"--num-warmups={min(streams, len(texts))}", "--no-oversample"]
        limits = [f"--max-num-seqs={streams}", "--no-enable-prefix-caching", "--disable-detokenize"]
        command = [launch.python, "-c", _VLLM_TOOL, *flags, *source, *counts, *limits]
        _run([*command, f"--output-json={report}"], launch, folder)
        measured = json.loads(report.read_text(encoding="utf-8"))
        num_tokens = sum(map(len, prompts)) + plan.tokens * len(prompts)
        if measured["total_num_tokens"] != num_tokens:
            raise EngineFailed(f"it read {measured['total_num_tokens']} tokens, not the {num_tokens} of these prompts.")
        return float(plan.tokens * len(prompts) / measured["elapsed_time"])

    return _Tool(1.0, "num_tokens", "wall_s", run)


def _llama_tool(plan: BenchPlan, launch: Launch, folder: Path) -> _Tool | LeftOut:
    """`llama-batched-bench`: random tokens, as many as the prompts have in the mean, and no sampling; the time of
    decoding."""
    if launch.settings["k"] is not None:
        return LeftOut(launch.name.text, "llama.cpp's own tool has no prompt lookup: not compared with it")
    beside = str(Path(launch.python).parent)
    program = shutil.which(_LLAMA_TOOL) or shutil.which(_LLAMA_TOOL, path=beside)
    if program is None:
        why = f"{_LLAMA_TOOL} is neither on PATH nor in {beside}: not compared with it; build it from llama.cpp"
        return LeftOut(launch.name.text, why)

    def run(prompts: Sequence[Sequence[int]], streams: int) -> float:
        length = round(fmean(map(len, prompts)))
        context = streams * (-(-plan.max_model_len // 256) * 256)
        size = ["-c", str(context), "-npp", str(length), "-ntg", str(plan.tokens), "-npl", str(streams)]
        threads = ["-t", str(launch.threads), "-tb", str(launch.threads)]
        command = [program, "-m", launch.settings["gguf"], *size, *threads, "--output-format", "jsonl"]
        lines = [json.loads(line) for line in _run(command, launch, folder).splitlines() if line.startswith("{")]
        if not lines:
            raise EngineFailed(f"{_LLAMA_TOOL} printed no figures.")
        return float(lines[-1]["speed_tg"])

    return _Tool(0.0, "decode_tokens", "decode_s", run)


def _run(command: Sequence[str], launch: Launch, folder: Path) -> str:
    """Return what the tool prints.

    Raises:
        EngineFailed: it ended with an error.
    """
    ran = subprocess.run(command, env=engine_environment(launch, folder), capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise EngineFailed(f"{command[0]} ended with status {ran.returncode}: {last}")
    return ran.stdout
