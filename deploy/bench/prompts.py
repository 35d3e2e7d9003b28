"""The prompts: conversation, code, and summaries that copy from their text."""

import json
from pathlib import Path

from serve_app.tokenizer import Tokenizer
from speculative.errors import ConfigError

KINDS = ("chat", "code", "summarise")
_FILE = Path(__file__).with_name("prompts.json")


def read_prompts(folder: Path, kinds: tuple[str, ...], own: Path | None = None) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by kind, in the chat template of the model in `folder`.

    `own` replaces the set that comes with the package: a JSON object with a list of questions for every kind.

    Raises:
        ConfigError: the file cannot be read, or has no such kind.
    """
    path = own or _FILE
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
        known = {kind: [str(text) for text in texts[kind]] for kind in texts}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a JSON object with a list of prompts for every kind ({error}).") from error
    missing = [kind for kind in kinds if not known.get(kind)]
    if missing:
        raise ConfigError(f"--kinds: {path.name} has no prompts for {', '.join(missing)}; it has {', '.join(known)}.")
    tokenizer = Tokenizer.from_folder(folder)
    return {
        kind: [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in known[kind]] for kind in kinds
    }
