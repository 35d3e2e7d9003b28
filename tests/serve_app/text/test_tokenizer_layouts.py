"""Tokenizers as they are published: ids and texts are those of tokenizer.json, whatever stands beside it."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError, UnsupportedModel
from tests.support.tokenizer_layouts import TEXTS, layouts, write_layout

LAYOUTS = layouts()
CLASSES = (
    *("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "TokenizersBackend"),
    *("GPT2Tokenizer", "GemmaTokenizerFast", "NoSuchTokenizer"),
)
FLAGS: tuple[dict[str, Any], ...] = (
    {}, {"legacy": True}, {"legacy": False, "add_prefix_space": True}, {"add_prefix_space": False},
    {"add_bos_token": True, "add_eos_token": False}, {"add_bos_token": False, "add_eos_token": True},
)  # fmt: skip


def library(folder: Path) -> RawTokenizer:
    return RawTokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_are_those_of_the_file_whatever_class_and_flags_stand_beside_it(tmp_path: Path) -> None:
    for number, (name, class_name) in enumerate(itertools.product(LAYOUTS, CLASSES)):
        for flags in FLAGS[number % 2 :: 2]:
            config = {"tokenizer_class": class_name, "bos_token": "<s>", "eos_token": "</s>", **flags}
            if not name.startswith(("llama", "mistral", "gemma", "unigram", "yi")):
                del config["bos_token"]
            folder = write_layout(tmp_path / "model", LAYOUTS[name], config)
            ours, theirs = Tokenizer.from_folder(folder), library(folder)
            for text in TEXTS:
                where = (name, config, text)
                assert ours.encode(text) == theirs.encode(text).ids, where
                bare = theirs.encode(text, add_special_tokens=False).ids
                assert ours.encode(text, special=False) == bare, where
            assert ours.eos_token_ids == (theirs.token_to_id("</s>"),)


def test_no_text_has_fewer_tokens_than_its_length_says(tmp_path: Path) -> None:
    known = 0
    for name, content in LAYOUTS.items():
        ours = Tokenizer.from_folder(write_layout(tmp_path / name, content, {"eos_token": "</s>"}))
        longest = max(library(tmp_path / name).get_vocab(), key=len)
        for text in (*TEXTS, longest, "\u2126\u0313\u0300\u0345", "\u212a", " ", "\x01", "\U00050000"):
            assert ours.fewest_tokens(text * 50) <= len(ours.encode(text * 50, special=False)), (name, text)
        known += ours.fewest_tokens("hello " * 1000) > 0
    assert known >= 4


def test_a_continuation_has_the_ids_that_it_has_behind_another_text(tmp_path: Path) -> None:
    """transformers encodes both together: nothing else knows what belongs to the second."""
    for name, content in LAYOUTS.items():
        folder = write_layout(tmp_path / name, content, {"eos_token": "</s>"})
        raw = library(folder)
        raw.add_tokens([AddedToken("<mm>", normalized=True)])
        raw.save(str(folder / "tokenizer.json"))
        ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
        compared = 0
        for text in (
            *TEXTS,
            "the",
            " the",
            "  the",
            "\nthe",
            "</s>the",
            "the</s> the",
            "the <|end|> the",
            "a <mm>x<mm>",
        ):
            for before in ("(", "th (", "a</s>(", "7\n("):
                first = theirs.encode(before, add_special_tokens=False)
                both = theirs.encode(before + text, add_special_tokens=False)
                if both[: len(first)] == first and not text.startswith(("\n", "<|end|>")):
                    assert ours.encode_continuation(text) == both[len(first) :], (name, before, text)
                    compared += 1
        assert compared > 60, name


def test_text_is_what_the_library_decodes_wherever_the_tokens_are_cut(tmp_path: Path) -> None:
    draw = random.Random(5)
    for name, content in LAYOUTS.items():
        folder = write_layout(tmp_path / name, content)
        ours, theirs = Tokenizer.from_folder(folder), library(folder)
        plain = {theirs.token_to_id("<|résumé|>")}  # in a byte-level model the library takes its letters for bytes
        for text in (*TEXTS, *("".join(draw.choices("".join(TEXTS), k=30)) for _ in range(40))):
            for special in (True, False):
                ids = [token for token in theirs.encode(text, add_special_tokens=special).ids if token not in plain]
                for skip in (True, False):
                    whole = theirs.decode(ids, skip_special_tokens=skip)
                    detokenizer = ours.detokenizer(skip_special=skip)
                    parts = [detokenizer.push([token])[0] for token in ids]
                    assert "".join(parts) + detokenizer.finish() == whole, (name, text)
                    assert ours.decode(ids, skip_special=skip) == whole, (name, text)


def test_half_characters_are_those_of_the_library_wherever_an_answer_is_cut(tmp_path: Path) -> None:
    for name, content in LAYOUTS.items():
        folder = write_layout(tmp_path / name, content)
        ours, theirs = Tokenizer.from_folder(folder), library(folder)
        letter = theirs.token_to_id("a")
        for text in ("a 🙂 b 你 c", "🙂", "x 🙂"):
            ids = theirs.encode(text, add_special_tokens=False).ids
            for end in range(len(ids) + 1):
                assert ours.decode(ids[:end]) == theirs.decode(ids[:end]), (name, text, end)
                gone_on = [*ids[:end], letter]
                assert ours.decode(gone_on) == theirs.decode(gone_on), (name, text, end)


def test_an_added_token_of_a_byte_level_model_is_plain_text(tmp_path: Path) -> None:
    for name in ("gpt2", "llama 3", "qwen 2"):
        folder = write_layout(tmp_path / name, LAYOUTS[name])
        raw = library(folder)
        raw.add_tokens([AddedToken(text, normalized=False) for text in ("é", "Ġ", "Ġthe", "Ġhey", "ÀÁ", "日本")])
        raw.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer.from_folder(folder)
        for text in ("<|résumé|>", "Ġhey", "ÀÁ", "日本"):
            ids = tokenizer.encode_continuation(text)
            assert len(ids) == 1 and tokenizer.decode(ids) == text
        # These are pieces of the model as well, which text is made of all the time.
        assert tokenizer.decode(tokenizer.encode_continuation("a the b")) == "a the b"


def test_other_readings_of_the_file_are_reported(tmp_path: Path) -> None:
    """transformers builds Llama's pre-tokenizer anew: `[` behind `<s>`, and a leading space, get other tokens."""
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    for name in ("llama 2", "yi"):
        found = Tokenizer.from_folder(write_layout(tmp_path / name, LAYOUTS[name], config)).remarks()
        assert len(found) == 1 and f"{name}/tokenizer.json says other tokens than transformers' class Llama" in found[0]
    ids = Tokenizer.from_folder(tmp_path / "llama 2").encode("<s>[INST]", special=False)
    raw = library(tmp_path / "llama 2")
    assert [raw.id_to_token(token) for token in ids][:2] == ["<s>", "▁"]
    for name in LAYOUTS.keys() - {"unigram"}:
        plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        found = Tokenizer.from_folder(write_layout(tmp_path / f"{name} alone", LAYOUTS[name], plain)).remarks()
        assert not [one for one in found if "class" in one], name


def test_flags_that_contradict_the_file_are_reported(tmp_path: Path) -> None:
    for name, flags, said in (
        ("yi", {"add_bos_token": True}, "`add_bos_token` is true, and the `post_processor` of tokenizer.json begins"),
        ("llama 2", {"add_bos_token": False}, r"`add_bos_token` is false"),
        ("llama 2", {"add_eos_token": True}, "`add_eos_token` is true"),
        ("gpt2", {"add_prefix_space": True}, "`add_prefix_space` is true, and tokenizer.json puts before a text none"),
        ("llama 2", {"add_bos_token": True, "add_prefix_space": True, "add_eos_token": None}, ""),
    ):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **flags}
        if name == "gpt2":
            del config["bos_token"]
        found = " ".join(Tokenizer.from_folder(write_layout(tmp_path, LAYOUTS[name], config)).remarks())
        assert (said in found) if said else ("`add_" not in found), found
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: `add_bos_token` is 'yes'"):
        Tokenizer.from_folder(write_layout(tmp_path, LAYOUTS["yi"], {"add_bos_token": "yes"}))


def test_a_post_processor_may_end_a_prompt(tmp_path: Path) -> None:
    content = json.loads(json.dumps(LAYOUTS["llama 2"]))
    content["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    content["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    tokenizer = Tokenizer.from_folder(write_layout(tmp_path, content, {"eos_token": "</s>"}))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((1,), (2,))
    assert tokenizer.encode("Hello")[-1] == 2
    assert any("ends every plain prompt with ['</s>']" in one for one in tokenizer.remarks())


def test_tokens_that_other_files_add_have_the_ids_that_these_say(tmp_path: Path) -> None:
    content = LAYOUTS["llama 2"]
    size = library(write_layout(tmp_path, content)).get_vocab_size()
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    config = {"eos_token": "<|new|>", "added_tokens_decoder": {str(size): {"content": "<|new|>", **plain}}}
    tokenizer = Tokenizer.from_folder(write_layout(tmp_path, content, config))
    assert tokenizer.encode_continuation("a<|new|>")[-1] == size and tokenizer.eos_token_ids == (size,)
    assert tokenizer.decode(tokenizer.encode("a<|new|>")) == "a" and size in tokenizer.special_ids
    write_layout(tmp_path, content, {"additional_special_tokens": ["<|new|>"]})
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": size}))
    assert Tokenizer.from_folder(tmp_path).encode("a<|new|>")[-1] == size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": size + 5}))
    with pytest.raises(ConfigError, match=r"added_tokens\.json.* gives '<\|new\|>' the id .* next that is free"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": 1}))
    tokenizer = Tokenizer.from_folder(tmp_path)  # a token renamed in one of the files
    assert "<|new|>' the id 1, and tokenizer.json gives this id to '<s>', which counts" in tokenizer.remarks()[0]
    assert tokenizer.added_id("<|new|>") is None
    (tmp_path / "added_tokens.json").unlink()
    config = {"eos_token": "He", "pad_token": {"content": "[PAD]"}, "additional_special_tokens": ["IN"]}
    tokenizer = Tokenizer.from_folder(write_layout(tmp_path, content, config))
    assert [tokenizer.added_id(text) is None for text in ("He", "IN", "[PAD]")] == [False, False, True]
    for wrong in ({"5": "x"}, {"x": {"content": "a"}}, ["a"], {"-1": {"content": "a"}}):
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: `added_tokens_decoder`"):
            Tokenizer.from_folder(write_layout(tmp_path, content, {"added_tokens_decoder": wrong}))


def test_further_special_tokens_are_texts_or_objects_with_or_without_a_type(tmp_path: Path) -> None:
    """Older checkpoints keep them in special_tokens_map.json, where transformers takes no objects."""
    bare = {"content": "<|end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    for field in ("additional_special_tokens", "extra_special_tokens"):
        for tokens in (["<|end|>"], [bare], [{"__type": "AddedToken", **bare}], ["</s>", bare], []):
            for in_map in (False, True):
                config: dict[str, Any] = {"eos_token": "</s>", "tokenizer_class": "Qwen2Tokenizer"}
                older = {"eos_token": {**bare, "content": "</s>"}, field: tokens}
                folder = write_layout(tmp_path, LAYOUTS["qwen 2"], config if in_map else config | {field: tokens})
                (folder / "special_tokens_map.json").write_text(json.dumps(older if in_map else {}))
                tokenizer = Tokenizer.from_folder(folder)
                assert tokenizer.remarks() == () and tokenizer.eos_token_ids == (library(folder).token_to_id("</s>"),)
                assert tokenizer.encode("a<|end|>")[-1] == library(folder).token_to_id("<|end|>")
        folder = write_layout(tmp_path, LAYOUTS["qwen 2"], {"eos_token": "</s>", field: "<|end|>"})
        with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: `{field}` is '<\|end\|>'"):
            Tokenizer.from_folder(folder)
        folder = write_layout(tmp_path, LAYOUTS["qwen 2"], {"eos_token": "</s>"})
        (folder / "special_tokens_map.json").write_text(json.dumps({field: [{"text": "<|end|>"}]}))
        with pytest.raises(ConfigError, match=rf"special_tokens_map\.json: `{field}` is"):
            Tokenizer.from_folder(folder)


def test_decoders_of_published_files_are_read_and_others_refused(tmp_path: Path) -> None:
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = decoders.Strip(" ", 1, 0)
    for name, decoder, known in (
        ("gpt2", decoders.Sequence([decoders.ByteLevel()]), True),
        ("gpt2", decoders.Sequence([decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()]), True),
        ("llama 2", decoders.Sequence([*chain, strip]), True),
        ("llama 2", decoders.Sequence([*chain, decoders.Strip(" ", 2, 0)]), True),
        ("llama 2", decoders.Sequence([decoders.Sequence(chain), strip]), True),
        ("llama 2", decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")]), True),
        ("llama 2", decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "never")]), True),
        ("unigram", decoders.Metaspace("▁", "first"), True),
        ("unigram", decoders.Sequence([decoders.Replace("▁", "_"), decoders.Replace("_", " "), decoders.Fuse()]), True),
        ("llama 2", decoders.Sequence([*chain, decoders.Strip(" ", 1, 1)]), False),
        ("llama 2", decoders.Sequence([*chain[:2], strip]), False),
        ("llama 2", decoders.WordPiece(), False),
        ("gpt2", None, False),
        ("gpt2", decoders.Sequence([decoders.ByteLevel(), strip]), False),
    ):
        folder = write_layout(tmp_path, LAYOUTS[name])
        raw = library(folder)
        raw.decoder = decoder
        raw.save(str(folder / "tokenizer.json"))
        if not known:
            with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: the `decoder`"):
                Tokenizer.from_folder(folder)
            continue
        tokenizer = Tokenizer.from_folder(folder)
        for text in ("Hello world", "   three", " a", "the 你好"):
            ids = raw.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids) == raw.decode(ids), (name, decoder, text)
            rest = tokenizer.decode(ids, continuation=True)
            assert rest.endswith(tokenizer.decode(ids)), "a continuation keeps the space before it"


def test_code_of_a_checkpoint_is_not_run_and_its_file_is_used_alone(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "eos_token": "</s>", "chat_template": "hi"}
    folder = write_layout(tmp_path, LAYOUTS["llama 2"], config)
    (folder / "own.py").write_text("raise SystemExit")
    tokenizer = Tokenizer.from_folder(folder)
    (remark,) = tokenizer.remarks()
    assert "transformers cannot load the tokenizer" in remark and "\n" not in remark
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "hi" and tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<s>[INST]") == library(folder).encode("<s>[INST]").ids


def test_a_file_that_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    for content in ("{", "{}", "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)
    gap = json.loads(json.dumps(LAYOUTS["gpt2"]))
    gap["added_tokens"][-1]["id"] += 3
    with pytest.raises(ConfigError, match=r"tokenizer\.json: `added_tokens` gives '<\|résumé\|>' the id"):
        Tokenizer.from_folder(write_layout(tmp_path, gap))
    mute = json.loads(json.dumps(LAYOUTS["unigram"]))
    mute["model"]["unk_id"] = None
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot encode"):
        Tokenizer.from_folder(write_layout(tmp_path, mute))
