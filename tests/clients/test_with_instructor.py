"""instructor's modes."""

from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "London"]
    capital: bool
    millions: int = Field(ge=0, le=99)


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_mode(api: str, model: str, mode: str) -> None:
    """modes `JSON_SCHEMA`, `TOOLS` and `TOOLS_STRICT`"""
    with openai.OpenAI(base_url=api, api_key="unused", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        found, raw = client.chat.completions.create_with_completion(
            model=model,
            response_model=City,
            messages=[{"role": "user", "content": "Describe Paris."}],
            temperature=0,
            max_tokens=80,
            max_retries=0,
        )
    assert isinstance(found, City)
    assert raw.usage.completion_tokens < 80
