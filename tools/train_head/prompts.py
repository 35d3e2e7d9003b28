"""Prompts of the kinds people write, to train a head on: `python -m tools.train_head.prompts OUT`.

They are drawn from the templates in prompts.json. Their subjects are WordNet's nouns (Debian's package
wordnet-base), the texts in them descriptions of the Debian packages that are installed, the code functions of Python's
standard library. No subject is one of the bench's: those prompts stay unseen.
"""

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from deploy.exchange.prompts import read_texts as bench_prompts

_WORDNET, _DPKG_STATUS = Path("/usr/share/wordnet"), Path("/var/lib/dpkg/status")
_MORE_TURNS = 0.2  # chance of one more after each
_TEMPLATES = json.loads((Path(__file__).with_name("prompts.json")).read_text(encoding="utf-8"))
_PLACE = re.compile(r"\{(a )?([^{}]+)\}")
_RANGE = re.compile(r"(\d+)-(\d+)")


class PromptWriter:
    """Draws prompts; a seed gives the same ones again, from the same sources.

    A place in a template is {3-12}, a number, {parts}, another template, or {food|plant}, a word of these sources; with
    an article it is {a parts}.
    """

    def __init__(self, sources: Mapping[str, Sequence[str]], seed: int) -> None:
        """Prepare to draw; `sources`: nouns by category, `texts` and `functions`."""
        self._sources, self._random = sources, random.Random(seed)

    def conversations(self) -> Iterator[list[str]]:
        """Endless conversations: what the user says in each turn."""
        kinds, shares = list(_TEMPLATES["shares"]), list(_TEMPLATES["shares"].values())
        while True:
            turns = [self._filled(self._random.choices(kinds, shares)[0])]
            while self._random.random() < _MORE_TURNS:
                turns.append(self._drawn("follow_ups"))
            yield turns

    def _filled(self, template: str) -> str:
        return _PLACE.sub(self._place, template)

    def _place(self, place: re.Match[str]) -> str:
        text = self._drawn(place[2])
        return text if place[1] is None else f"an {text}" if text[0].lower() in "aeiou" else f"a {text}"

    def _drawn(self, name: str) -> str:
        if numbers := _RANGE.fullmatch(name):
            return str(self._random.randint(int(numbers[1]), int(numbers[2])))
        if name in _TEMPLATES["parts"]:
            return self._filled(self._random.choice(_TEMPLATES["parts"][name]))
        return self._random.choice([text for source in name.split("|") for text in self._sources[source]])


def read_nouns(folder: Path, left_out: frozenset[str]) -> dict[str, list[str]]:
    """WordNet's nouns by the category of their first meaning, proper nouns under "names of CATEGORY".

    Only those that its tagged texts use, and names of people; none that holds a word of `left_out`.
    """
    meanings = {}
    for line in (folder / "data.noun").read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            offset, category, _, _, word, *rest = line.split(" | ")[0].split()
            meanings[offset] = (
                _TEMPLATES["wordnet_categories"][int(category) - 3],
                word.replace("_", " "),
                "@i" in rest,
            )
    nouns: dict[str, list[str]] = {}
    for line in (folder / "index.noun").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        lemma, _, _, num_pointers, *rest = line.split()
        num_tagged, first = rest[int(num_pointers) + 1 : int(num_pointers) + 3]
        category, word, is_name = meanings[first]
        used = num_tagged != "0" or (is_name and category == "person")
        if used and word.lower() == lemma.replace("_", " ") and not left_out & set(word.lower().split()):
            nouns.setdefault(f"names of {category}" if is_name else category, []).append(word)
    return nouns


def read_texts(status: Path) -> list[str]:
    """The first paragraph of the longer descriptions of Debian packages."""
    found = re.findall(r"^Description: .*\n((?: .*\n)+)", status.read_text(encoding="utf-8"), re.MULTILINE)
    paragraphs = (" ".join(text.split("\n .\n")[0].split()) for text in found)
    return sorted({text for text in paragraphs if 150 <= len(text) <= 1200})


def read_functions(folder: Path) -> list[str]:
    """Short functions of the modules in a folder."""
    functions = []
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and 3 <= (node.end_lineno or 0) - node.lineno <= 20:
                functions.append(ast.get_source_segment(source, node) or "")
    return functions


def asked_elsewhere() -> frozenset[str]:
    """The words of the bench's questions: none of them becomes a subject."""
    prompts = bench_prompts()
    return frozenset(re.findall(r"[a-z]+", " ".join(prompts["chat"] + prompts["code"]).lower()))


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--count", default=5000, help="Write this many.")
@click.option("--seed", default=0, help="Draw with this seed.")
@click.option("--wordnet", type=click.Path(path_type=Path), default=_WORDNET, help="The folder of WordNet's nouns.")
def main(out: Path, count: int, seed: int, wordnet: Path) -> None:
    """Write prompts of the kinds people write to OUT, for `python -m tools.train_head --data OUT`."""
    sources = read_nouns(wordnet, asked_elsewhere())
    sources["texts"] = read_texts(_DPKG_STATUS)
    sources["functions"] = read_functions(Path(sysconfig.get_path("stdlib")))
    writer = PromptWriter(sources, seed)
    with out.open("w", encoding="utf-8") as file:
        for _, turns in zip(range(count), writer.conversations(), strict=False):
            messages = [{"role": "user", "content": turn} for turn in turns]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
