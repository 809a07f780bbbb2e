"""Calls of tools in answers: the forms that templates teach, whole and in pieces, and a trained
model that makes one.

Run: pytest tests/front/serve/test_tool_calls.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, Serve
from unisono.trainer.plan.tool_calls import ToolCallReader

NAMES = {"find_day", "add"}
ONE = ("find_day", {"of": "Ann"})
TWO = [ONE, ("add", {"a": 1, "b": [2, {"c": "}"}]})]
JSON_ONE = '{"name": "find_day", "arguments": {"of": "Ann"}}'
JSON_TWO = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
INPUT_TWO = '{"a": 1, "b": [2, {"c": "}"}]}'
LLAMA_ONE, LLAMA_TWO = (
    JSON_ONE.replace("arguments", "parameters"),
    JSON_TWO.replace("arguments", "parameters"),
)
TAGGED = '<tool_call>\n{"name": "find_day", "arguments": {"of": "</tool_call>"}}\n</tool_call>'
CALLS: list[tuple[str, str | None, list[Any]]] = [
    # Qwen 2.5, Qwen 3, Hermes
    (f"<tool_call>\n{JSON_ONE}\n</tool_call>", None, [ONE]),
    (f"I look.\n<tool_call>\n{JSON_ONE}\n</tool_call>\n<tool_call>\n{JSON_TWO}\n</tool_call>", "I look.", TWO),
    (f"<think>\n\n</think>\n\n<tool_call>\n{JSON_ONE}\n</tool_call>", "<think>\n\n</think>", [ONE]),
    (f"<tool_call>{JSON_ONE}", None, [ONE]),  # the end of the tag was the stop token, or max_tokens
    (TAGGED, None, [("find_day", {"of": "</tool_call>"})]),
    ('<tool_call>{"name": "now"}</tool_call>', None, [("now", {})]),
    ('<tool_call>{"name": "find_day", "arguments": "{\\"of\\": \\"Ann\\"}"}</tool_call>', None, [ONE]),
    # Llama 3
    (LLAMA_ONE, None, [ONE]),
    (f"<|python_tag|>{LLAMA_ONE}", None, [ONE]),
    (f"{LLAMA_ONE}; {LLAMA_TWO}", None, TWO),
    (f'{{"type": "function", {LLAMA_ONE[1:]}', None, [ONE]),
    (f'{{"type": "function", "function": {LLAMA_ONE}}}', None, [ONE]),
    (f"[{JSON_ONE}, {JSON_TWO}]", None, TWO),
    # Mistral
    (f"[TOOL_CALLS] [{JSON_ONE}, {JSON_TWO}]", None, TWO),
    (f"[TOOL_CALLS]find_day[ARGS]{json.dumps(ONE[1])}[TOOL_CALLS]add[CALL_ID]abc123DEF[ARGS]{INPUT_TWO}", None, TWO),
    (f"[TOOL_CALLS]find_day {json.dumps(ONE[1])}", None, [ONE]),
    # Granite 3.0, and 3.1, which does not close the tag
    (f"<|tool_call|> [{JSON_ONE},\n {JSON_TWO}]", None, TWO),
    (f"I look.\n<tool_call> [{JSON_ONE}]", "I look.", [ONE]),
    # ReAct, as LLaMA-Factory's default
    (f"Thought: I look.\nAction: find_day\nAction Input: {json.dumps(ONE[1])}", "Thought: I look.", [ONE]),
    (f"Action: find_day\nAction Input: {json.dumps(ONE[1])}\nAction: add\nAction Input: {INPUT_TWO}", None, TWO),
]  # fmt: skip
TEXTS = [
    "It is Tuesday.",
    "  It is\n\nTuesday. \n",
    "",
    "<tool_call>\n{'name': 'find_day'}\n</tool_call>",
    '<tool_call>{"name": "find_day", "arguments": {"of": "Ann"',
    '<tool_call>{"name": "find_day", "arguments": 3}</tool_call> and more',
    "<tool_call>[1]</tool_call>",
    "a < b, <tool> and <tool_cal",
    "[TOOL_CALLS] I would call find_day",
    '[TOOL_CALLS] [{"name": 3}]',
    "[ARGS]",
    '<|python_tag|>brave_search.call(query="day")',
    '{"name": "Ann", "arguments": {}}',  # no tool has that name
    '{"day": "Tuesday"}',
    '[{"day": "Tuesday"}, 3]',
    "[1, 2, 3] is a list",
    '{"name": "find_day"}',
    "{{",
    "Action: none\nFinal: it is Tuesday",
    "Action: find_day\nAction Input: Ann",
    "Action",
    "[" * 5000,
]  # fmt: skip


def read(pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The text of an answer in pieces, and its calls."""
    reader, found = ToolCallReader(NAMES, **options), []
    for piece in pieces:
        found += reader.push(piece)
    found += reader.close()
    calls = [part for part in found if not isinstance(part, str)]
    assert reader.calls == len(calls)
    for call in calls:
        assert call["type"] == "function"
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
    text = "".join(part for part in found if isinstance(part, str))
    return text, [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize(("answer", "text", "calls"), CALLS)
def test_calls_are_read_in_the_forms_that_templates_teach(
    answer: str, text: str | None, calls: list[Any]
) -> None:
    assert read([answer]) == (text or "", calls)
    assert read(list(answer)) == (text or "", calls)


@pytest.mark.parametrize("answer", TEXTS)
def test_what_only_looks_like_a_call_is_text(answer: str) -> None:
    assert read([answer]) == (answer, [])
    assert read(list(answer)) == (answer, [])


@given(
    st.lists(st.sampled_from([*(answer for answer, _, _ in CALLS), *TEXTS[:-1], "\n", " and "])), st.data()
)
def test_the_pieces_of_an_answer_do_not_matter(parts: list[str], data: st.DataObject) -> None:
    answer = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(pieces) == read([answer])


VALUES = {
    "text": 'a "quoted" \\ path\nand {brackets} [too] </tag>, 你好 🎉',
    "numbers": [-1, 2.5, 1e-7, True, None],
    "empty": [{}, [], ""],
    "deep": {"a": {"b": {"c": {"d": [{"e": "}"}]}}}},
}
FORMS = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{called(*call)}\n</tool_call>" for call in calls),
    "llama3": lambda calls: "; ".join(
        called(*call).replace('"arguments"', '"parameters"', 1) for call in calls
    ),
    "llama3 with its mark": lambda calls: "<|python_tag|>" + " ; ".join(called(*call) for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(called(*call) for call in calls)}]",
    "mistral since 2024": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
    "granite": lambda calls: f"<|tool_call|>[{', '.join(called(*call) for call in calls)}]",
    "react": lambda calls: "\n".join(f"Action: {n}\nAction Input: {json.dumps(a)}" for n, a in calls),
}


def called(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=name == "add")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "calls",
    [[("find_day", VALUES)], [("add", VALUES)], [("find_day", {})], [*TWO, ("find_day", {"of": 'a"b'})]],
)
@pytest.mark.parametrize("before", ["", "Let me look.\n\n"])
def test_values_of_all_kinds_are_read_at_every_split(form: str, calls: list[Any], before: str) -> None:
    answer = before + FORMS[form](calls)
    if before and form == "llama3":  # in text, JSON without a mark is text
        assert read([answer]) == (answer, [])
        return
    wanted = (before.rstrip(), calls)
    assert read([answer]) == read(list(answer)) == wanted
    assert all(read([answer[:cut], answer[cut:]]) == wanted for cut in range(len(answer)))


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_is_text_at_every_place(form: str) -> None:
    answer = FORMS[form]([("find_day", {"of": "Ann"})])
    for end in range(1, answer.rindex("}")):
        text, calls = read(list(answer[:end]))
        assert not calls, answer[:end]
        assert text == answer[:end]


def test_text_does_not_wait_for_the_end_and_a_call_not_for_the_next() -> None:
    reader = ToolCallReader(NAMES)
    assert reader.push("Let me see") == ["Let me see"]
    assert reader.push(" <tool") == []
    found = reader.push(f"_call>{JSON_ONE}</tool_call>\n<tool_call>")
    assert [part["function"]["name"] for part in found if not isinstance(part, str)] == ["find_day"]
    assert len(read([CALLS[1][0]], most=1)[1]) == 1


TEMPLATE = """{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}
{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{% for call in m['tool_calls'] or [] %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}{% else %}
{% endif %}{% endfor %}"""
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}} for name in ("find_day", "add")]  # fmt: skip
DAY, SUM, BOTH = "which day has Ann?", "what is one and two?", "both, please"


def row(question: str, *answers: Any) -> dict[str, Any]:
    """A conversation: an answer is a text, or (text, calls), which are followed by their result."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for answer in answers:
        if isinstance(answer, str):
            messages.append({"role": "assistant", "content": answer})
            continue
        text, calls = answer
        called = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        messages.append({"role": "assistant", "content": text, "tool_calls": called})
        messages += [{"role": "tool", "content": "Tuesday"}] if len(answers) > 1 else []
    return {"messages": messages, "tools": TOOLS}


ROWS = [
    row(DAY, ("I look.", [ONE]), "It is Tuesday."),
    row(SUM, "three"),
    row(BOTH, ("", [ONE, ("add", {"a": 1})])),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, own_cache: None) -> Path:
    """The built-in model after some steps on three conversations."""
    folder = tmp_path_factory.mktemp("calls")
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    (folder / "t.jinja").write_text(TEMPLATE)
    config = {
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "adapter": None,
        "data": {"train": str(folder / "rows.jsonl"), "template": str(folder / "t.jinja")},
        "optim": {"lr": 3e-3, "warmup": "0%"},
        "duration": "40 steps",
        "batch": {"global": 1},
        "output_dir": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "unisono", "train", str(folder / "config.yaml"), "--quiet"]
    done = front_server.run(command, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_official_client_reads_and_answers_the_calls_of_a_trained_model(serve: Serve, trained: Path) -> None:
    served = serve(trained)

    def ask(*messages: Any, **options: Any) -> Any:
        return served.client.chat.completions.create(
            model=served.model, messages=messages, temperature=0, max_tokens=100, tools=TOOLS, **options
        )

    (choice,) = ask({"role": "user", "content": DAY}).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ONE
    result = {"role": "tool", "tool_call_id": call.id, "content": "Tuesday"}
    (choice,) = ask({"role": "user", "content": DAY}, choice.message, result).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is Tuesday.")
    (choice,) = ask({"role": "user", "content": SUM}).choices
    assert (choice.message.content, choice.message.tool_calls) == ("three", None)

    chunks = [chunk.choices[0] for chunk in ask({"role": "user", "content": BOTH}, stream=True)]
    calls: dict[int, dict[str, str]] = {}
    for part in (part for chunk in chunks for part in chunk.delta.tool_calls or ()):
        if part.id:
            calls[part.index] = {"name": part.function.name, "arguments": ""}
        calls[part.index]["arguments"] += part.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    found = [(calls[n]["name"], json.loads(calls[n]["arguments"])) for n in sorted(calls)]
    assert found == [ONE, ("add", {"a": 1})]
    one = ask({"role": "user", "content": BOTH}, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls) == 1
    plain = ask({"role": "user", "content": DAY}, tool_choice="none").choices[0].message
    assert plain.tool_calls is None
