"""The tokens between two turns: those of the chat template, and no token of the model is made
again.

Run: pytest tests/trainer/objectives/environments/test_turns.py
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema

from unisono.base.errors import ConfigError
from unisono.trainer.data import RowError
from unisono.trainer.data.encode import Encoder
from unisono.trainer.model.directory import locate_model
from unisono.trainer.objectives.environments.episode_calls import RequestedCall
from unisono.trainer.objectives.environments.turns import TurnWriter

TOOLS = "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
CALLS = (
    "{% for call in m['tool_calls'] or [] %}<tool_call>{\"name\": \"{{ call['function']['name'] }}\","
    " \"arguments\": {{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}"
)
GIVEN = "{% if m['role'] == 'tool' %}= {{ m['content'] }}\n{% else %}"
ANSWER = (
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    + CALLS
    + "{{ eos_token + '\\n' }}{% else %}{{ '\\n' }}{% endif %}"
)
PLAIN = TOOLS + "{% for m in messages %}" + GIVEN + ANSWER + "{% endif %}{% endfor %}"
# Changes its beginning with each message.
REWRITES = (
    TOOLS + "{{ messages | length }}\n{% for m in messages %}" + GIVEN + ANSWER + "{% endif %}{% endfor %}"
)
WITHOUT_STOP = PLAIN.replace("{{ eos_token + '\\n' }}", "")
WITHOUT_TOOLS = PLAIN.removeprefix(TOOLS)
WITHOUT_RESULTS = PLAIN.replace("= {{ m['content'] }}\n", "")
QUESTION = [{"role": "user", "content": "what does tea cost?"}]


def price(item: str) -> int:
    """The price of something.

    Args:
        item: what to buy
    """
    return len(item)


def writer(tmp_path: Path, template: str) -> TurnWriter:
    directory = locate_model("builtin:tiny")
    (tmp_path / "t.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encoder = Encoder(
        tokenizer, directory=directory, template_file=str(tmp_path / "t.jinja"), check_template=False
    )
    return TurnWriter(encoder, tokenizer, [get_json_schema(price)], {tokenizer.eos_token_id})


CALL = RequestedCall("000000000", "price", {"item": "tea"})


def test_what_follows_a_turn_is_what_the_template_writes_behind_its_stop_token(tmp_path: Path) -> None:
    write = writer(tmp_path, PLAIN)
    first = write.begin(QUESTION)
    assert write.tokenizer.decode(first.tokens).endswith("}}}\nwhat does tea cost?\n")
    second, following = write.follow(first, [CALL], ["7"])
    assert write.tokenizer.decode(following) == "\n= 7\n"
    assert second.tokens[-len(following) :] == following
    third, following = write.follow(second, [CALL, CALL], ["8", "9"])
    assert write.tokenizer.decode(following) == "\n= 8\n= 9\n"
    assert [message["role"] for message in third.messages] == [
        "user", "assistant", "tool", "assistant", "tool", "tool",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            REWRITES,
            "the chat template rewrites what the model has read: '1\\nwhat does tea cost' at token 1",
        ),
        (WITHOUT_STOP, "the chat template writes no stop token between a turn of the model and"),
        (WITHOUT_TOOLS, "is not rendered by the chat template"),
        (WITHOUT_RESULTS, "is not rendered by the chat template"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
    ids=["rewrites", "no stop", "no tools", "no results", "refuses"],
)
def test_templates_that_cannot_carry_an_environment_are_refused(
    tmp_path: Path, template: str, why: str
) -> None:
    with pytest.raises(ConfigError) as error:
        writer(tmp_path, template).check(QUESTION, environment="shop.py:Shop")
    (problem,) = error.value.problems
    assert "with the tools of shop.py:Shop" in problem.what
    assert why in problem.why
    assert "data.template" in problem.fix


def test_a_good_template_is_accepted(tmp_path: Path) -> None:
    writer(tmp_path, PLAIN).check(QUESTION, environment="shop.py:Shop")


def test_a_rewriting_in_a_later_turn_names_its_place(tmp_path: Path) -> None:
    late = PLAIN.replace(TOOLS, TOOLS + "{% if messages | length > 4 %}long{% endif %}")
    write = writer(tmp_path, late)
    second, _ = write.follow(write.begin(QUESTION), [CALL], ["7"])
    with pytest.raises(RowError, match="becomes 'long"):
        write.follow(second, [CALL], ["8"])


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("It costs 7.", "It costs 7.", []),
        ('I look.<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>', "I look.", [{"item": "tea"}]),
        ('{"name": "price", "parameters": {"item": "tea"}}', "", [{"item": "tea"}]),
        ('<tool_call>{"name": "price", "arguments": {"item"', '<tool_call>{"name": "price", "arguments": {"item"', []),
        (
            '<think><tool_call>{"name": "price", "arguments": {}}</tool_call></think>no',
            '<think><tool_call>{"name": "price", "arguments": {}}</tool_call></think>no',
            [],
        ),
    ],
    ids=["none", "tagged", "bare", "incomplete", "in a thought"],
)  # fmt: skip
def test_calls_of_a_turn(tmp_path: Path, text: str, said: str, calls: list[Any]) -> None:
    write = writer(tmp_path, PLAIN)
    given_text, given_calls = write.calls_in(write.tokenizer.encode(text, add_special_tokens=False))
    assert given_text == said
    assert [call.arguments for call in given_calls] == calls
    assert [call.id for call in given_calls] == [f"{number:09d}" for number in range(len(calls))]


@given(results=st.lists(st.text(alphabet="abc 0123<>|=\n", max_size=20), min_size=1, max_size=3))
def test_no_result_changes_what_was_before_it(
    results: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    write = writer(tmp_path_factory.mktemp("turns"), PLAIN)
    first = write.begin(QUESTION)
    try:
        second, following = write.follow(first, [CALL] * len(results), results)
    except RowError as error:
        assume("is not rendered" not in error.why)  # an empty result
        raise
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert write.tokenizer.decode(following) == "\n" + "".join(f"= {one}\n" for one in results)
