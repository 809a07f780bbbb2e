"""Thoughts apart from answers: in pieces of text, and with templates that let a model think.

Run: pytest tests/front/serve/test_thoughts.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests import needs
from tests.front.serve.conftest import TEMPLATE, Serve, Served
from unisono.front.serve.answer_reader import AnswerReader, ThoughtText
from unisono.trainer.plan.talk_messages import Thought
from unisono.trainer.plan.tool_calls import ToolCallReader

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS: list[tuple[Thought, str, str, str, int]] = [
    ("none", "It is Tuesday.", "", "It is Tuesday.", 0),
    ("none", "<think>\n\n</think>", "", "<think>\n\n</think>", 0),
    ("possible", "It is Tuesday.", "", "It is Tuesday.", 0),
    ("possible", "<think>\nwhat day\n\nis it?\n</think>\n\nIt is Tuesday.", "what day\n\nis it?", "It is Tuesday.", 0),
    ("possible", "\n<think>a < b</think>so", "a < b", "so", 0),
    ("possible", "<thin air", "", "<thin air", 0),
    ("possible", "  <b>", "", "  <b>", 0),
    ("possible", "<think>\n\n</think>\n\nIt is.", "", "It is.", 0),
    ("possible", "<think>what</thi", "what</thi", "", 0),
    ("possible", f"<think>I look.</think>\n{CALL}", "I look.", "", 1),
    ("open", "what day\n</think>\n\nIt is Tuesday. </think>", "what day", "It is Tuesday. </think>", 0),
    ("open", "what day is", "what day is", "", 0),
    ("open", f"</think>{CALL}", "", "", 1),
]  # fmt: skip


def read(thought: Thought, pieces: list[str]) -> tuple[str, str, int]:
    """Thought, text and number of calls of an answer in pieces."""
    reader = AnswerReader(thought, ToolCallReader({"add"}))
    parts = [part for piece in pieces for part in reader.push(piece)] + [*reader.close()]
    assert sum(isinstance(part, dict) for part in parts) == reader.calls
    texts = "".join(part for part in parts if isinstance(part, str))
    return "".join(part.text for part in parts if isinstance(part, ThoughtText)), texts, reader.calls


@pytest.mark.parametrize(("thought", "answer", "thinks", "says", "calls"), ANSWERS)
def test_thoughts_are_apart_from_texts_and_calls(
    thought: Thought, answer: str, thinks: str, says: str, calls: int
) -> None:
    assert read(thought, [answer]) == (thinks, says, calls)
    assert read(thought, list(answer)) == (thinks, says, calls)


@given(st.sampled_from(ANSWERS), st.data())
def test_the_pieces_of_an_answer_do_not_matter(case: Any, data: st.DataObject) -> None:
    thought, answer, *wanted = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(thought, pieces) == tuple(wanted)


THINKING = TEMPLATE.replace(
    "<|assistant|>{% endif %}",
    "<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}{% endif %}",
)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture
def thinker(serve: Serve, endless: Path, tmp_path: Path) -> Served:
    """A server of the endless model with a template that lets it think."""
    shutil.copytree(endless, tmp_path / "thinker")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "thinker")
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(tmp_path / "thinker")
    return serve(tmp_path / "thinker")


@pytest.mark.slow
def test_a_template_opens_a_thought_or_none(thinker: Served) -> None:
    def ask(*, stream: bool = False, **body: Any) -> Any:
        settings: Any = {"temperature": 0, "max_tokens": 20, "stream": stream}
        messages: Any = [{"role": "user", "content": "what day is it"}]
        return thinker.client.chat.completions.create(
            model=thinker.model, messages=messages, **settings, **body
        )

    free = ask().choices[0].message
    assert free.content
    assert not hasattr(free, "reasoning_content")
    opened: Any = {"extra_body": {"chat_template_kwargs": {"opens": True}}}
    thought = ask(**opened).choices[0].message
    assert thought.content == ""
    assert thought.reasoning_content
    chunks = [chunk.choices[0].delta for chunk in ask(stream=True, **opened)]
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks)
    assert streamed == thought.reasoning_content
    assert not any(delta.content for delta in chunks)
    quiet = ask(reasoning_effort="none")
    by_name = ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert quiet.choices[0].message.content == by_name.choices[0].message.content != free.content
    assert quiet.usage.prompt_tokens > ask().usage.prompt_tokens


@pytest.mark.slow
def test_a_schema_holds_for_what_follows_a_thought(thinker: Served) -> None:
    needs.package("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT}}
    ended = 0
    for opens, seed in ((False, 1), (False, 2), (False, 3), (True, 1)):
        reply = thinker.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "what day is it"}],
            response_format=form,
            chat_template_kwargs={"opens": opens},
            temperature=1,
            seed=seed,
            max_tokens=60,
        )
        (choice,) = reply.body["choices"]
        if opens:  # a model with random weights never ends its thought
            assert choice["finish_reason"] == "length"
            assert choice["message"]["reasoning_content"]
            assert choice["message"]["content"] == ""
        elif choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in range(10)
            ended += 1
    assert ended
