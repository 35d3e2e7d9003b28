"""The prompts of a benchmark: those that come with the package, or one's own, and such of any length."""

import itertools
import re
from pathlib import Path

from deploy.exchange.prompts import PROMPTS, read_texts
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError

_OF_LENGTH = re.compile(r"([1-9]\d{1,5})-tokens")  # a kind of prompts, each cut out of several texts to summarise


def read_prompts(folder: Path, kinds: tuple[str, ...], own: Path | None = None) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by kind, in the chat template of the model in `folder`.

    `own` replaces the set that comes with the package: a JSON object with a list of questions for every kind. Raises
    ConfigError: the file cannot be read, or has no such kind."""
    path = own or PROMPTS
    known = read_texts(path)
    lengths = {kind: int(found[1]) for kind in kinds if (found := _OF_LENGTH.fullmatch(kind))}
    texts = {kind: known.get("summarise" if kind in lengths else kind, []) for kind in kinds}
    missing = [kind for kind in kinds if not texts[kind]]
    if missing:
        raise ConfigError(
            f"--kinds: {path.name} has no prompts for {', '.join(missing)}; it has {', '.join(known)}, and prompts to "
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
