import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from serve_app.text.tokenizer import StopMatcher, Tokenizer
from speculative.errors import InvalidRequest

any_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def pushed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: bool) -> str:
    """Decode in chunks that end at the cuts."""
    detokenizer = tokenizer.detokenizer(**options)
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = ["".join(detokenizer.push(ids[start:stop])) for start, stop in itertools.pairwise(borders)]
    return "".join(parts) + detokenizer.finish()


@any_fixture
@given(ids=st.lists(st.integers(0, 345), max_size=40), cuts=st.lists(st.integers(0, 100), max_size=5))
def test_detokenized_parts_add_up_to_what_the_library_decodes(
    tokenizer: Tokenizer, tokenizer_folder: Path, ids: list[int], cuts: list[int]
) -> None:
    library = RawTokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    for skip_special in (True, False):
        whole = tokenizer.decode(ids, skip_special=skip_special)
        assert whole == library.decode(ids, skip_special_tokens=skip_special)
        assert whole == pushed(tokenizer, ids, cuts, skip_special=skip_special)


@pytest.mark.parametrize(
    ("source", "content"),
    [("{{ messages[0].content }}", "\ud800"), ("{{ messages | tojson }}", "a"), ("{{ deep | tojson }}", "a")],
    ids=["half a character", "deep messages", "deep variables"],
)
def test_what_cannot_be_rendered_or_encoded_is_an_invalid_request(
    tokenizer_folder: Path, tmp_path: Path, source: str, content: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(source)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    message = {"role": "user", "content": content, "more": deep}
    with pytest.raises(InvalidRequest, match="refuses these messages") as caught:
        Tokenizer.from_folder(tokenizer_folder, str(template)).encode_chat([message], variables={"deep": deep})
    assert caught.value.field == "messages"


def test_a_model_without_chat_template_says_so(sentencepiece: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        sentencepiece.encode_chat([{"role": "user", "content": "a"}])


def test_truncation_left_in_a_tokenizer_file_is_switched_off(tokenizer_folder: Path, tmp_path: Path) -> None:
    raw = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.encode("a b c d e f g h")) > 4 and tokenizer.remarks() == ()


def naive_stop(text: str, stops: list[str], include: bool) -> str | None:
    """The text before, or up to, the stop string that is completed first, the longest of those; None without one."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end if include else end - max(map(len, completed))]
    return None


def naive_certain(text: str, stops: list[str]) -> str:
    """The text but for its longest end that may begin a stop string."""
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text


ab_text = st.text("ab", max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(ab_text, max_size=5),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_are_found_wherever_the_parts_end(parts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown, sent = "", ""
    for part in parts:
        shown += matcher.push(part)
        sent += part
        stopped = naive_stop(sent, stops, include)
        assert matcher.stopped == (stopped is not None)
        assert shown == (naive_certain(sent, stops) if stopped is None else stopped)
    if not matcher.stopped:
        assert shown + matcher.finish() == sent
