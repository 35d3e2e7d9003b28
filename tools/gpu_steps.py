"""Engines with random weights in the shapes of real models, measured beside the bytes that they must read.

    python -m tools.gpu_steps PART... [--shape SHAPE]      SHAPE: 8b or tiny

Each figure is a line, printed at once; the first line names the machine, the day and the commit. Without a GPU the CPU
computes, which shows that the commands work and nothing else; `attention` then needs Triton's interpreter.
"""

import dataclasses
import functools
import gc
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor, nn

from speculative.assembly import Assembly
from speculative.config import KINDS_WITH_WEIGHTS, DrafterConfig, EngineConfig
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head
from speculative.model.formats import Format
from speculative.model.formats.fp8 import FORMAT
from speculative.model.fp8 import E4M3, quantize_rows
from speculative.request import Request, SamplingParams, TokenDelta
from tools.bench.workers.channel import BatchOfPrompts
from tools.provenance import mark

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5}
_LLAMA |= {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": _HEADS | {"num_hidden_layers": 32, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    "tiny": _TINY_HEADS | {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96},
}
"""A config.json's fields beside Llama's own."""
_STEPS = 30
_DRAFTED_TOKENS = 32000  # of a head's vocabulary, as heads for Llama 3 have them
_GREEDY = {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of a context each; an `eagle3` head has random weights. drafts: at most, of a round."""

    streams: int
    context: int
    drafter: str = "none"
    params: dict[str, Any] = field(default_factory=dict)
    drafts: int = 3


def loads(shape: str) -> list[Load]:
    """The loads that a shape is measured with."""
    if shape == "tiny":
        return [Load(2, 40), Load(2, 40, "ngram", _GREEDY), Load(2, 40, "eagle3")]
    plain = [Load(*one) for one in ((1, 256), (16, 256), (64, 256), (64, 1500), (256, 256))]
    filtered = [Load(streams, 256, params={"top_p": 0.9}) for streams in (1, 64)]
    heads = [Load(streams, 256, "eagle3") for streams in (1, 16, 64)]
    lookups = [Load(64, 256, "ngram", params, 4) for params in ({}, _GREEDY)]  # what `truespec serve` drafts by default
    return [*plain, *filtered, *heads, *lookups]


_MANY = Load(64, 256)
_FOUR_TOKENS = SamplingParams(max_tokens=4, ignore_eos=True)


def make_decoder(shape: str, device: torch.device, weights: Format | None = None) -> Decoder:
    """A decoder with random weights, in a format."""
    config = ModelConfig.from_json(_LLAMA | SHAPES[shape])
    decoder = Decoder(config, weights=weights, dtype=torch.bfloat16, device=device).eval()
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
        own = dict(network.named_parameters())
        for name, parameter in own.items():
            if parameter.dtype == E4M3:
                values = torch.zeros(parameter.shape, dtype=torch.bfloat16, device=parameter.device).normal_(0, 0.02)
                for part, found in zip((name, f"{name}_scale"), quantize_rows(values), strict=True):
                    own[part].copy_(found)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif not name.endswith("weight_scale"):
                parameter.normal_(0, 0.02)


def make_engine(decoder: Decoder, load: Load, *, spare: int = 0) -> EngineCore:
    """An engine for the streams of a load, and `spare` others."""
    head = make_head(decoder) if load.drafter in KINDS_WITH_WEIGHTS else None
    model = None if head is None else "random"
    drafter = DrafterConfig(kind=load.drafter, model=model, num_draft_tokens=load.drafts)
    on_gpu, num_seqs = decoder.device.type == "cuda", load.streams + spare
    config = EngineConfig(
        dtype="bfloat16",
        device=str(decoder.device),
        max_num_seqs=num_seqs,
        drafter=drafter,
        max_batched_tokens=max(2048 if on_gpu else 64, num_seqs * (1 + load.drafts)),
        kv_cache_tokens=max(num_seqs * 2304, 16384) if on_gpu else 4096,
        prefix_caching=False,
    )
    return EngineCore(Assembly(Weights(decoder, draft_model=head), config))


def request_of(engine: EngineCore, name: str, length: int, params: SamplingParams, seed: int = 0) -> Request:
    """A request with a random prompt."""
    tokens = torch.randint(3, engine.model.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    return Request(name, tuple(tokens.tolist()), params, seed=seed)


def start(decoder: Decoder, load: Load, *, spare: int = 0) -> EngineCore:
    """An engine in which all streams decode."""
    engine = make_engine(decoder, load, spare=spare)
    longest = min(800, engine.max_model_len - load.context - 8)
    params = SamplingParams(max_tokens=longest, ignore_eos=True, **load.params)
    for number in range(load.streams):
        engine.add(request_of(engine, f"stream-{number}", load.context, params, number))
    decoding = set[str]()
    while len(decoding) < load.streams:
        decoding |= {delta.request_id for delta in engine.step() if delta.token_ids}
    for _ in range(6):  # until it is warm
        engine.step()
    return engine


def seconds(function: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """The mean time of a function's work on a device."""
    for _ in range(min(3, repeats)):
        function()
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call, and of the device's work that it leaves behind."""
    began = time.perf_counter()
    function()
    _wait(device)
    return (time.perf_counter() - began) * 1e3


def measure(label: str, decoder: Decoder, load: Load, bytes_per_s: float) -> None:
    """Print the median step of a load."""
    began = time.perf_counter()
    engine = start(decoder, load)
    started, times, num_tokens = time.perf_counter() - began, list[float](), 0
    _wait(decoder.device)
    host = time.thread_time()
    for _ in range(_STEPS):
        began = time.perf_counter()
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
        times.append(time.perf_counter() - began)
    host = (time.thread_time() - host) / _STEPS
    model, median = decoder.config, sorted(times)[_STEPS // 2]
    read = sum(one.nbytes for one in decoder.parameters()) - decoder.embedding.nbytes  # of which rows are looked up
    read += load.streams * load.context * model.num_layers * 4 * model.num_kv_heads * model.head_dim  # keys and values
    floor = read / bytes_per_s
    graphs = engine.parts.graphs.capturer.num_captured if engine.parts.graphs else 0
    click.echo(
        f"{label} {load}: {median * 1e3:.2f} ms, {num_tokens / sum(times):.0f} tokens/s, CPU time of the thread "
        f"{host * 1e3:.2f} ms, floor {floor * 1e3:.3f} ms, {floor / median:.0%} of it; {graphs} graphs, started in "
        f"{started:.1f} s"
    )
    del engine
    gc.collect()
    torch.cuda.empty_cache()


# -- the parts ------------------------------------------------------------------------------------------------------


def attention(shape: str, device: torch.device) -> None:
    """Measure decoding attention by its warps, and by the stages of its loads."""
    from speculative.gpu import triton_attention
    from speculative.gpu.capture import Capturer
    from speculative.gpu.paged_attention import AttentionSizes, PagedRows

    model, ones = ModelConfig.from_json(_LLAMA | SHAPES[shape]), functools.partial(torch.ones, device=device)
    cases = ((64, 1500, 1), (64, 256, 1), (64, 256, 4), (1, 256, 1), (1, 4096, 1))
    for streams, context, queries in ((2, 40, 4),) if shape == "tiny" else cases:
        sizes = AttentionSizes(16, queries, model.max_position_embeddings // 16)
        blocks = torch.arange(streams * -(-context // 16), device=device).view(streams, -1)
        # Those of several layers, more than the L2 cache holds.
        caches = ones((4, 2, blocks.numel() * 16, model.num_kv_heads, model.head_dim), dtype=torch.bfloat16)
        query = ones((streams * queries, model.num_heads, model.head_dim), dtype=torch.bfloat16)
        visible = torch.full((len(query),), context, device=device)
        rows, moved = PagedRows(visible - 1, visible, blocks), caches[0].nbytes
        for warps, stages in product((2, 4, 8), (2, 3)):
            changes: dict[str, Any] = {"STAGES": stages, "warps_for": lambda *_, warps=warps: warps}
            with mock.patch.multiple(triton_attention, **changes):
                attend = functools.partial(triton_attention.TritonAttend(sizes), query, rows=rows)
                replay = Capturer(device).capture(functools.partial(_attend_all, attend, caches))
                took = seconds(replay, device, 1 if shape == "tiny" else 20) / len(caches)
            click.echo(
                f"{shape} attention of {streams} x {context}, {queries} rows, {warps} warps, {stages} stages: "
                f"{took * 1e6:.1f} us a layer, {moved / took / 1e12:.2f} TB/s"
            )


def _attend_all(attend: Callable[..., Tensor], caches: Tensor) -> list[Tensor]:
    return [attend(keys=cache[0], values=cache[1]) for cache in caches.unbind(0)]


def steps(shape: str, device: torch.device, weights: Format | None = None) -> None:
    """Measure steps beside the least time that their bytes take."""
    decoder, label = make_decoder(shape, device, weights), shape if weights is None else f"{shape} in {weights.name}"
    source = torch.ones(1 << (24 if shape == "tiny" else 29), dtype=torch.bfloat16, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    bytes_per_s = 2 * source.nbytes / seconds(copy, device)
    for load in loads(shape):
        measure(label, decoder, load, bytes_per_s)


def mixed(shape: str, device: torch.device) -> None:
    """Measure steps of decoding streams beside prompts that come one after the other, and alone."""
    decoder, (load, length) = make_decoder(shape, device), (Load(2, 40), 60) if shape == "tiny" else (_MANY, 2000)
    for kind in ("none", "eagle3"):
        engine = start(decoder, dataclasses.replace(load, drafter=kind), spare=1)
        alone, beside = sorted(timed_ms(engine.step, device) for _ in range(20)), list[float]()
        for number in range(8):
            engine.add(request_of(engine, f"prompt-{number}", length, SamplingParams(max_tokens=1), number))
            beside += [timed_ms(engine.step, device) for _ in range(3)]  # a chunk, the last rows, and what catches up
        parts = ", then ".join(f"{sorted(beside[turn::3])[4]:.2f} ms" for turn in range(3))
        click.echo(f"{shape} {load}, {kind}: alone {alone[10]:.2f} ms; beside a prompt of {length}: {parts}")
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def _answer_prompt(engine: EngineCore, length: int, hold: int = 0) -> None:
    """Compute a prompt and its first token, and hold its state after so many tokens."""
    params = _FOUR_TOKENS if hold else SamplingParams(max_tokens=1)
    engine.add(request_of(engine, "prompt", length, params), prefill_only_after=hold or None)
    while engine.has_work:
        engine.step()


def handoff(shape: str, device: torch.device) -> None:
    """Measure prompts, and what their handoff costs the sender and the receiver, whose streams decode."""
    load, lengths = (Load(2, 40), (20, 200)) if shape == "tiny" else (_MANY, (256, 1024, 4096))
    decoder = make_decoder(shape, device)
    sender, receiver = make_engine(decoder, Load(1, lengths[-1])), start(decoder, load, spare=1)
    alone = sorted(timed_ms(receiver.step, device) for _ in range(20))
    with ThreadPoolExecutor(1) as thread:
        for length in (lengths[-1], *lengths):  # the first is the first
            answer = functools.partial(_answer_prompt, sender, length)
            prompt = sorted(timed_ms(answer, device) for _ in range(5))[2]
            sender.take_stats()
            kept = timed_ms(functools.partial(answer, hold=1), device)
            marks, own, beside = [time.perf_counter()], list[TokenDelta](), list[float]()
            export = sender.export("prompt")
            marks.append(time.perf_counter())
            blob = thread.submit(export.finish).result()
            marks.append(time.perf_counter())
            unpacked = thread.submit(receiver.unpack, blob)
            while not unpacked.done():
                beside.append(timed_ms(receiver.step, device))
            marks.append(time.perf_counter())
            receiver.insert(request_of(receiver, "prompt", length, _FOUR_TOKENS), unpacked.result())
            marks.append(time.perf_counter())
            while not own or own[-1].finish_reason is None:
                began = time.perf_counter()
                own += [delta for delta in receiver.step() if delta.request_id == "prompt"]
                beside.append((time.perf_counter() - began) * 1e3)
                marks += [time.perf_counter()] if own and len(marks) == 5 else []
            thread_ms = sender.take_stats().export_s * 1e3
            names = ("export", "its end", "unpack", "insert", "first token")
            parts = [f"{name} {(b - a) * 1e3:.2f} ms" for name, (a, b) in zip(names, pairwise(marks), strict=True)]
            click.echo(
                f"{shape} handoff of {length} tokens, {blob.nbytes / 2**20:.0f} MiB: prompt {prompt:.1f} ms, and "
                f"{kept:.1f} ms to be held; {', '.join(parts)}; {thread_ms:.2f} ms of the sender's thread; "
                f"steps of {load}: {alone[10]:.2f} ms alone, "
                f"{alone[-1]:.2f} ms at most, {max(beside):.2f} ms at most beside it"
            )


def peer(shape: str, device: torch.device) -> None:
    """Measure steps of vLLM, or of transformers where vLLM does not start, with random weights in the same shape."""
    try:
        name, step_ms = _vllm(shape)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        click.echo(f"no vLLM: {error}")
        name, step_ms = _transformers(shape, device)
    random = torch.Generator().manual_seed(0)
    for load in (one for one in loads(shape) if one.drafter == "none" and not one.params):
        tokens = torch.randint(3, SHAPES[shape]["vocab_size"], (load.streams, load.context), generator=random)
        click.echo(f"{shape} {name} {load}: {step_ms(tokens.tolist()):.2f} ms")


StepMs = Callable[[list[list[int]]], float]


def _vllm(shape: str) -> tuple[str, StepMs]:
    from tools.bench.workers.vllm_engine import Vllm

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(_LLAMA | SHAPES[shape]), encoding="utf-8")
    llm = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    llm |= {"compilation_config": {"cudagraph_capture_sizes": [1, 16, 64, 256]}, "enable_prefix_caching": False}
    engine = Vllm({"llm": llm})

    def step_ms(tokens: list[list[int]]) -> float:
        ask = BatchOfPrompts(tokens, 1 + _STEPS, temperature=1.0, seed=0)
        return float(engine.run(ask)["decode_s"] / _STEPS * 1e3)

    return f"vLLM {engine.versions['vllm']}", step_ms


def _transformers(shape: str, device: torch.device) -> tuple[str, StepMs]:
    import transformers

    config = transformers.LlamaConfig(**_LLAMA | SHAPES[shape], attn_implementation="sdpa")
    with device:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    settings = transformers.GenerationConfig(max_new_tokens=8 + _STEPS, do_sample=True, eos_token_id=-1)

    def step_ms(tokens: list[list[int]]) -> float:
        found = model.generate_batch(tokens, generation_config=settings, record_timestamps=True)
        stamps = next(iter(found.values())).timestamps
        return float((stamps[-1] - stamps[-1 - _STEPS]) / _STEPS * 1e3)

    return f"transformers {transformers.__version__}", step_ms


PARTS: dict[str, Callable[[str, torch.device], None]] = {
    **{one.__name__: one for one in (attention, steps, mixed, handoff, peer)},
    "fp8": functools.partial(steps, weights=FORMAT),
}


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)), required=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", help="Of the models; tiny, on a CPU too.")
def main(parts: tuple[str, ...], shape: str) -> None:
    """Measure engines with random weights."""
    click.echo(mark())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for part in parts:
        PARTS[part](shape, device)


if __name__ == "__main__":
    main()
