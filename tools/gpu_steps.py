"""Steps of engines with random weights, in the shapes of real models, beside the bytes that they must read.

    python -m tools.gpu_steps machine
    python -m tools.gpu_steps steps SHAPE...      SHAPE: tiny, 135m, 8b
    python -m tools.gpu_steps profile SHAPE...
    python -m tools.gpu_steps host SHAPE...
    python -m tools.gpu_steps prompts SHAPE...

No model is needed. Without a GPU the CPU computes, which shows that the commands work, and nothing else.
"""

import cProfile
import dataclasses
import functools
import pstats
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from serve_app.versions import version_of
from speculative.assembly import Assembly
from speculative.config import KINDS_WITH_WEIGHTS, DrafterConfig, EngineConfig
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.engine import EngineCore
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head
from speculative.model.rotary import Rope
from speculative.request import Request, SamplingParams

_LLAMA: dict[str, Any] = {"architecture": "LlamaForCausalLM", "rms_norm_eps": 1e-5}
_SMALL = {"num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "tie_word_embeddings": True}
_LARGE = {"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
_TINY = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512},
    "135m": _SMALL
    | {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192},
    "8b": _LARGE
    | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192},
}
_STEPS = 40
_WARM_STEPS = 6
_DRAFTED_TOKENS = 32000  # of a head's vocabulary, as heads for Llama 3 have them


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of a context each. drafter: a kind without weights, or `eagle3` for a head with random ones; params: of
    every request, beside the defaults."""

    streams: int
    context: int
    drafter: str
    params: dict[str, Any]


def loads(shape: str) -> list[Load]:
    """The loads that a shape is measured with."""
    greedy: dict[str, Any] = {"temperature": 0.0}
    if shape == "tiny":
        return [Load(2, 64, "none", {}), Load(2, 64, "ngram", greedy), Load(2, 64, "eagle3", {})]
    alone = [Load(1, 256, "none", {}), Load(1, 256, "none", {"top_p": 0.9}), Load(1, 256, "ngram", greedy)]
    many = [Load(streams, context, "none", {}) for streams, context in ((16, 256), (64, 256), (64, 1500))]
    many += [Load(64, 256, "none", {"top_p": 0.9}), Load(64, 256, "ngram", greedy)]
    heads = [Load(streams, 256, "eagle3", params) for streams in (1, 64) for params in ({}, {"top_p": 0.9})]
    return [*alone, *many, *heads]


def make_decoder(shape: str, device: torch.device) -> Decoder:
    """A decoder with random weights."""
    config = ModelConfig(**_LLAMA, **SHAPES[shape], rope=Rope.plain(5e5, SHAPES[shape]["head_dim"]), eos_token_ids=(2,))
    decoder = Decoder(config, dtype=torch.bfloat16, device=device).eval()
    torch.manual_seed(0)
    _fill_randomly(decoder)
    return decoder


def make_head(decoder: Decoder) -> Eagle3DraftModel:
    """A head with random weights for such a decoder."""
    target = decoder.config
    drafted = torch.arange(min(_DRAFTED_TOKENS, target.vocab_size), device=decoder.device)
    config = Eagle3Config(
        shape=dataclasses.replace(target, num_layers=1, tie_word_embeddings=False),
        draft_vocab_size=len(drafted),
        target_hidden_size=target.hidden_size,
        aux_layers=tuple(range(min(3, target.num_layers))),
    )
    head = Eagle3Head(config, drafted, decoder.embedding, dtype=torch.bfloat16).eval()
    _fill_randomly(head)
    return Eagle3DraftModel(head, fingerprint="")


def _fill_randomly(network: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02)


def start(decoder: Decoder, load: Load) -> EngineCore:
    """An engine in which all streams decode."""
    model, on_gpu = decoder.config, decoder.device.type == "cuda"
    head = make_head(decoder) if load.drafter in KINDS_WITH_WEIGHTS else None
    drafter = DrafterConfig(kind=load.drafter, model=None if head is None else "random", num_draft_tokens=3)
    config = EngineConfig(
        dtype="bfloat16",
        device=str(decoder.device),
        max_num_seqs=load.streams,
        drafter=drafter,
        max_batched_tokens=max(2048, load.streams * 4),
        kv_cache_tokens=max(load.streams * 2048, 8192) if on_gpu else 4096,
        prefix_caching=False,
    )
    engine = EngineCore(Assembly(decoder, model, config, draft_model=head))
    longest = min(800, model.max_position_embeddings - load.context - 8)
    params = SamplingParams(max_tokens=longest, ignore_eos=True, **load.params)
    random = torch.Generator().manual_seed(0)
    for number in range(load.streams):
        tokens = torch.randint(3, model.vocab_size, (load.context,), generator=random).tolist()
        engine.add(Request(f"stream-{number}", tuple(tokens), params, seed=number))
    decoding = set[str]()
    while len(decoding) < load.streams:
        decoding |= {delta.request_id for delta in engine.step() if delta.token_ids}
    for _ in range(_WARM_STEPS):
        engine.step()
    return engine


def floor_s(decoder: Decoder, load: Load, bytes_per_s: float) -> float:
    """Seconds in which the weights and the keys and values in use can be read at all."""
    model = decoder.config
    weights = sum(parameter.numel() for parameter in decoder.parameters())
    weights -= 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size  # rows of it are looked up
    cache = load.streams * load.context * model.num_layers * 2 * model.num_kv_heads * model.head_dim
    return 2 * (weights + cache) / bytes_per_s


def copied_bytes_per_s(device: torch.device) -> float:
    """Return the speed of a copy, counted both ways."""
    source = torch.ones(1 << (29 if device.type == "cuda" else 24), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def seconds(function: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """The mean time of a function's work on a device."""
    for _ in range(3):
        function()
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _multiply(hidden: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [functional.linear(hidden, weight) for weight in weights]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@click.group()
def main() -> None:
    """Measure steps of engines with random weights."""


@main.command()
def machine() -> None:
    """Say what this machine is, and what its memory and its products reach."""
    device = _device()
    packages = ("torch", "triton", "transformers", "numpy", "truespec")
    versions = ", ".join(f"{name} {version_of(name)}" for name in packages)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    click.echo(f"{name}; Python {sys.version.split()[0]}, {versions}, C compiler {shutil.which('gcc') or 'none'}")
    click.echo(f"copy: {copied_bytes_per_s(device) / 1e12:.2f} TB/s")
    outputs, inputs = (28672, 4096) if device.type == "cuda" else (256, 256)
    weights = [torch.ones((outputs, inputs), dtype=torch.bfloat16, device=device) for _ in range(4)]  # out of the cache
    for rows in (1, 2, 4, 8, 16, 64, 128, 256):
        hidden = torch.ones((rows, inputs), dtype=torch.bfloat16, device=device)
        took = seconds(functools.partial(_multiply, hidden, weights), device) / len(weights)
        speed = weights[0].nbytes / took / 1e12
        click.echo(f"product {rows} x {inputs} -> {outputs}: {took * 1e6:.0f} us, {speed:.2f} TB/s")


@main.command()
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
def steps(shapes: tuple[str, ...]) -> None:
    """Measure steps beside the least time that their bytes take."""
    device = _device()
    bytes_per_s = copied_bytes_per_s(device)
    for shape in shapes:
        decoder = make_decoder(shape, device)
        for load in loads(shape):
            engine, times = start(decoder, load), list[float]()
            _wait(device)
            host = time.thread_time()
            for _ in range(_STEPS):
                began = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - began)
            host = (time.thread_time() - host) / _STEPS
            median, floor = sorted(times)[_STEPS // 2], floor_s(decoder, load, bytes_per_s)
            click.echo(
                f"{shape} {load.streams} x {load.context} {load.drafter} {load.params or ''}: {median * 1e3:.2f} ms, "
                f"CPU time of the thread {host * 1e3:.2f} ms, floor {floor * 1e3:.3f} ms, {floor / median:.0%} of it"
            )


@main.command("profile")
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
def profile_steps(shapes: tuple[str, ...]) -> None:
    """Show the time of each kernel in eight steps."""
    device = _device()
    on_gpu = device.type == "cuda"
    for shape in shapes:
        decoder = make_decoder(shape, device)
        for load in _profiled(shape):
            engine = start(decoder, load)
            with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
                for _ in range(8):
                    engine.step()
                _wait(device)
            key = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
            click.echo(f"{shape}, {load.streams} x {load.context}, {load.drafter}, 8 steps")
            click.echo(found.key_averages().table(sort_by=key, row_limit=28, max_name_column_width=60))


@main.command()
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
def host(shapes: tuple[str, ...]) -> None:
    """Show the host's functions in which most of a step's time passes."""
    device = _device()
    for shape in shapes:
        decoder = make_decoder(shape, device)
        for load in _profiled(shape):
            engine, found = start(decoder, load), cProfile.Profile()
            found.enable()
            for _ in range(_STEPS):
                engine.step()
            found.disable()
            click.echo(f"{shape}, {load.streams} x {load.context}, {load.drafter}, {_STEPS} steps")
            pstats.Stats(found).sort_stats("tottime").print_stats(28)


@main.command()
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)), required=True)
def prompts(shapes: tuple[str, ...]) -> None:
    """Measure the first token of prompts beside the least time that their products take."""
    device = _device()
    size = 8192 if device.type == "cuda" else 512
    square = torch.ones((size, size), dtype=torch.bfloat16, device=device)
    operations_per_s = 2 * size**3 / seconds(lambda: square @ square, device)
    for shape in shapes:
        decoder = make_decoder(shape, device)
        engine = start(decoder, Load(1, 64, "none", {}))
        engine.abort("stream-0")
        for length in (64, 256) if shape == "tiny" else (256, 1024, 4096):
            times = sorted(_first_token_s(engine, length) for _ in range(5))
            layers = sum(parameter.numel() for parameter in decoder.layers.parameters())
            floor = 2 * layers * length / operations_per_s
            click.echo(
                f"{shape} prompt of {length}: {times[2] * 1e3:.1f} ms, floor {floor * 1e3:.1f} ms, "
                f"{floor / times[2]:.0%} of it"
            )


def _first_token_s(engine: EngineCore, length: int) -> float:
    tokens = torch.randint(3, engine.model.vocab_size, (length,)).tolist()
    _wait(engine.device)
    began = time.perf_counter()
    engine.add(Request("prompt", tuple(tokens), SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def _profiled(shape: str) -> list[Load]:
    filtered = {"top_p": 0.9}
    if shape == "tiny":
        return [Load(2, 64, "none", filtered)]
    plain = [Load(streams, context, "none", filtered) for streams, context in ((1, 256), (64, 1500))]
    return [*plain, Load(1, 256, "eagle3", filtered), Load(64, 256, "eagle3", filtered)]


if __name__ == "__main__":
    main()
