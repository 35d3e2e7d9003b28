"""The tokens that end an answer: all that a checkpoint's files name, in one place for whoever generates or checks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speculative.errors import ConfigError

Json = Mapping[str, Any]

END_TOKEN_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)
"""The files of a checkpoint that `end_tokens` reads."""
LFS_POINTER = "version https://git-lfs"
"""Start of what a repository has in the place of a large file that was not fetched."""


def end_tokens(folder: Path) -> dict[int, tuple[str, ...]]:
    """The ids that end an answer, each with the names of the files that say so.

    They are what generation_config.json and config.json have as `eos_token_id`, and the `eos_token` of
    tokenizer_config.json: fine-tunes often change one of them and leave the others as their base had them. That of
    special_tokens_map.json counts where tokenizer_config.json is silent, or has no `added_tokens_decoder` and so is of
    the old form, in which transformers reads the map. A token is looked up in tokenizer.json; without one, in what
    tokenizer_config.json or added_tokens.json add to it, and else it is left out.

    Raises:
        ConfigError: a file is damaged, or names what is no token of the model.
    """
    found: dict[int, tuple[str, ...]] = {}
    for token_id, file in _stated(folder):
        found[token_id] = tuple(dict.fromkeys((*found.get(token_id, ()), file)))
    return found


def stated_ids(content: Json, field: str, place: str) -> tuple[int, ...]:
    """One id or several, as config.json and generation_config.json have them; () where the field is missing or null.

    Raises:
        ConfigError: it is something else; the message begins with `place`, the file.
    """
    value = content.get(field)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ConfigError(
                f"{place}: `{field}` has {token_id!r}, which is no token id; correct it, or take the file from its "
                "source."
            )
    return tuple(ids)


def read_json(path: Path) -> Json:
    """The object that a JSON file of a checkpoint holds.

    Raises:
        ConfigError: it is missing, damaged or no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER):
            raise ConfigError(f"{path} is a pointer of Git LFS and not the file; fetch it with `git lfs pull`.")
        content = json.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face checkpoint.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); take the file from its source.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object; take the file from its source.")
    return content


def read_if_there(path: Path) -> Json:
    """The same; {} where there is no such file."""
    return read_json(path) if path.is_file() else {}


def token_text(value: object, field: str, place: str) -> str | None:
    """A token as tokenizer_config.json has it, a text or an object with its `content`; None if there is none.

    Raises:
        ConfigError: it is something else; the message begins with `place`, the file.
    """
    text = value.get("content") if isinstance(value, dict) else value
    if (text is None and value is None) or text == "":
        return None
    if not isinstance(text, str):
        raise ConfigError(
            f"{place}: `{field}` is {value!r}, and must be a token's text, or an object with its `content`; correct "
            "it, or take the file from its source."
        )
    return text


def stated_tokens(folder: Path) -> dict[int, tuple[Json, str]]:
    """The tokens that other files than tokenizer.json add, by id: each with its flags, and the name of the file.

    They are those of tokenizer_config.json, and without any there those of added_tokens.json.

    Raises:
        ConfigError: a file is damaged.
    """
    name, older = "tokenizer_config.json", "added_tokens.json"
    stated = read_if_there(folder / name).get("added_tokens_decoder")
    if stated is None:
        pairs = [(token_id, {"content": text}) for text, token_id in read_if_there(folder / older).items()]
        name = older
    else:
        pairs = list(stated.items()) if isinstance(stated, dict) else [("", {})]
    found: dict[int, tuple[Json, str]] = {}
    for key, token in pairs:
        number = str(key)
        if not number.isascii() or not number.isdecimal() or not isinstance(token, dict) or "content" not in token:
            field = "" if name == older else "`added_tokens_decoder` "
            raise ConfigError(
                f"{folder / name}: {field}has {key!r}: {token!r}, which is no token with its id; correct it."
            )
        found[int(number)] = token, name
    return found


def _stated(folder: Path) -> Iterator[tuple[int, str]]:
    """Each id that a file names, with that file."""
    config = read_if_there(folder / "config.json")
    of_text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    size = config.get("vocab_size", (of_text or {}).get("vocab_size"))
    for file in ("generation_config.json", "config.json"):
        content = read_if_there(folder / file)
        for part in (content, *((of_text,) if file == "config.json" and of_text else ())):
            for token_id in stated_ids(part, "eos_token_id", str(folder / file)):
                _check_size(token_id, size, f"{folder / file}: `eos_token_id`")
                yield token_id, file
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        content = read_if_there(folder / file)
        text = token_text(content.get("eos_token"), "eos_token", str(folder / file))
        known = None if text is None else _id_of(text, folder, file)
        if known is not None:
            _check_size(known, size, f"{folder / file}: `eos_token` {text!r}")
            yield known, file
        if text is not None and "added_tokens_decoder" in content:
            return


def _check_size(token_id: int, size: object, what: str) -> None:
    if isinstance(size, int) and token_id >= size:
        raise ConfigError(
            f"{what} is token {token_id}, and the model's tokens go from 0 to {size - 1} (config.json: `vocab_size`); "
            "correct it, or take the checkpoint whose embedding has it."
        )


def _id_of(text: str, folder: Path, file: str) -> int | None:
    """A token's id; None where no file says."""
    added = (token_id for token_id, (token, _) in stated_tokens(folder).items() if token["content"] == text)
    if not (folder / "tokenizer.json").is_file():
        return next(added, None)
    try:
        known = _in_tokenizer(text, read_json(folder / "tokenizer.json"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} is damaged ({error!r}); take the file from its source."
        ) from error
    known = next(added, None) if known is None else known
    if known is None:
        raise ConfigError(
            f"{folder / file}: `eos_token` is {text!r}, which is no token of tokenizer.json; correct it, or take both "
            "files from one source."
        )
    return known


def _in_tokenizer(text: str, content: Json) -> int | None:
    """A token's id by the content of a tokenizer.json."""
    for token in content.get("added_tokens") or ():
        if token["content"] == text:
            return int(token["id"])
    vocab = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        return None if text not in vocab else int(vocab[text])
    return next((place for place, (piece, _) in enumerate(vocab) if piece == text), None)  # of a Unigram model
