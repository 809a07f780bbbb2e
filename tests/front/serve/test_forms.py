"""Answers that must have a form: JSON, JSON by a schema, and calls of tools, of a model with random
weights, which would write none of them by itself.

Run: pytest tests/front/serve/test_forms.py
"""

import json
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests import needs
from tests.front.serve.conftest import Served

pytestmark = pytest.mark.slow
needs.package("llguidance")

MESSAGES: Any = [{"role": "user", "content": "what day is it"}]
DAYS = {
    "type": "object",
    "properties": {
        "day": {"enum": ["monday", "tuesday"]},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "minItems": 2, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
        "late": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["day", "hours", "note", "late"],
    "additionalProperties": False,
}  # fmt: skip


def tool(name: str, *, strict: bool | None = None) -> dict[str, Any]:
    properties = {
        "of": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 1, "maximum": 9},
    }
    parameters = {"type": "object", "properties": properties, "required": ["of", "n"], "additionalProperties": False}  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS: Any = [tool("find_day"), tool("call")]


def ask(served: Served, **options: Any) -> Any:
    settings: Any = {"temperature": 1, "seed": 0, "max_tokens": 400} | options
    return served.client.chat.completions.create(model=served.model, messages=MESSAGES, **settings)


def by_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int
    colour: Colour


class Steps(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: Step
    second: Step | None
    is_done: bool


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_follows_its_schema_whole_and_streamed(server: Served, seed: int) -> None:
    import jsonschema

    options = {"response_format": by_schema(DAYS, strict=True), "seed": seed}
    whole = ask(server, **options)
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(whole.choices[0].message.content), DAYS)
    chunks = list(ask(server, stream=True, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_answers_with_and_without_a_form_share_a_batch(server: Served) -> None:
    """Each is the same as alone, so a form touches its own row only."""
    import jsonschema

    requests: list[dict[str, Any]] = [{"seed": n, "temperature": 0.8, "max_tokens": 120} for n in range(8)]
    for number in (1, 3, 4):
        requests[number] |= {"response_format": by_schema(DAYS), "max_tokens": 400}
    alone = [ask(server, **request).choices[0].message.content for request in requests]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: ask(server, **request), requests))
    assert [answer.choices[0].message.content for answer in answers] == alone
    for number in (1, 3, 4):
        assert answers[number].choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(alone[number]), DAYS)
    assert "{" not in alone[0][:1]


def test_json_object_is_an_object(server: Served) -> None:
    # The model's favourite token within strings goes on for ever, so all strings end at once.
    for seed in range(3):
        answer = ask(server, response_format={"type": "json_object"}, seed=seed, max_tokens=1500)
        text = answer.choices[0].message.content
        assert text.lstrip().startswith("{")
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_openais_parse_gives_objects_and_calls(server: Served) -> None:
    import openai

    parsed = server.client.chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=Steps, temperature=1, seed=3, max_tokens=400
    )
    assert isinstance(parsed.choices[0].message.parsed, Steps)
    called = server.client.chat.completions.parse(
        model=server.model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Steps)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        seed=3,
        max_tokens=400,
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.name == "Steps"
    assert isinstance(call.function.parsed_arguments, Steps)
    with server.client.chat.completions.stream(
        model=server.model, messages=MESSAGES, response_format=Steps, temperature=1, seed=3, max_tokens=400
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"find_day", "call"}), ({"type": "function", "function": {"name": "call"}}, {"call"})],
)
def test_a_required_tool_is_called_with_arguments_of_its_schema(
    server: Served, choice: Any, names: set[str]
) -> None:
    import jsonschema

    for seed in range(3):
        options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        answer = ask(server, **options)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
        chunks = list(ask(server, stream=True, **options))
        parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or ()]
        assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_strict_tool_need_not_be_called(server: Served) -> None:
    text = ask(server, tools=[tool("find_day", strict=True)], max_tokens=24)
    assert text.choices[0].message.content
    assert not text.choices[0].message.tool_calls


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"response_format": by_schema({"type": "object", "not": {"required": ["a"]}})}, "response_format", '"not"'),
        ({"response_format": by_schema({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"response_format": by_schema({"$ref": "http://127.0.0.1/schema"})}, "response_format", "127.0.0.1"),
        ({"response_format": by_schema({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": by_schema({"$ref": "#"})}, "response_format", "nothing can be written"),
        ({"response_format": by_schema({"type": "object", "properties": {"a": False}, "required": ["a"]})}, "response_format", "'a' is unsatisfiable"),
        ({"response_format": by_schema({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(3000)}})}, "response_format", "items"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format", "type"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "fly"),
        (
            {"tools": [TOOLS[0], {"type": "function", "function": {"name": "call", "parameters": {"type": "object", "if": {}}}}], "tool_choice": "required"},
            "tools", "the function call",
        ),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_kept_is_refused_with_its_reason(
    server: Served, options: dict[str, Any], param: str, said: str
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **options)
    assert caught.value.param == param
    assert said in caught.value.body["message"]  # type: ignore[index]
