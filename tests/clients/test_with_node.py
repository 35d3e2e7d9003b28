"""OpenAI's SDK for JavaScript, in Node (`openai_node.cjs`)."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODULES = HERE.parents[1] / "build" / "clients" / "node_modules"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "openai").is_dir(), reason="no Node, or no openai for it"
)


@pytest.fixture(scope="module")
def found(api: str, model: str) -> dict[str, Any]:
    """What the script saw."""
    environment = {**os.environ, "NODE_PATH": str(MODULES), "BASE_URL": api, "MODEL": model}
    ran = subprocess.run(
        ["node", HERE / "openai_node.cjs"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_stream_equals_whole_answer(found: dict[str, Any], model: str) -> None:
    """chat, whole, streamed, and by the stream helper"""
    assert found["models"] == [model]
    assert "Paris" in found["whole"]
    assert len(found["deltas"]) > 2 and "".join(found["deltas"]) == found["whole"]
    assert "".join(found["helperDeltas"]) == found["helperFinal"] == found["whole"]
    for usage in (found["wholeUsage"], found["streamUsage"]):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["wholeUsage"]["completion_tokens"] == found["streamUsage"]["completion_tokens"]


def test_tools_and_structured_output(found: dict[str, Any]) -> None:
    """forced tool calls, whole and streamed; `parse`"""
    assert found["call"] == found["streamedCall"]
    assert found["call"]["name"] == "temperature"
    assert json.loads(found["call"]["arguments"])["city"] in ("Oslo", "Paris")
    assert found["parsed"]["city"] in ("Oslo", "Paris")


def test_responses(found: dict[str, Any]) -> None:
    """responses, whole and streamed"""
    assert "Paris" in found["response"]
    assert "".join(found["responseDeltas"]) == found["response"]


def test_completions_and_aborted_stream(found: dict[str, Any]) -> None:
    """completions, and a stream that is aborted"""
    assert found["text"].strip()
    assert found["aborted"] == 3


def test_errors(found: dict[str, Any]) -> None:
    """errors as the SDK's classes, with the field's name"""
    errors = found["errors"]
    assert (errors["model"]["name"], errors["model"]["status"]) == ("NotFoundError", 404)
    assert (errors["temperature"]["name"], errors["temperature"]["param"]) == ("BadRequestError", "temperature")
    assert (errors["field"]["name"], errors["field"]["param"]) == ("BadRequestError", "no_such_field")
