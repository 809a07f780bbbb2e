"""OpenAI's protocol of responses, with its client.

Run: pytest tests/front/serve/test_responses.py
"""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests import needs
from tests.front.serve.conftest import Served
from unisono.front.serve.answer_reader import AnswerReader
from unisono.front.serve.responses import ResponseObjects, ResponseRequest
from unisono.trainer.plan.talk_messages import Answered, AnswerPiece
from unisono.trainer.plan.tool_calls import ToolCallReader

pytestmark = pytest.mark.slow
QUESTION = "what day is it"
TOOL: Any = {"type": "function", "name": "find_day", "description": "of the week", "strict": True, "parameters": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"], "additionalProperties": False}}  # fmt: skip


class Day(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["monday", "tuesday"]
    is_late: bool


def respond(served: Served, given: Any = QUESTION, **options: Any) -> Any:
    settings: Any = {"temperature": 0, "max_output_tokens": 12} | options
    return served.client.responses.create(model=served.model, input=given, **settings)


def test_a_response_is_the_answer_of_a_chat(server: Served) -> None:
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
    chat = server.client.chat.completions.create(
        model=server.model, messages=messages, temperature=0, max_tokens=12
    )
    wanted = chat.choices[0].message.content
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for given in (QUESTION, [{"role": "user", "content": QUESTION}], parts):
        response = respond(server, given, instructions="be brief")
        assert response.output_text == wanted
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
        assert response.usage.output_tokens == 12


def test_a_stream_has_the_events_of_the_response(server: Served) -> None:
    events = list(respond(server, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]  # fmt: skip
    assert [event.sequence_number for event in events] == [*range(len(events))]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == respond(server).output_text == events[-1].response.output_text
    with server.client.responses.stream(
        model=server.model, input=QUESTION, temperature=0, max_output_tokens=12
    ) as stream:
        for _ in stream:
            pass


def test_a_response_follows_a_schema_and_calls_tools(server: Served) -> None:
    needs.package("llguidance")
    parsed = server.client.responses.parse(
        model=server.model, input=QUESTION, text_format=Day, temperature=1, max_output_tokens=400
    )
    assert isinstance(parsed.output_parsed, Day)
    assert parsed.status == "completed"
    called = respond(
        server, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200
    )
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "find_day")
    assert json.loads(call.arguments)["n"] in range(1, 10)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "tuesday"}
    again = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), output]
    assert respond(server, again, tools=[TOOL], tool_choice="none").output_text


def test_thoughts_texts_and_calls_are_items_in_their_order() -> None:
    request = ResponseRequest.model_validate({"model": "m", "input": "hello"})
    answer = 'I look.</think>So:\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    objects = ResponseObjects(request, AnswerReader("open", ToolCallReader({"add"})), 7)
    events = [*objects.begin()]
    for character in answer:
        events += objects.take(AnswerPiece(1, character))
    events += objects.take(Answered(1, 40, "stop"))
    whole: Any = objects.whole()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert [item["status"] for item in whole["output"]] == ["completed"] * 3
    assert whole["output"][0]["content"][0]["text"] == "I look."
    assert whole["output"][1]["content"][0]["text"] == "So:"
    assert whole["output"][2]["arguments"] == '{"a": 1}'
    assert events[-1]["type"] == "response.completed"
    done: Any = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["type"] for event in done] == ["reasoning", "message", "function_call"]
    assert [event["output_index"] for event in done] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort"),
    ],
)
def test_what_needs_more_is_refused_with_its_parameter(
    server: Served, options: dict[str, Any], param: str
) -> None:
    reply = server.post("/v1/responses", **{"input": QUESTION, **options})
    assert reply.status == 400
    assert reply.body["error"]["param"] == param, reply.body
