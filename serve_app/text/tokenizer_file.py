"""A checkpoint's tokenizer as its files have it: tokenizer.json, and the tokens that the files beside it add.

`transformers` rebuilds the normalizer and the pre-tokenizer of some classes and drops those of tokenizer.json, which
gives other ids. Here the file counts.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from speculative.errors import ConfigError
from speculative.model.end_tokens import read_if_there, read_json, stated_tokens, token_text

_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_PROBES = (
    *("Hello world", " leading space", "  two", "a\n\nb\t c\r\n", "\n", "3.14 and 1234567", "don't"),
    *("naïve café, 你好 🙂", "def f(x):\n    return x"),
)


def read_tokenizer(folder: Path) -> tuple[RawTokenizer, tuple[str, ...]]:
    """The tokenizer of a folder, and where its files contradict each other. Nothing is cut off or padded. Raises
    ConfigError: a file is damaged, or the files cannot both be right."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no tokenizer.json. Name a folder with a fast tokenizer.")
    try:
        core = RawTokenizer.from_file(str(path))
    except Exception as error:  # the library has no type of its own for it
        raise ConfigError(f"{path} cannot be read ({error}); take the file from its source.") from error
    for token in read_json(path).get("added_tokens") or ():
        if (given := core.token_to_id(token["content"])) != token["id"]:  # by the library, which leaves no gaps
            raise ConfigError(
                f"{path}: `added_tokens` gives {token['content']!r} the id {token['id']}, and the vocabulary before it "
                f"makes it {given}; take the file from its source."
            )
    core.no_truncation()
    core.no_padding()
    named = list(_named(folder))
    remarks = [*_add_stated(core, folder, {text for text, _ in named})]
    in_file = {token.content for token in core.get_added_tokens_decoder().values()}
    for text, flags in named:  # they are cut out of a text whole, as added tokens are, where the vocabulary has them
        if text not in in_file and core.token_to_id(text) is not None:
            core.add_special_tokens([AddedToken(text, special=True, **flags)])
    for probe in _PROBES:
        if isinstance(tokens := _tokens(core, probe), str):
            raise ConfigError(f"{path} cannot encode {probe!r} ({tokens}); take the file from its source.")
    return core, (*remarks, *_other_flags(core, folder), *_beyond(core, folder))


def differences(core: RawTokenizer, rebuilt: RawTokenizer, name: str, folder: Path) -> Iterator[str]:
    """Return what the tokenizer that `transformers` builds, of a class, encodes otherwise than the files say."""
    rebuilt.no_truncation()
    rebuilt.no_padding()
    texts = [token.content for token in core.get_added_tokens_decoder().values() if token.special][:3]
    probes = [*_PROBES, *(form.format(text) for text in texts for form in ("{}[INST] hi", "{} hi", "a {}\n"))]
    found = []
    for probe in probes:
        ours, theirs = _tokens(core, probe), _tokens(rebuilt, probe)
        if ours != theirs:
            found.append(f"{probe!r} is {ours} by the file, and {theirs} by {name}")
    if found:
        yield (
            f"{folder / 'tokenizer.json'} says other tokens than transformers' class {name}, which {_CONFIG} or "
            f"config.json asks for, for {len(found)} of {len(probes)} texts tried: {found[0]}. Prompts are encoded as "
            "the file says; a model that was trained with other tokens needs the file that it was trained with."
        )


def lossy(core: RawTokenizer, folder: Path) -> Iterator[str]:
    """Return what does not come back from its tokens, spaces at its start apart."""
    for probe in _PROBES:
        text = core.decode(core.encode(probe, add_special_tokens=False).ids, skip_special_tokens=False)
        if text.lstrip(" ") != probe.lstrip(" "):
            yield f"{folder / 'tokenizer.json'} does not give every text back: {probe!r} becomes {text!r}."
            return


def begins_nothing(core: RawTokenizer, *, after_special: bool = False) -> RawTokenizer:
    """The same tokenizer without what it puts before a text that begins; itself where that is nothing.

    Args:
        core: the tokenizer.
        after_special: keep what it puts behind each special token, too, and not at the start alone.
    """
    parts = {"normalizer": core.normalizer, "pre_tokenizer": core.pre_tokenizer}
    steps = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    changed = {name: _beginning_nothing(step, after_special) for name, step in steps.items()}
    if changed == steps:
        return core
    content = json.loads(core.to_str()) | changed
    vocabulary = content["model"]["vocab"]
    for token in content["added_tokens"] if core.normalizer is not None else ():
        if token["normalized"]:  # found in a text as the whole normalizer writes it
            text, token["content"] = token["content"], core.normalizer.normalize_str(token["content"])
            if isinstance(vocabulary, dict) and text in vocabulary:
                vocabulary[token["content"]] = vocabulary.pop(text)
    return RawTokenizer.from_str(json.dumps(content))


def _beginning_nothing(step: Any, after_special: bool) -> Any:
    """A step of a normalizer or pre-tokenizer that leaves the start of a text alone; None = nothing is left of it."""
    for several in ("normalizers", "pretokenizers"):
        if several in step:
            left = [_beginning_nothing(one, after_special) for one in step[several]]
            return {**step, several: [one for one in left if one is not None]}
    if step["type"] == "Metaspace" and (not after_special or step["prepend_scheme"] == "first"):
        return {**step, "prepend_scheme": "never"}
    if after_special:
        return step
    leaves = {"ByteLevel": {"add_prefix_space": False}, "Strip": {"strip_left": False}}
    return None if step["type"] == "Prepend" else {**step, **leaves.get(step["type"], {})}


def _tokens(core: RawTokenizer, text: str) -> list[str] | str:
    """The tokens of a text, or why it has none."""
    try:
        return list(core.encode(text).tokens)
    except Exception as error:  # the library has no type of its own for it
        return str(error)


def _add_stated(core: RawTokenizer, folder: Path, named: Collection[str]) -> Iterator[str]:
    """Add the tokens that other files have beyond tokenizer.json."""
    in_file = {token.content for token in core.get_added_tokens_decoder().values()}
    for token_id, (token, name) in sorted(stated_tokens(folder).items(), key=lambda one: one[0]):
        text, known = token["content"], core.token_to_id(token["content"])
        there = core.id_to_token(token_id)
        if known != token_id and (known is not None or there is not None):
            says = f"{text!r} the id {known}" if known is not None else f"this id to {there!r}"
            yield f"{folder / name} gives {text!r} the id {token_id}, and tokenizer.json gives {says}, which counts."
        elif text not in in_file:
            special = bool(token.get("special", text in named))
            flags = {"normalized": not special} | {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
            core.add_tokens([AddedToken(text, special=special, **flags)])
            if core.token_to_id(text) != token_id:
                raise ConfigError(
                    f"{folder / name}: `added_tokens_decoder` gives {text!r} the id {token_id}, and the next that is "
                    f"free behind tokenizer.json is {core.token_to_id(text)}; take both files from one source."
                )


def untyped_tokens(folder: Path) -> dict[str, Any]:
    """The tokens that tokenizer_config.json or special_tokens_map.json name by an object without its type, which
    `transformers` does not take; and its lists of further ones that hold such objects, as texts."""
    config, older = read_if_there(folder / _CONFIG), read_if_there(folder / _MAP)
    objects = {name: config[name] for name in _NAMED if isinstance(config.get(name), dict)}
    found: dict[str, Any] = {name: value["content"] for name, value in objects.items() if "__type" not in value}
    for name in _MORE:
        lists = [
            (folder / file, content[name]) for file, content in ((_CONFIG, config), (_MAP, older)) if name in content
        ]
        listed = [(one, str(path)) for path, more in lists if isinstance(more, list) for one in more]
        if any(isinstance(one, dict) and "__type" not in one for one, _ in listed):
            found[name] = list(filter(None, dict.fromkeys(token_text(one, name, place) for one, place in listed)))
    return found


def _named(folder: Path) -> Iterator[tuple[str, dict[str, bool]]]:
    """The special tokens that tokenizer_config.json names, each with its flags."""
    place, config = str(folder / _CONFIG), read_if_there(folder / _CONFIG)
    named: list[tuple[str, Any]] = [(name, config.get(name)) for name in _NAMED]
    for name in _MORE:
        more = config.get(name) or ()
        if not isinstance(more, list | tuple | dict):
            raise ConfigError(f"{place}: `{name}` is {more!r}, and must be a list of tokens; correct it.")
        named += [(name, token) for token in (more.values() if isinstance(more, dict) else more)]
    for name, value in named:
        text = token_text(value, name, place)
        if text is not None:
            yield text, {flag: bool(value[flag]) for flag in _FLAGS if isinstance(value, dict) and flag in value}


def _other_flags(core: RawTokenizer, folder: Path) -> Iterator[str]:
    """Flags of tokenizer_config.json that contradict tokenizer.json: the latter counts, as in transformers 5."""
    config = read_if_there(folder / _CONFIG)
    for flag in ("add_bos_token", "add_eos_token", "add_prefix_space"):
        if config.get(flag) is not None and not isinstance(config[flag], bool):
            raise ConfigError(f"{folder / _CONFIG}: `{flag}` is {config[flag]!r}, and must be true or false.")
    before, behind = added_ids(core)
    bare = core.encode("x", add_special_tokens=False).tokens
    spaced = bool(bare) and bare[0][:1] in ("▁", "Ġ")
    for flag, here, part in (
        ("add_bos_token", bool(before), "the `post_processor` of tokenizer.json begins a text with"),
        ("add_eos_token", bool(behind), "the `post_processor` of tokenizer.json ends a text with"),
        ("add_prefix_space", spaced, "tokenizer.json puts before a text"),
    ):
        asked = config.get(flag)
        if asked is not None and asked != here:
            added = {"add_bos_token": before, "add_eos_token": behind}.get(flag, ())
            what = [core.id_to_token(token) for token in added] if here and added else "a space" if here else "none"
            yield f"{folder / _CONFIG}: `{flag}` is {str(asked).lower()}, and {part} {what}; tokenizer.json counts."
    if behind and config.get("add_eos_token") is not False:
        texts = [core.id_to_token(token) for token in behind]
        yield f"{folder / 'tokenizer.json'}: its `post_processor` ends every plain prompt with {texts}."


def _beyond(core: RawTokenizer, folder: Path) -> Iterator[str]:
    """Tokens that the model has no embedding for."""
    config = read_if_there(folder / "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    most = max(core.get_vocab(with_added_tokens=True).values()) + 1
    if isinstance(size, int) and most > size:
        texts = [core.id_to_token(token) for token in range(size, min(most, size + 3))]
        yield (
            f"{folder / 'tokenizer.json'} has {most} tokens, and config.json's `vocab_size` is {size}: prompts with "
            f"{', '.join(map(repr, texts))}{' or others beyond it' if most > size + 3 else ''} are refused."
        )


def added_ids(core: RawTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the post-processor puts before and behind a text."""
    whole = core.encode("x")
    text = [place for place, added in enumerate(whole.special_tokens_mask) if not added]
    if not text:
        return (), ()
    return tuple(whole.ids[: text[0]]), tuple(whole.ids[text[-1] + 1 :])
