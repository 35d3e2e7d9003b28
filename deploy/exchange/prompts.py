"""The prompts: conversation, code, summaries and edits, which copy from their text, and such of any length.

Those of the kind `held-out` are questions that SmolLM2 asked itself, of the conversations that were held out when the
head that comes with the package was trained.
"""

import itertools
import json
import re
from pathlib import Path

from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError

KINDS = ("chat", "code", "summarise", "edit")
_OF_LENGTH = re.compile(r"([1-9]\d{1,5})-tokens")  # a kind of prompts, each cut out of several texts to summarise
_FILE = Path(__file__).with_name("prompts.json")


def read_prompts(folder: Path, kinds: tuple[str, ...], own: Path | None = None) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by kind, in the chat template of the model in `folder`.

    `own` replaces the set that comes with the package: a JSON object with a list of questions for every kind. Raises
    ConfigError: the file cannot be read, or has no such kind."""
    known = read_texts(own)
    lengths = {kind: int(found[1]) for kind in kinds if (found := _OF_LENGTH.fullmatch(kind))}
    texts = {kind: known.get("summarise" if kind in lengths else kind, []) for kind in kinds}
    missing = [kind for kind in kinds if not texts[kind]]
    if missing:
        name = (own or _FILE).name
        raise ConfigError(
            f"--kinds: {name} has no prompts for {', '.join(missing)}; it has {', '.join(known)}, and prompts to "
            "summarise make up those of any length (1000-tokens)."
        )
    tokenizer = Tokenizer.from_folder(folder)
    prompts = {
        kind: [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts[kind]] for kind in kinds
    }
    for kind, length in lengths.items():  # as many of this length, each of which begins with another one
        own_ids = prompts[kind]
        turned = [itertools.cycle(own_ids[number:] + own_ids[:number]) for number in range(len(own_ids))]
        prompts[kind] = [list(itertools.islice(itertools.chain.from_iterable(one), length)) for one in turned]
    return prompts


def read_texts(own: Path | None = None) -> dict[str, list[str]]:
    """The questions by kind. Raises ConfigError: the file cannot be read."""
    path = own or _FILE
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
        known = {kind: [str(text) for text in texts[kind]] for kind in texts}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a JSON object with a list of prompts for every kind ({error}).") from error
    return known
