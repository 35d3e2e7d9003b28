"""`truespec api reference`: docs/api.md is up to date, and says of every field what it is."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from deploy.cli.main import main
from deploy.reports import api_reference
from deploy.reports.api_reference import with_reference
from serve_app.http.openapi import OPERATIONS
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.requests import WireRequest
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.wire import UNSUPPORTED
from tests.support.project_files import ROOT

PAGE = ROOT / "docs" / "api.md"
BODIES = [operation.body for operation in OPERATIONS if operation.body is not None]
MODELS = list(dict.fromkeys([*BODIES, *api_reference.NESTED.values()]))


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of tables, by the names in its first one."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            first, *cells = line.strip("| ").split(" | ")
            found |= dict.fromkeys(first.strip("`").split("` `"), cells)
    return found


def test_the_page_is_current_and_check_finds_when_it_is_not(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["api", "reference", "--out", str(PAGE), "--check"])
    assert run.exit_code == 0, run.output
    stale = tmp_path / "api.md"
    stale.write_text(PAGE.read_text(encoding="utf-8").replace("| `temperature` | number", "| `temperature` | text"))
    run = CliRunner().invoke(main, ["api", "reference", "--out", str(stale), "--check"])
    assert run.exit_code == 1 and "is out of date; run `truespec api reference" in run.output
    assert CliRunner().invoke(main, ["api", "reference", "--out", str(stale)]).exit_code == 0
    assert stale.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_what_is_written_by_hand_stays() -> None:
    page = with_reference("# By hand\n\n<!-- api reference: fields -->\nold\n<!-- end of api reference -->\n\nafter\n")
    assert page.startswith("# By hand\n\n<!-- api reference: fields -->\n") and "\nold\n" not in page
    assert "<!-- end of api reference -->\n\nafter\n" in page


def test_every_field_that_generates_has_a_row_or_is_refused_by_name() -> None:
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED}
    assert rows(api_reference.api_reference()["fields"]).keys() == known
    added = ResponsesRequest.model_fields.keys() - WireRequest.model_fields.keys()
    assert added <= rows(api_reference.api_reference()["responses"]).keys()


@pytest.mark.parametrize("body", MODELS, ids=lambda body: body.__name__)
def test_every_field_says_what_it_is(body: type[BaseModel]) -> None:
    assert [name for name, field in body.model_fields.items() if not field.description] == []


def test_ranges_are_those_that_are_checked() -> None:
    shown = rows(api_reference.api_reference()["fields"])
    assert shown["temperature"][0] == "number 0 to 100"
    assert shown["presence_penalty"][0] == "number -2 to 2"
    assert shown["prompt_logprobs"][0] == "integer 0 to 20"
    assert shown["seed"][0] == "integer"


def test_whose_a_field_is_names_fields_alone() -> None:
    named = api_reference.VLLMS | api_reference.OWN
    assert named <= {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert not api_reference.VLLMS & api_reference.OWN


def test_every_endpoint_is_listed_with_the_key_that_it_needs() -> None:
    shown = rows(api_reference.api_reference()["endpoints"])
    assert shown.keys() == {f"{operation.method} {operation.path}" for operation in OPERATIONS}
    assert shown["POST /admin/weights"][-1] == "`admin`" and shown["POST /v1/completions"][-1] == "`user`"
    assert shown["GET /version"][-1] == "none"
