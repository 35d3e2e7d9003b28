"""Tokenizers in the layouts of published models, small: each as the content of its tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_PIECES = ("He", "ll", "llo", "wo", "or", "ld", "in", "th", "the", "er", "on", "IN", "INST")
TEXTS = (
    *("Hello world", " leading space", "   three", "a\n\nb\t c\r\n", "\n", "3.14 and 1234567", "don't, I'll", "", " "),
    *("naïve café, 你好 🙂", "▁ é Ġ", "def f(x):\n    return x", "<s>[INST] hi [/INST]", "a </s> b</s>c", "x<|end|> y"),
    *("<|end|>", "\n<|end|>\n", "e\u0301 ﬁ", "\x00\x7f", "<0x41>", " ▁x"),
)


def _bpe(letters: list[str], space: str, **options: Any) -> models.BPE:
    """A BPE model over some letters, with merges of a few pieces with and without a space before them."""
    vocab = dict.fromkeys(letters)
    merges: list[tuple[str, str]] = []
    for piece in (*_PIECES, *(space + piece for piece in _PIECES)):
        begun = piece[0]
        for letter in piece[1:]:
            if (begun, letter) not in merges:
                merges.append((begun, letter))
            begun += letter
            vocab[begun] = None
    vocab = {piece: place for place, piece in enumerate(vocab)}
    return models.BPE(vocab=vocab, merges=merges, **options)


def _byte_level(
    split: pre_tokenizers.PreTokenizer | None, *, prefix_space: bool = False, **options: Any
) -> RawTokenizer:
    raw = RawTokenizer(_bpe(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())], "Ġ", **options))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=split is None)
    raw.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    raw.decoder = decoders.ByteLevel()
    return raw


def _sentencepiece(*, strips: bool) -> RawTokenizer:
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁"]
    letters += sorted(
        {letter for text in TEXTS for letter in text if letter.isascii() and letter.isprintable()} - {" "}
    )
    raw = RawTokenizer(_bpe([*letters, "ï", "é"], "▁", unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strips else chain)
    raw.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    return raw


def _begins_with(raw: RawTokenizer, text: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A {text} $B", special_tokens=[(text, raw.token_to_id(text) or 0)]
    )


def layouts() -> dict[str, dict[str, Any]]:
    """The content of tokenizer.json by the name of the layout."""
    made: dict[str, RawTokenizer] = {}
    made["gpt2"] = _byte_level(None)
    made["gpt2 with prefix space"] = _byte_level(None, prefix_space=True)
    split = pre_tokenizers.Split(Regex(_LLAMA3), "isolated", False)
    made["llama 3"] = _byte_level(split, ignore_merges=True)
    made["llama 3"].add_special_tokens(["<s>"])
    made["llama 3"].post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), _begins_with(made["llama 3"], "<s>")]
    )
    single = pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated", False)
    made["qwen 2"] = _byte_level(single)
    made["qwen 2"].normalizer = normalizers.NFC()
    made["qwen 2"].post_processor = processors.ByteLevel(trim_offsets=False)
    made["llama 2"] = _sentencepiece(strips=True)
    made["llama 2"].normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made["llama 2"].post_processor = _begins_with(made["llama 2"], "<s>")
    made["yi"] = _sentencepiece(strips=False)
    made["yi"].normalizer = normalizers.Replace(" ", "▁")
    for scheme in ("first", "always", "never"):
        name = f"mistral {scheme}"
        made[name] = _sentencepiece(strips=scheme != "never")
        made[name].pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
        made[name].post_processor = _begins_with(made[name], "<s>")
    made["gemma"] = _sentencepiece(strips=False)
    made["gemma"].normalizer = normalizers.Replace(" ", "▁")
    made["gemma"].pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous", False)
    pieces = ["<unk>", "<s>", "</s>", "▁", *(f"▁{piece}" for piece in _PIECES), *_PIECES]
    letters = sorted({letter for text in TEXTS for letter in text if not letter.isspace()} - set(pieces))
    scored = [(piece, -float(len(pieces) - place)) for place, piece in enumerate([*pieces, *letters])]
    made["unigram"] = RawTokenizer(models.Unigram(scored, unk_id=0))
    made["unigram"].pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    made["unigram"].decoder = decoders.Metaspace("▁", "always")
    made["unigram"].add_special_tokens(["<unk>", "<s>", "</s>"])
    for name, raw in made.items():
        if raw.token_to_id("</s>") is None:
            raw.add_special_tokens(["</s>"])
        raw.add_special_tokens([AddedToken("<|end|>", lstrip="gemma" in name, rstrip="mistral" in name, special=True)])
        raw.add_tokens([AddedToken("<|résumé|>", normalized=False)])
    return {name: json.loads(raw.to_str()) for name, raw in made.items()}


def write_layout(folder: Path, content: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """A folder with this tokenizer.json, and with this tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
