"""Clients that people use, where they are installed: langchain and instructor.

Run: pytest tests/front/serve/test_clients.py
"""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests import needs
from tests.front.serve.conftest import Served

pytestmark = pytest.mark.long  # the packages are not those of `dev`
needs.package("llguidance")


class Day(BaseModel):
    """A day of the week."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["monday", "tuesday"]
    is_late: bool


class Note(BaseModel):
    """A note, whose text need not be given: a JSON object alone has no schema."""

    text: str = ""


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchains_structured_output(server: Served, method: str) -> None:
    langchain = needs.package("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=server.model, temperature=1, seed=1, max_tokens=800
    )
    kind = Note if method == "json_mode" else Day
    assert isinstance(model.with_structured_output(kind, method=method).invoke("as json: what day"), kind)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"])
def test_instructors_modes(server: Served, mode: str) -> None:
    instructor = needs.package("instructor")
    client = instructor.from_openai(server.client, mode=instructor.Mode[mode])
    kind = Note if mode == "JSON" else Day
    settings: Any = {"temperature": 1, "seed": 1, "max_tokens": 800, "max_retries": 0}
    messages = [{"role": "user", "content": "what day is it"}]
    made = client.chat.completions.create(
        model=server.model, response_model=kind, messages=messages, **settings
    )
    assert isinstance(made, kind)
