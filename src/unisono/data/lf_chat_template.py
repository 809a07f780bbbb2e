"""A template of LLaMA-Factory as a chat template: a Jinja text for others, and the exact tokens of prompts for us."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.config.lf_template import CONTENT, LfTemplate, Slot, Slots, Token, stop_ids
from unisono.data.lf_pieces import (
    DEFAULT_TOOLS,
    LLAMA3_TOOLS,
    QWEN_TOOLS,
    Ids,
    PieceTokens,
    Writer,
    local_day,
)
from unisono.data.lf_rows import JOINT, read_exchange
from unisono.data.rows import Message
from unisono.data.template import ChatTemplate


@dataclass(frozen=True)
class LfChatTemplate(ChatTemplate):
    """A template of LLaMA-Factory as a chat template, which gives prompts in exactly the tokens of training.

    Attributes:
        writer: of the prompts.
    """

    writer: Writer | None = None

    def prompt_ids(self, messages: Sequence[Message]) -> Ids:
        """The tokens of a conversation up to an answer.

        Raises:
            RowError: if the template has no way to write a message.
        """
        assert self.writer is not None
        asked = [*messages, {"role": "assistant", "content": ""}]
        exchange = read_exchange("messages", {"messages": asked}, {})
        pair = self.writer.question(exchange, exchange.answers[0])
        return PieceTokens(self.tokenizer).of([pair.source])[0]


def lf_chat_template(tokenizer: Any, template: LfTemplate, *, thinking: bool | None) -> LfChatTemplate:
    """The chat template of an adapted tokenizer."""
    stops = tuple(str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(stop_ids(tokenizer, template)))
    text = jinja_of(template, tokenizer, thinking=thinking)
    writer = Writer(template, thinking, local_day())
    return LfChatTemplate(tokenizer, text, f"LLaMA-Factory's {template.name}", stops, writer)


# ---- as Jinja

_JINJA = """\
{PREFIX}{DEFAULT}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] or system_message %}{% else %}{% set loop_messages = messages %}{% endif %}\
{TOOLS}{SYSTEM}{% for message in loop_messages %}{% set content = message['content'] or '' %}\
{FIRST}{% if message['role'] == 'user' %}{USER}{% elif message['role'] == 'tool' %}{OBSERVATION}\
{% elif message['role'] == 'assistant' %}\
{% if message['tool_calls'] %}{CALLS}{% else %}{THOUGHT}{ASSISTANT}{% endif %}{% else %}{{ raise_exception('a message has the role ' ~ message['role']) }}{% endif %}{% endfor %}{PROMPT}"""
"""Names in braces are replaced by `jinja_of`. The begin of an answer is a part of the question before it, as in the slots."""


def jinja_of(template: LfTemplate, tokenizer: Any, *, thinking: bool | None) -> str:
    """The text of a chat template that renders questions and answers as the slots do.

    Thoughts of earlier answers are left out, and the prompt has an empty thought if `thinking` is not true: this is how a model
    that was trained with the template is asked. Tools and calls are written in three of the tool formats; the others raise an
    exception where there are some.

    Args:
        template: of LLaMA-Factory.
        tokenizer: adapted to it.
        thinking: data.thinking.
    """

    def written(slots: Slots, value: str) -> str:
        parts = [_expression(slot, tokenizer, value) for slot in slots]
        return "{{ " + " ~ ".join(part for part in parts if part) + " }}" if any(parts) else ""

    whole_system = written(template.system, "(system_message ~ tools_text)")
    first = ""
    if template.system_in_user:
        joined = _expression(template.system[0], tokenizer, "(system_message ~ tools_text)")
        first = (
            "{% if loop.first and (system_message or tools_text) %}{% set content = "
            + joined
            + " ~ content %}{% endif %}"
        )
        whole_system = ""
    elif whole_system:
        whole_system = f"{{% if system_message or tools_text %}}{whole_system}{{% endif %}}"
    thought = ""
    if template.reasoning:
        begin, end = (_quoted(word) for word in template.thought)
        thought = f"{{% if {begin} in content and {end} in content %}}{{% set content = content.split({end})[-1] %}}{{% endif %}}"
        thought += "{% set content = content.lstrip('\\n') %}"
        if thinking is not False:
            thought = "{% if not loop.last %}" + thought + "{% endif %}"
    asks = template.reasoning and not thinking
    prompt = "{% if add_generation_prompt %}{{ " + _quoted(template.empty_thought) + " }}{% endif %}"
    parts = {
        "{PREFIX}": written(template.prefix, "''"),
        "{DEFAULT}": f"{{% set system_message = {_quoted(template.default_system)} %}}",
        "{SYSTEM}": whole_system,
        "{FIRST}": first,
        "{USER}": written(template.user, "content"),
        "{OBSERVATION}": _observation(template, tokenizer),
        "{TOOLS}": _tools(template.tool_format),
        "{CALLS}": _calls(template.tool_format).replace(
            "{FUNCTION}", written(template.function, "calls_text")
        ),
        "{THOUGHT}": thought,
        "{ASSISTANT}": written(template.assistant, "content"),
        "{PROMPT}": prompt if asks else "",
    }
    return re.sub(r"\{[A-Z]+\}", lambda found: parts[found[0]], _JINJA)


_EACH = "{% for item in tools %}{% set tool = item['function'] if item['type'] == 'function' else item %}"
_WHOLE = "(item if item['type'] == 'function' else {'type': 'function', 'function': item})"
_PARAMETER = """\
{{ '  - ' ~ name ~ ' (' ~ (schema['type'] or '') ~ (', required' if name in needed else '') ~ '): ' ~ (schema['description'] or '') \
~ (', should be one of [' ~ schema['enum'] | join(', ') ~ ']' if schema['enum'] else '') \
~ (', where each item should be ' ~ (schema['items']['type'] or '') if schema['items'] is mapping else '') ~ '\\n' }}"""
_DEFAULT_TOOL = (
    "{{ '> Tool Name: ' ~ tool['name'] ~ '\\nTool Description: ' ~ (tool['description'] or '') ~ '\\nTool Args:\\n' }}"
    "{% set needed = tool['parameters']['required'] or [] %}"
    "{% for name in tool['parameters']['properties'] %}{% set schema = tool['parameters']['properties'][name] %}"
    + _PARAMETER
    + "{% endfor %}{{ '\\n' }}{% endfor %}"
)
_DEFAULT_NAMES = _EACH + "{{ ('' if loop.first else ', ') ~ tool['name'] }}{% endfor %}"


def _tools(tool_format: str) -> str:
    """Sets `tools_text`, which follows the system message."""
    if tool_format == "default":
        before, between, after = DEFAULT_TOOLS.format(tools="\0", names="\0").split("\0")
        text = f"{_said(before)}{_EACH}{_DEFAULT_TOOL}{_said(between)}{_DEFAULT_NAMES}{_said(after)}"
    elif tool_format == "qwen":
        before, after = QWEN_TOOLS.format(tools="\0").split("\0")
        text = f"{_said(before)}{_EACH}{{{{ '\\n' ~ {_WHOLE} | tojson }}}}{{% endfor %}}{_said(after)}"
    elif tool_format == "llama3":
        before, between, _ = LLAMA3_TOOLS.format(date="\0", tools="\0").split("\0")
        each = f"{_EACH}{{{{ {_WHOLE} | tojson(indent=4) ~ '\\n\\n' }}}}{{% endfor %}}"
        text = f"{_said(before)}{{{{ strftime_now('%d %b %Y') }}}}{_said(between)}{each}"
    else:
        text = "{{ raise_exception('this chat template writes no tools') }}"
    return f"{{% set tools_text %}}{{% if tools %}}{text}{{% endif %}}{{% endset %}}"


def _calls(tool_format: str) -> str:
    """Writes a turn that calls functions; {FUNCTION} stands for the slots of such a turn around `calls_text`."""
    arguments = "(call['arguments'] if call['arguments'] is string else call['arguments'] | tojson)"
    as_json = "{{ '{\"name\": ' ~ call['name'] | tojson ~ ', \"KEY\": ' ~ " + arguments + " ~ '}' }}"
    separator = {"default": "\\n", "qwen": "\\n", "llama3": ", "}.get(tool_format)
    if separator is None:
        return "{{ raise_exception('this chat template writes no tool calls') }}"
    each = {
        "default": "{{ 'Action: ' ~ call['name'] ~ '\\nAction Input: ' ~ " + arguments + " }}",
        "qwen": "{{ '<tool_call>\\n' }}" + as_json.replace("KEY", "arguments") + "{{ '\\n</tool_call>' }}",
        "llama3": as_json.replace("KEY", "parameters"),
    }[tool_format]
    text = (
        "{% for item in message['tool_calls'] %}{% set call = item['function'] or item %}"
        f"{{{{ '' if loop.first else '{separator}' }}}}{each}{{% endfor %}}"
    )
    if tool_format == "llama3":  # several are a list
        some = "{% if message['tool_calls'] | length > 1 %}{{ 'BRACKET' }}{% endif %}"
        text = some.replace("BRACKET", "[") + text + some.replace("BRACKET", "]")
    return "{% set calls_text %}" + text + "{% endset %}{FUNCTION}"


def _observation(template: LfTemplate, tokenizer: Any) -> str:
    """The results of one turn's calls, which share the slots of one turn."""
    place = next(
        i for i, slot in enumerate(template.observation) if isinstance(slot, str) and CONTENT in slot
    )
    head, _, tail = str(template.observation[place]).partition(CONTENT)
    before = [_expression(slot, tokenizer, "") for slot in (*template.observation[:place], head)]
    after = [_expression(slot, tokenizer, "") for slot in (tail, *template.observation[place + 1 :])]

    def said(parts: list[str]) -> str:
        return "{{ " + " ~ ".join(part for part in parts if part) + " }}" if any(parts) else ""

    return (
        "{% if loop.first or loop.previtem['role'] != 'tool' %}"
        f"{said(before)}{{% else %}}{_said(JOINT)}{{% endif %}}{{{{ content }}}}"
        f"{{% if loop.last or loop.nextitem['role'] != 'tool' %}}{said(after)}{{% endif %}}"
    )


def _said(text: str) -> str:
    return "{{ " + _quoted(text) + " }}" if text else ""


def _expression(slot: Slot, tokenizer: Any, value: str) -> str:
    """A slot as a Jinja expression; "" for a special token that the tokenizer does not have."""
    if isinstance(slot, Token):
        text = (
            (tokenizer.bos_token if slot.name == "bos" else tokenizer.eos_token)
            if slot.special
            else slot.name
        )
        return _quoted(text) if text else ""
    before, found, after = slot.partition(CONTENT)
    parts = [_quoted(before) if before else "", value if found else "", _quoted(after) if after else ""]
    return " ~ ".join(part for part in parts if part)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
