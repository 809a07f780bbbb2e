"""How the templates of LLaMA-Factory write tools, and calls of them, into a prompt: one format per family of models."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from unisono.data.rows import RowError

_DEFAULT = (
    "You have access to the following tools:\n{tools}"
    "Use the following format if using a tool:\n"
    "```\n"
    "Action: tool name (one of [{names}])\n"
    "Action Input: the input to the tool, in a JSON format representing the kwargs "
    '(e.g. ```{{"input": "hello world", "num_beams": 5}}```)\n'
    "```\n"
)
_GLM4 = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{tools}"
)
_GLM4_TOOL = "\n\n## {name}\n\n{body}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
_LLAMA3 = (
    "Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
    "You have access to the following functions. To call a function, please respond with JSON for a function call. "
    'Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. '
    "Do not use variables.\n\n{tools}"
)
_QWEN = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}"
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{{"name": <function-name>, '
    '"arguments": <args-json-object>}}\n</tool_call>'
)
_QWEN3_5 = (
    "\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>{tools}"
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: "
    "an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language "
    "BEFORE the function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge "
    "and do not tell the user about function calls\n</IMPORTANT>"
)

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function. `arguments` is the parsed JSON: an object, or what the row has in its place."""

    name: str
    arguments: Any


def dumps(value: Any) -> str:
    """JSON as the templates write it: with spaces, without escapes."""
    return json.dumps(value, ensure_ascii=False)


def write_tools(tool_format: str, tools: str, *, today: date) -> str:
    """The text on a row's tools, which follows its system message.

    Args:
        tool_format: of the template.
        tools: JSON, a list of function schemas.
        today: the date that some formats state.

    Raises:
        RowError: if `tools` is no such list, or a schema lacks a part that the format shows.
    """
    try:
        parsed = json.loads(tools)
    except (ValueError, RecursionError):
        raise RowError("tools is not valid JSON", "write a list of function schemas") from None
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise RowError("tools is not a list of function schemas", "write a list of function schemas")
    if not parsed:
        return ""
    try:
        return _FORMATS[tool_format].tools(parsed, today)
    except (KeyError, TypeError, AttributeError) as error:
        raise RowError(
            f"a function schema in tools lacks what the tool format {tool_format} shows: {error}",
            "write name, description and parameters: {type: object, properties: {…}}",
        ) from None


def write_calls(tool_format: str, calls: list[Call]) -> str:
    """The text of a turn that calls functions.

    Raises:
        RowError: if the format has no way to write these calls.
    """
    try:
        return _FORMATS[tool_format].calls(calls)
    except (AttributeError, TypeError):
        raise RowError(
            "the arguments of a function call are not an object", "write {name: …, arguments: {…}}"
        ) from None


def local_day() -> date:
    """Today, in the time zone of this machine."""
    return datetime.now().astimezone().date()


def _bare(tool: Tool) -> Tool:
    return tool["function"] if tool.get("type") == "function" else tool


def _wrapped(tool: Tool) -> Tool:
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _default_tools(tools: list[Tool], today: date) -> str:
    del today
    bare = [_bare(tool) for tool in tools]
    return _DEFAULT.format(
        tools="".join(map(_default_tool, bare)), names=", ".join(tool["name"] for tool in bare)
    )


def _default_tool(tool: Tool) -> str:
    parameters = tool["parameters"]
    lines = [
        _parameter(name, schema, needed=name in parameters.get("required", []))
        for name, schema in parameters["properties"].items()
    ]
    about = tool.get("description", "")
    return f"> Tool Name: {tool['name']}\nTool Description: {about}\nTool Args:\n{''.join(lines)}\n"


def _parameter(name: str, schema: dict[str, Any], *, needed: bool) -> str:
    kind = f"{schema.get('type', '')}{', required' if needed else ''}"
    choices = f", should be one of [{', '.join(schema['enum'])}]" if schema.get("enum") else ""
    items = f", where each item should be {schema['items'].get('type', '')}" if schema.get("items") else ""
    return f"  - {name} ({kind}): {schema.get('description', '')}{choices}{items}\n"


def _default_calls(calls: list[Call]) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {dumps(call.arguments)}" for call in calls)


def _glm4_tools(tools: list[Tool], today: date) -> str:
    del today
    shown = (
        _GLM4_TOOL.format(name=tool["name"], body=json.dumps(tool, indent=4, ensure_ascii=False))
        for tool in map(_bare, tools)
    )
    return _GLM4.format(tools="".join(shown))


def _glm4_calls(calls: list[Call]) -> str:
    if len(calls) > 1:
        raise RowError(
            f"a turn calls {len(calls)} functions; the tool format glm4 allows one",
            "write one call a turn, or remove the row",
        )
    return f"{calls[0].name}\n{dumps(calls[0].arguments)}"


def _llama3_tools(tools: list[Tool], today: date) -> str:
    shown = (json.dumps(_wrapped(tool), indent=4, ensure_ascii=False) + "\n\n" for tool in tools)
    # strftime would use the language of the process
    day = f"{today.day:02d} {_MONTHS[today.month - 1]} {today.year:04d}"
    return _LLAMA3.format(date=day, tools="".join(shown))


def _llama3_calls(calls: list[Call]) -> str:
    written = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return dumps(written[0] if len(written) == 1 else written)


def _mistral_tools(tools: list[Tool], today: date) -> str:
    del today
    return f"[AVAILABLE_TOOLS] {dumps([_wrapped(tool) for tool in tools])}[/AVAILABLE_TOOLS]"


def _mistral_calls(calls: list[Call]) -> str:
    return dumps([{"name": call.name, "arguments": call.arguments} for call in calls])


def _qwen_tools(tools: list[Tool], today: date) -> str:
    del today
    return _QWEN.format(tools="".join("\n" + dumps(_wrapped(tool)) for tool in tools))


def _qwen_calls(calls: list[Call]) -> str:
    written: Iterable[str] = (dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


def _qwen3_5_tools(tools: list[Tool], today: date) -> str:
    del today
    bare = (tool.get("function", tool) if tool.get("type") == "function" else tool for tool in tools)
    return _QWEN3_5.format(tools="".join("\n" + dumps(tool) for tool in bare))


def _qwen3_5_calls(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>"
        + "".join(
            f"\n<parameter={name}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>"
            for name, value in call.arguments.items()
        )
        + "\n</function>\n</tool_call>"
        for call in calls
    )


@dataclass(frozen=True, slots=True)
class _Format:
    tools: Callable[[list[Tool], date], str]
    calls: Callable[[list[Call]], str]


_FORMATS = {
    "default": _Format(_default_tools, _default_calls),
    "glm4": _Format(_glm4_tools, _glm4_calls),
    "llama3": _Format(_llama3_tools, _llama3_calls),
    "mistral": _Format(_mistral_tools, _mistral_calls),
    "qwen": _Format(_qwen_tools, _qwen_calls),
    "qwen3_5": _Format(_qwen3_5_tools, _qwen3_5_calls),
}
