"""From turns and tools to pieces, as the slots of LLaMA-Factory's templates write them, and from
pieces to tokens.

A row is a list of pairs (source, target): a question with all that stands before it, and its
answer. Both are lists of pieces, and each piece is tokenized for itself. Tools, and calls of them,
have one format per family of models.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Generic, TypeVar

from unisono.trainer.config.named_templates import NO_TOKEN
from unisono.trainer.config.sections import Thinking
from unisono.trainer.data import Exchange, RowError, Turn, grouped
from unisono.trainer.data.text_encoder import TextEncoder
from unisono.trainer.readers.llamafactory.template import CONTENT, LfTemplate, Slots, TokenSlot

DEFAULT_TOOLS = (
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
LLAMA3_TOOLS = (
    "Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
    "You have access to the following functions. To call a function, please respond with JSON for a function call. "
    'Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. '
    "Do not use variables.\n\n{tools}"
)
QWEN_TOOLS = (
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

Tool = dict[str, Any]  # a function schema, or a part of one, as a row has it


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function.

    `arguments` is the parsed JSON: an object, or what the row has in its place.
    """

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


def _bare(tool: Tool) -> Tool:
    return tool["function"] if tool.get("type") == "function" else tool


def _wrapped(tool: Tool) -> Tool:
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _default_tools(tools: list[Tool], today: date) -> str:
    del today
    bare = [_bare(tool) for tool in tools]
    return DEFAULT_TOOLS.format(
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


def _parameter(name: str, schema: Tool, *, needed: bool) -> str:
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
    return LLAMA3_TOOLS.format(date=day, tools="".join(shown))


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
    return QWEN_TOOLS.format(tools="".join("\n" + dumps(_wrapped(tool)) for tool in tools))


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


_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_BATCH_CHARACTERS = 1 << 22  # characters encoded at once

Piece = str | TokenSlot
Pieces = list[Piece]
Ids = list[int]


Part = TypeVar("Part", Pieces, Ids)


@dataclass
class QuestionAnswer(Generic[Part]):
    """A question with all that stands before it, and its answer: as pieces, or as tokens.

    Attributes:
        source: the question.
        target: the answer.
        weight: of the answer in the loss, from 0 to 1.
    """

    source: Part
    target: Part
    weight: float = 1.0


# ---- from turns to pieces


@dataclass(frozen=True)
class Writer:
    """Writes turns as pieces.

    Attributes:
        template: of LLaMA-Factory.
        thinking: data.thinking: whether an answer without a thought gets an empty one that is
            trained (true), or one that belongs to the question (false, null); false also removes
            thoughts; "preserve": as true, and earlier answers keep theirs.
        today: the date that some tool prompts state.
    """

    template: LfTemplate
    thinking: Thinking
    today: date

    def pairs(self, exchange: Exchange, *, last_only: bool) -> list[QuestionAnswer[Pieces]]:
        """All questions and answers of a conversation.

        Args:
            exchange: with one answer.
            last_only: whether only the last answer is trained; then the others have no thoughts.

        Raises:
            RowError: if the template has no way to write a turn.
        """
        turns = [*exchange.prompt, exchange.answers[0]]
        places = range(1, len(turns), 2)
        if self.template.reasoning:
            drops = last_only and self.thinking != "preserve"
            bare = places if self.thinking is False else places[:-1] if drops else []
            turns = self._without_thoughts(turns, bare)
        written = self._written(turns, exchange)
        pairs = [QuestionAnswer(written[i - 1], written[i], turns[i].weight) for i in places]
        for pair, i in list(zip(pairs, places, strict=True))[-1 if last_only else 0 :]:
            self._add_thought(pair, turns[i])
        return pairs

    def question(self, exchange: Exchange, answer: Turn) -> QuestionAnswer[Pieces]:
        """The whole prompt and one answer; earlier answers have no thoughts.

        Raises:
            RowError: if the template has no way to write a turn.
        """
        turns = [*exchange.prompt, answer]
        if self.template.reasoning:
            places = range(1, len(turns), 2)
            earlier = [] if self.thinking == "preserve" else places[:-1]
            turns = self._without_thoughts(turns, places if self.thinking is False else earlier)
        *before, last = self._written(turns, exchange)
        pair = QuestionAnswer([piece for pieces in before for piece in pieces], last)
        self._add_thought(pair, turns[-1])
        return pair

    def _without_thoughts(self, turns: list[Turn], places: Iterable[int]) -> list[Turn]:
        changed = list(turns)
        for i in places:
            changed[i] = replace(turns[i], content=self.template.without_thought(turns[i].content))
        return changed

    def _add_thought(self, pair: QuestionAnswer[Pieces], answer: Turn) -> None:
        if not self.template.reasoning or self.template.has_thought(answer.content):
            return
        if self.thinking:
            pair.target = [self.template.empty_thought, *pair.target]
        else:
            pair.source = [*pair.source, self.template.empty_thought]

    def _written(self, turns: list[Turn], exchange: Exchange) -> list[Pieces]:
        """The pieces of each turn; those of the first begin with prefix, system message and
        tools.
        """
        template = self.template
        system = exchange.system or template.default_system
        before: Pieces = list(template.prefix)
        in_user = ""
        if system or exchange.tools:
            tools = ""
            if exchange.tools:
                tools = write_tools(template.tool_format, exchange.tools, today=self.today)
            pieces = _filled(template.system, system + tools)
            if template.system_in_user:
                in_user = str(pieces[0])
            else:
                before += pieces
        written = [self._turn(turn, i, in_user if i == 0 else "") for i, turn in enumerate(turns)]
        return [before + written[0], *written[1:]]

    def _turn(self, turn: Turn, i: int, in_user: str) -> Pieces:
        template = self.template
        if turn.role == "user":
            pieces = _filled(template.user, in_user + turn.content)
            if template.system_in_user:
                return pieces
            # LLaMA-Factory numbers questions: its slots may have {{idx}}, and so may a text
            return [
                piece.replace("{{idx}}", str(i // 2), 1) if isinstance(piece, str) else piece
                for piece in pieces
            ]
        if turn.role == "assistant":
            return _filled(template.assistant, turn.content)
        if turn.role == "observation":
            return _filled(template.observation, turn.content)
        return _filled(template.function, self._calls(turn.content))

    def _calls(self, content: str) -> str:
        """The text of a function turn, with the thought or text around its JSON."""
        template = self.template
        around, body = "", content
        if not template.system_in_user:
            marked, thought = _TOOL_CALL.search(content), template.thought_pattern.search(content)
            if marked:
                around, body = content.replace(marked[0], ""), marked[1]
            elif thought:
                around, body = thought[0], content.replace(thought[0], "")
        return around + write_calls(template.tool_format, _parsed_calls(body))


def _filled(slots: Slots, content: str) -> Pieces:
    return [slot.replace(CONTENT, content, 1) if isinstance(slot, str) else slot for slot in slots]


def _parsed_calls(text: str) -> list[Call]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RowError("a function call is not valid JSON", 'write {"name": …, "arguments": {…}}') from None
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        raise RowError("a function call has no name or no arguments", 'write {"name": …, "arguments": {…}}')
    return [Call(call["name"], call["arguments"]) for call in calls]


# ---- from pieces to tokens


class PieceTokens:
    """Tokenizes pieces, many at once, equal ones once.

    Attributes:
        absent: names of tokens that the template writes and the tokenizer does not have.
    """

    def __init__(self, tokenizer: Any, *, splits_control_tokens: bool = False) -> None:
        """Nothing is tokenized yet.

        Args:
            splits_control_tokens: whether control tokens in texts are read as text, those of the
                template too, as LLaMA-Factory does with `split_special_tokens`.
        """
        self._tokenizer = tokenizer
        self._splits = splits_control_tokens
        self.absent: list[str] = []
        self._tokens: dict[TokenSlot, Ids] = {}

    def of(self, rows: Iterable[Pieces]) -> list[Ids]:
        """The tokens of each list of pieces."""
        rows = list(rows)
        texts = list(
            dict.fromkeys(piece for row in rows for piece in row if isinstance(piece, str) and piece)
        )
        known: dict[Piece, Ids] = {"": []}
        for group in grouped(((text, len(text)) for text in texts), most=_BATCH_CHARACTERS):
            known.update(zip(group, self._encoded(group), strict=True))
        for row in rows:
            for piece in row:
                if isinstance(piece, TokenSlot) and piece not in known:
                    known[piece] = self._single(piece)
        return [[i for piece in row for i in known[piece]] for row in rows]

    def _encoded(self, texts: list[str]) -> list[Ids]:
        encoder = TextEncoder(self._tokenizer)
        with encoder.control_tokens_as_text() if self._splits else contextlib.nullcontext():
            encodings = encoder.encode(texts, special=False, ranges=False)
        return [tokens.ids for tokens in encodings]

    def _single(self, token: TokenSlot) -> Ids:
        if token not in self._tokens:
            self._tokens[token] = self._looked_up(token)
        return self._tokens[token]

    def _looked_up(self, token: TokenSlot) -> Ids:
        tokenizer = self._tokenizer
        if token.special:
            special = tokenizer.bos_token_id if token.name == "bos" else tokenizer.eos_token_id
            return [] if special is None else [special]
        number = tokenizer.convert_tokens_to_ids(token.name)
        if number is None:
            self.absent.append(token.name)
        return [NO_TOKEN if number is None else number]
