"""`truespec train-drafter`: train a draft head for a model, on the model's own answers.

On a Ray cluster: `ray job submit -- truespec train-drafter --model M --data self --out FOLDER`.
"""

import dataclasses
import importlib
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from deploy.reports.progress import View
from deploy.run.models import find_model
from serve_app.backends.base import SHIPPED_HEADS
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore, resolve_device
from speculative.errors import ConfigError, InvalidRequest
from speculative.model.decoder import Decoder
from speculative.model.fingerprint import model_fingerprint
from speculative.model.loading import load_decoder, resolve_model
from speculative.training.data import ChatFrame, Conversations, write_answers, write_questions
from speculative.training.features import compute_features
from speculative.training.heads import (
    DraftHead,
    HeadKind,
    LossVocabulary,
    aux_layers,
    draft_vocabulary,
    initial_head,
    load_head,
)
from speculative.training.loop import (
    HEAD,
    REPORT,
    STATE,
    Point,
    StepReport,
    Trainer,
    TrainingConfig,
    damaged,
    read_report,
    write_report,
)

Messages = list[dict[str, str]]

SELF = "self"
_MAX_QUESTION, _MAX_ANSWER = 96, 256  # tokens; of an answer, the first ones are the hardest to draft
_PLOT = "acceptance.png"

# The option of each provenance entry of a report that a resumed run may not change.
_OPTION_OF = {"kind": "kind", "model_fingerprint": "model", "data": "data", "conversations": "data", "tokens": "data"}


@dataclass(frozen=True, slots=True)
class TrainJob:
    """The head to train, its data, and the folder that it is written to.

    data: an .npz of conversations, a .jsonl of prompts for the model to answer, or "self": it asks and answers itself.
    out: gets `head` (the checkpoint), `report.json`, the plot, the state for a resume, and the features' cache.
    draft_vocab: so many of the commonest tokens are all that a new EAGLE-3 head drafts; an MTP module drafts any, its
        loss is over these.
    init_from: a head of the same kind to start from, by name or folder, instead of from the target's last layer.
    """

    model: str
    data: str
    out: Path
    training: TrainingConfig
    kind: HeadKind = "eagle3"
    init_from: str | None = None
    draft_vocab: int = 16384
    conversations: int = 2000  # to write, with data "self"
    resume: bool = False
    threads: int = 1
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of products; auto: what the machine multiplies fast
    device: str = "auto"


def run_training(job: TrainJob, view: View) -> dict[str, Any]:
    """Train, and return the report: provenance, results, learning curve.

    Raises:
        ConfigError: the data, the model or the settings do not fit, or are not those of the run to be resumed.
    """
    torch.set_num_threads(job.threads)
    job = _resolved(job)
    if not job.resume and (job.out / STATE).exists():
        raise ConfigError(f"{job.out} already holds a training; continue it with --resume, or give another folder.")
    _require_writable(job.out)
    folder = find_model(job.model, view.say)
    origin = {"kind": job.kind, "data": Path(job.data).name, "model_fingerprint": model_fingerprint(folder)}
    _require_same(job, origin)
    view.stage(f"loading {job.model}")
    target = load_decoder(folder, dtype=getattr(torch, job.dtype), device=resolve_device(job.device))
    head = _start(job, target)  # refused before anything is computed
    conversations = _conversations(job, origin, folder, target, view)
    trainer = _trainer(job, origin, target, head, conversations, view)
    view.stage("training")
    trainer.run(lambda step: _show_step(view, step), lambda point: view.say(describe(point)))
    view.say(f"saved: the best head, of {describe(trainer.best)}")
    if _plot(trainer.curve, job.out / _PLOT):
        view.say(f"plot in {job.out / _PLOT}")
    else:
        view.say("no plot: install matplotlib (`pip install truespec[train]`) and run again with --resume")
    report: dict[str, Any] = json.loads((job.out / REPORT).read_text(encoding="utf-8"))
    return report


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has instructions for bfloat16 products; a CPU without them is four times slower at
    it."""
    if device.type != "cpu":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def describe(point: Point) -> str:
    """One line about a point of the learning curve."""
    held_out = point.held_out
    line = f"step {point.step}, {point.tokens / 1e6:.2f}M tokens: acceptance {_rates(held_out.acceptance)}"
    for name, length in (("T=1", held_out.length_t1), ("T=0", held_out.length_t0)):
        if length is not None:
            line += f", accepted length {length:.2f} at {name}"
    return line + (f", top-1 {_rates(held_out.top1)}" if held_out.top1 else "")


def read_prompts(path: Path, encode: Callable[[Messages], Sequence[int]]) -> list[Messages]:
    """Prompts of a .jsonl file: each line an object with `prompt` (a text) or `messages` (a conversation).

    Raises:
        ConfigError: the file cannot be read, a line holds neither, or the model's template does not take it.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold what else splits lines, such as U+2028
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give an .npz, a .jsonl or `self`.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
            asked = _to_answer(messages)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{path} line {number} is neither {{"prompt": ...}} nor {{"messages": [...]}} ({error!r}).'
            ) from error
        try:
            json.dumps(messages, ensure_ascii=False).encode()
            encode(asked)
            prompts.append(messages)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{path} line {number} holds half a character (a lone surrogate); fix it.") from error
        except InvalidRequest as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
    return prompts


def answer_prompts(
    engine: EngineCore, tokenizer: Tokenizer, prompts: Sequence[Messages], progress: Callable[[int, int], None]
) -> Conversations:
    """Let the model answer. A message of the user that another one follows is answered, too, and that answer is part of
    the prompt of the next: a conversation for each answer. One ends early where it would outgrow the model."""

    def fits(messages: Messages) -> bool:
        return len(tokenizer.encode_chat(messages)) + _MAX_ANSWER <= engine.max_model_len

    parts: list[Conversations] = []
    waiting = list(prompts)
    while waiting:
        asked = [_to_answer(messages) for messages in waiting]
        encoded = [tuple(tokenizer.encode_chat(messages)) for messages in asked]
        part = write_answers(engine, encoded, max_tokens=_MAX_ANSWER, seed=len(parts) * len(prompts), progress=progress)
        parts.append(part)
        answers = zip(part.starts + part.prompt_lengths, part.starts + part.lengths, strict=True)
        said = [{"role": "assistant", "content": tokenizer.decode(part.token_ids[a:b].tolist())} for a, b in answers]
        turns = zip(waiting, asked, said, strict=True)
        longer = ([*done, answer, *whole[len(done) :]] for whole, done, answer in turns if len(whole) > len(done))
        waiting = [messages for messages in longer if fits(_to_answer(messages))]
    return Conversations.joined(parts)


def _to_answer(messages: Messages) -> Messages:
    """The conversation up to the first message of the user that has to be answered."""
    roles = [message["role"] for message in messages]
    followed = (index for index, pair in enumerate(itertools.pairwise(roles)) if pair == ("user", "user"))
    return messages[: next(followed, len(messages)) + 1]


def _resolved(job: TrainJob) -> TrainJob:
    """The job with its device and dtype named."""
    device = resolve_device(job.device)
    dtype = job.dtype
    if dtype == "auto":
        dtype = "bfloat16" if multiplies_bfloat16(device) else "float32"
    training = dataclasses.replace(job.training, low_precision=dtype == "bfloat16")
    return dataclasses.replace(job, device=str(device), dtype=dtype, training=training)


def _require_writable(out: Path) -> None:
    """Fail now, not after the model has written its conversations."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}.") from error


def _require_same(job: TrainJob, now: Mapping[str, Any]) -> None:
    """Refuse to resume with other settings than the folder's training began with; its files depend on those."""
    if not job.resume or not any((job.out / name).exists() for name in (STATE, REPORT)):
        return
    first, _ = read_report(job.out)
    for name, value in now.items():
        if first.get(name, value) != value:
            option = _OPTION_OF[name]
            raise ConfigError(
                f"--{option} {getattr(job, option)} is not what the training in {job.out} began with "
                f"({first.get(option)}: {name} {first[name]}, now {value}); resume with that, or give another folder."
            )


def _resumes(job: TrainJob) -> bool:
    return job.resume and (job.out / STATE).exists()


def _start(job: TrainJob, target: Decoder) -> DraftHead | None:
    """The head to start from; None = a new one."""
    if not _resumes(job):
        return load_head(job.kind, resolve_model(job.init_from, SHIPPED_HEADS), target) if job.init_from else None
    try:
        return load_head(job.kind, job.out / HEAD, target)
    except ConfigError as error:
        raise damaged(job.out / HEAD, "damaged or incomplete") from error


def _conversations(
    job: TrainJob, origin: Mapping[str, Any], folder: Path, target: Decoder, view: View
) -> Conversations:
    path = Path(job.data)
    if path.suffix == ".npz":
        conversations = Conversations.load(path)
        _require_same(job, _sizes(conversations))
        return conversations
    written = job.out / "conversations.npz"
    if job.resume and written.is_file():
        try:
            conversations = Conversations.load(written)
        except ConfigError as error:
            view.say(f"{error} That is done now.")
        else:
            view.say(f"{len(conversations)} conversations in {written} were written before")
            return conversations
    if job.data != SELF and path.suffix != ".jsonl":
        raise ConfigError(f"--data {job.data!r} is neither an .npz, nor a .jsonl, nor `{SELF}`.")
    tokenizer = Tokenizer.from_folder(folder)
    engine = _engine(job, target)
    if job.data == SELF:
        view.stage("the model asks")
        frame = ChatFrame.between(*(tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("A", "7")))
        questions = write_questions(engine, frame, job.conversations, max_tokens=_MAX_QUESTION, progress=view.count)
        view.stage("the model answers")
        conversations = write_answers(engine, questions, max_tokens=_MAX_ANSWER, progress=view.count)
    else:
        prompts = read_prompts(path, tokenizer.encode_chat)
        view.stage("the model answers")
        conversations = answer_prompts(engine, tokenizer, prompts, view.count)
    if not _resumes(job):
        write_report(job.out, {"provenance": dict(origin), "curve": []})  # whose conversations they are
    conversations.save(written)
    return conversations


def _engine(job: TrainJob, target: Decoder) -> EngineCore:
    assert job.dtype != "auto"
    config = EngineConfig(
        max_num_seqs=32,
        max_batched_tokens=1024,
        kv_cache_tokens=32768,
        dtype=job.dtype,
        device=str(target.device),
        num_threads=job.threads,
        drafter=DrafterConfig(kind="none"),
    )
    return EngineCore(target, target.config, config)


def _trainer(
    job: TrainJob,
    origin: Mapping[str, Any],
    target: Decoder,
    start: DraftHead | None,
    conversations: Conversations,
    view: View,
) -> Trainer:
    """`origin`: what a resumed run has to share; `start`: the head to start from, None = a new one."""
    conversations.require_fit(target.config.vocab_size, target.config.max_position_embeddings)
    counts = conversations.answer_counts(target.config.vocab_size)
    commonest = draft_vocabulary(counts, job.draft_vocab, target.config.eos_token_ids)
    head = initial_head(job.kind, target, commonest) if start is None else start
    vocabulary = LossVocabulary.of(head, target, commonest)
    covered = counts[vocabulary.ids.cpu().numpy()].sum() / max(1, counts.sum())
    view.say(f"{len(conversations)} conversations; {len(vocabulary.ids)} token ids cover {covered:.2%} of the answers")
    view.stage("reading the model's features")
    features = compute_features(
        target,
        conversations,
        job.out / "features",
        aux_layers(head),
        model_key=origin["model_fingerprint"],
        progress=view.count,
    )
    provenance = {**origin, **_provenance(job, conversations, start)}
    trainer = Trainer(head, vocabulary, features, job.training, job.out, provenance)
    if job.resume and trainer.resume():
        view.say(f"resumed: {describe(trainer.curve[-1])}")
    return trainer


def _show_step(view: View, step: StepReport) -> None:
    speed = step.tokens / max(step.elapsed_s, 1e-9)
    view.advance(
        step.progress,
        f"step {step.step}, loss {step.loss:.3f}, acceptance {_rates(step.acceptance)}, {speed:.0f} tokens/s",
    )


def _provenance(job: TrainJob, conversations: Conversations, start: DraftHead | None) -> dict[str, Any]:
    """Return where a head comes from, for its report; a resumed run keeps what the first one reported of its start."""
    reported = {
        "model": job.model,
        **_sizes(conversations),
        "torch": torch.__version__,
        "threads": job.threads,
        "dtype": job.dtype,
        "device": job.device,
    }
    if _resumes(job):
        return reported
    if job.init_from is None or start is None:
        return reported | {"init_from": None}
    fingerprint = model_fingerprint(resolve_model(job.init_from, SHIPPED_HEADS), start.config)
    return reported | {"init_from": job.init_from, "init_from_fingerprint": fingerprint}


def _sizes(conversations: Conversations) -> dict[str, int]:
    return {"conversations": len(conversations), "tokens": len(conversations.token_ids)}


def _plot(curve: list[Point], path: Path) -> bool:
    """Held-out acceptance per draft position over the tokens seen, as a PNG; False without matplotlib."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point.tokens / 1e6 for point in curve]
    for position in range(len(curve[-1].held_out.acceptance)):
        style = {"color": f"C{position}", "marker": "o", "markersize": 3}
        drawn = [point.held_out.acceptance[position] for point in curve]
        axes.plot(tokens, drawn, label=f"draft {position + 1}, Σ min(p, q)", **style)
        likeliest = [point.held_out.top1[position] for point in curve if point.held_out.top1]
        if len(likeliest) == len(curve):
            axes.plot(tokens, likeliest, linestyle=":", label=f"draft {position + 1}, greedy", **style)
    axes.set(xlabel="million tokens seen", ylabel="held-out acceptance", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", ncols=len(curve[-1].held_out.acceptance), fontsize="small")
    figure.savefig(path, dpi=150)
    return True


def _rates(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.3f}" for value in values)
