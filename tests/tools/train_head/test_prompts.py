"""The prompts that a head is trained on: of every kind, and none of those that it is measured with."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.exchange.prompts import KINDS
from deploy.exchange.prompts import read_texts as bench_prompts
from deploy.run.demo import QUESTION, TASKS
from tools.train_head import prompts
from tools.train_head.prompts import PromptWriter, asked_elsewhere, main, read_nouns


def entries(*lines: str) -> str:
    return "  1 a licence, which is no entry  \n" + "".join(f"{line}  \n" for line in lines)


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    """A noun of each category, two names, and three that are left out."""
    categories = prompts._TEMPLATES["wordnet_categories"]
    data = [f"{i:08d} {i + 3:02d} n 01 {name}ish 0 001 @ 0 n 0000 | a gloss" for i, name in enumerate(categories)]
    index = [f"{name}ish n 1 1 @ 1 1 {i:08d}" for i, name in enumerate(categories)]
    data += ["00000100 15 n 01 Lyon 0 001 @i 0 n 0000 | a city", "00000101 18 n 01 Ada 0 001 @i 0 n 0000 | a pioneer"]
    index += ["lyon n 1 1 @i 1 1 00000100", "ada n 1 1 @i 1 0 00000101"]
    data.append("00000102 06 n 02 barrow 0 lighthouse 0 001 @ 0 n 0000 | a tower")
    data.append("00000103 06 n 01 lighthouse 0 001 @ 0 n 0000 | a tower with a light")
    index += ["unused n 1 1 @ 1 0 00000102", "lighthouse n 1 1 @ 1 1 00000103", "pharos n 1 1 @ 1 1 00000102"]
    (tmp_path / "data.noun").write_text(entries(*data))
    (tmp_path / "index.noun").write_text(entries(*index))
    return tmp_path


def grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


def test_nothing_that_is_measured_is_among_them(wordnet: Path) -> None:
    bench = bench_prompts()
    unseen = [prompt for kind in KINDS for prompt in bench[kind]] + [QUESTION, *(task.prompt for task in TASKS)]
    kept = {gram for prompt in unseen for gram in grams(prompt)}
    sources = {**read_nouns(wordnet, asked_elsewhere()), "texts": ["A {text}."], "functions": ["def f(): return {}"]}
    writer = PromptWriter(sources, seed=1)
    asked = [turn for turns in islice(writer.conversations(), 4000) for turn in turns]
    assert not [turn for turn in asked if grams(turn) & kept]
    assert not [turn for turn in asked if "{" in turn.replace("{text}", "").replace("{}", "")], "a place is left"
    assert not {turn.lower() for turn in asked} & {prompt.lower() for prompt in unseen}


def test_a_seed_gives_a_file_that_the_trainer_reads(
    wordnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("Description: a\n " + "A tool for long texts. " * 10 + "\n")
    monkeypatch.setattr(prompts, "_DPKG_STATUS", status)
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        result = CliRunner().invoke(main, [str(file), "--count", "200", "--wordnet", str(wordnet)])
        assert result.exit_code == 0, result.output
    assert files[0].read_bytes() == files[1].read_bytes()
    written = [json.loads(line)["messages"] for line in files[0].read_text().splitlines()]
    assert len(written) == 200
    assert {message["role"] for messages in written for message in messages} == {"user"}
    assert {len(messages) for messages in written} > {1, 2}, "some conversations go on"
