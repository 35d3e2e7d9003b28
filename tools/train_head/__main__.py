"""Trains an EAGLE-3 head for a model, on the model's own answers: `python -m tools.train_head`."""

from pathlib import Path
from typing import Any

import click
import torch

from serve_app.backends.base import SHIPPED_HEADS
from serve_app.text.tokenizer import Tokenizer
from speculative.assembly import Assembly, resolve_device
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import load_eagle3
from speculative.model.fingerprint import model_fingerprint
from speculative.model.loading import load_decoder, resolve_model
from tools.train_head.conversations import Conversations, answer_prompts, read_prompts, write_answers, write_questions
from tools.train_head.head import draft_vocabulary, initial_head
from tools.train_head.loop import Trainer, TrainingConfig


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, help="The model: a catalogue name, a folder or a hub id.")
@click.option("--init-from", help="Start from this head (a folder or name) instead of from the model's last layer.")
@click.option("--data", default="self", help="self (questions of the model's own), a .jsonl of prompts, or an .npz.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Write head and report to this folder.")
@click.option("--minutes", default=60.0, help="Train for this long.")
@click.option("--steps", type=int, help="Train for this many steps, if they end earlier.")
@click.option("--draft-vocab", default=12288, help="Let a new head draft only this many of the commonest tokens.")
@click.option("--conversations", default=2000, help="With --data self: write this many conversations.")
@click.option("--learning-rate", type=float, help="The peak learning rate: 1e-3, or 3e-4 with --init-from.")
@click.option("--tokens-per-step", default=1024, help="Tokens of a training step; use more on a GPU.")
@click.option("--threads", default=1, help="Compute with this many CPU threads.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Type of the products.")
@click.option("--report-minutes", default=5.0, help="Measure and save this often.")
def main(model: str, init_from: str | None, data: str, out: Path, **options: Any) -> None:
    """Train an EAGLE-3 head for a model, on the model's own answers."""
    torch.set_num_threads(options["threads"])
    folder = resolve_model(model, SHIPPED_HEADS)
    target = load_decoder(folder, dtype=getattr(torch, options["dtype"]), device=resolve_device("auto"))
    start = init_from and load_eagle3(resolve_model(init_from, SHIPPED_HEADS), target, dtype=torch.float32)
    out.mkdir(parents=True, exist_ok=True)
    if data.endswith(".npz"):
        found = Conversations.load(Path(data))
    else:
        found = _written(data, options["conversations"], folder, target)
        found.save(out / "conversations.npz")  # for another training
    counts = found.answer_counts(target.config.vocab_size)
    vocabulary = draft_vocabulary(counts, options["draft_vocab"], target.config.eos_token_ids)
    head = start or initial_head(target, vocabulary)
    covered = counts[head.draft_ids.cpu().numpy()].sum() / counts.sum()
    click.echo(
        f"{len(found)} conversations; the {len(head.draft_ids)} drafted tokens cover {covered:.2%} of the answers"
    )
    config = TrainingConfig(
        steps=options["steps"],
        minutes=options["minutes"],
        tokens_per_step=options["tokens_per_step"],
        learning_rate=options["learning_rate"] or (3e-4 if start else 1e-3),
        warm_draft_share=0.0 if start else 0.3,
        report_every_s=60 * options["report_minutes"],
        low_precision=options["dtype"] == "bfloat16",
    )
    provenance = {
        "model": model,
        "model_fingerprint": model_fingerprint(folder),
        "init_from": init_from,
        "data": Path(data).name,
        "conversations": len(found),
        "tokens": len(found.token_ids),
    }
    Trainer(head, target, found, config, out, provenance).run()


def _written(data: str, count: int, folder: Path, target: Decoder) -> Conversations:
    """Conversations that the model writes: to questions of its own (`self`), or to prompts of a file."""
    tokenizer = Tokenizer.from_folder(folder)
    config = EngineConfig(
        max_num_seqs=32,
        max_batched_tokens=1024,
        kv_cache_tokens=32768,
        dtype="float32" if target.dtype == torch.float32 else "bfloat16",
        device=str(target.device),
        num_threads=torch.get_num_threads(),
        drafter=DrafterConfig(kind="none"),
    )
    engine = EngineCore(Assembly(Weights(target), config))
    if data == "self":
        return Conversations.pack(write_answers(engine, write_questions(engine, tokenizer, count)))
    return Conversations.pack(answer_prompts(engine, tokenizer, read_prompts(Path(data), tokenizer)))


if __name__ == "__main__":
    main()
