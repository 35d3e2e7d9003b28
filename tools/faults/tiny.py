"""Tiny checkpoints for audits of known faults: their text goes round in circles, with surprises.

After a token, the target's output layer mostly predicts its successor in its circle; attention and noise do the rest.
So n-grams have something to draft, and a draft model with different noise agrees about half of the time.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_EOS = 2
_CIRCLE = 9  # tokens after which a text would repeat
_SHARPNESS = 0.16  # of the output layer: nats per unit of likeness
_DRAFT_NOISE = 0.06


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target and a draft model for it, both with the same tokenizer; returns their folders."""
    target, draft = folder / "target", folder / "draft"
    model = _model()
    _save(model, target)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=_DRAFT_NOISE)
    _save(model, draft)
    return target, draft


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=_EOS,
        pad_token_id=_EOS,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.12 * values)
        embedding = torch.randn(VOCAB_SIZE, 64, generator=generator)
        model.model.embed_tokens.weight.copy_(embedding)
        before = [_before(token) for token in range(VOCAB_SIZE)]
        model.lm_head.weight.copy_(_SHARPNESS * embedding[before])
        model.lm_head.weight[_EOS] *= 0.0
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=_EOS, pad_token_id=_EOS)
    return model


def _before(token: int) -> int:
    """The token that comes before this one in its circle."""
    first = token // _CIRCLE * _CIRCLE
    size = min(_CIRCLE, VOCAB_SIZE - first)
    return first + (token - first - 1) % size


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)


def write_tiny_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE, **settings: str) -> None:
    """Write a byte-level BPE: three special tokens, the 256 bytes, then short English pieces up to `vocab_size`.

    `settings` are added to the tokenizer's configuration.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlu"
    pairs = [("Ġ", letter) for letter in letters] + [(a, b) for a in letters for b in letters]
    merges = pairs[: max(0, vocab_size - len(SPECIAL_TOKENS) - len(alphabet))]
    pieces = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    built = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    built.save(str(folder / "tokenizer.json"))
    whole = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
