"""Finds the characters of a rendered conversation that the model is trained to write.

Three methods, in this order. The first that succeeds is used; if none does, the row is refused:

1. The template marks them (`{% generation %}`): its marks are used.
2. Prefixes: an answer begins at the end of the rendering of all messages before it with the
   generation prompt, and ends with the end of its turn in the rendering up to and including it.
   Valid if both are prefixes of the full text.
3. Marks: a template that renders earlier turns differently (drops their reasoning) breaks method 2.
   Then a mark is inserted after the answer, and the conversation is rendered again: the answer ends
   where the two texts diverge. The text after it must equal the text that follows it as the last
   message, at least up to the end-of-turn token.

Harmony's template (gpt-oss) ends an earlier answer with `<|end|>`, where the model is to write
`<|return|>`: such an answer counts without its end, which only the last one has.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from unisono.base.text import one_line
from unisono.trainer.data import Conversation, EmptyAnswerError, Message, RowError
from unisono.trainer.data.formats import THOUGHT_KEYS, all_text
from unisono.trainer.data.template import ChatTemplate, common_beginning

Span = tuple[int, int]

_MARK = "\ue000"  # private use area: no template writes it, and none treats it as whitespace
_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: input of the tokenizer.
        answers: begin and end character of each trained answer, with its stop token.
        messages: the index of the message of each answer; empty if the template marks other blocks
            than answers.
        weights: of each of them in the loss, above 0 and up to 1.
    """

    text: str
    answers: list[Span]
    messages: list[int]
    weights: list[float]


def render_answers(template: ChatTemplate, conversation: Conversation, *, last_only: bool) -> Rendered:
    """The text of a conversation and its trained answers, at least one.

    A message with `weight: 0` (as in OpenAI's fine-tuning files) is not a trained answer; one with
    a weight between 0 and 1 counts in part.

    Args:
        template: the run's template.
        conversation: the row.
        last_only: whether only the last answer is trained.

    Raises:
        RowError: if there is no answer, the template refuses the row, or the answers cannot be
            located reliably.
    """
    messages, tools = conversation.messages, conversation.tools
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [i for i in (spoken[-1:] if last_only else spoken) if messages[i].get("weight") != 0]
    weights = [float(messages[i].get("weight", 1)) for i in trained]
    _refuse_unanswered(messages, trained)
    _refuse_unrendered(template, conversation)
    if template.marks_answers:
        text, spans = template.render_marked(messages, tools)
        answers = [_without_other_end(template, text, span) for span in _of_markers(spans, spoken, trained)]
        if len(answers) != len(weights) and set(weights) != {1.0}:
            raise RowError(
                f"the chat template marks {len(spans)} blocks for {len(spoken)} answers, so their weights are"
                " ambiguous",
                "write the template with one {% generation %} block per answer, or remove the weights",
            )
        of_messages = trained if len(spans) == len(spoken) else []
        return Rendered(
            text, answers, of_messages, weights if len(answers) == len(weights) else [1.0] * len(answers)
        )
    text = template.render(messages, tools)
    spans_found = _by_prefixes(template, conversation, text, trained)
    if spans_found is None:
        spans_found = _by_marks(template, conversation, text, trained)
    if spans_found is None and 0 in trained:
        raise RowError(
            "it begins with an answer, without a message before it",
            "put a user message first, or remove the row",
        )
    if spans_found is None:
        raise RowError(
            "the chat template renders earlier turns differently, so the answers cannot be located reliably",
            "add {% generation %} blocks to the template (data.template), set data.loss_on: last-answer, or"
            " remove the row",
        )
    return Rendered(text, spans_found, trained, weights)


def with_next_turn(template: ChatTemplate, text: str, answers: list[Span]) -> tuple[str, list[Span]]:
    """Text and answers with the stop token of the next turn, where the template ends no answer
    itself; else the same.

    An answer at the end of the text gets the one that a question would begin with.
    """
    stop = template.stop_of_next_turn
    if stop is None:
        return text, answers
    if answers and answers[-1][1] == len(text):
        text += stop
    extended = []
    for first, end in answers:
        following = next((known for known in template.known_stops if text.startswith(known, end)), "")
        extended.append((first, end + len(following)))
    return text, extended


def ends_otherwise(template: ChatTemplate, text: str, end: int) -> bool:
    """Whether an answer that ends at a character is an earlier one, after which the template writes
    no stop token but another one.
    """
    other_end = template.end_of_earlier_answer
    return other_end is not None and text.startswith(other_end, end)


def _without_other_end(template: ChatTemplate, text: str, span: Span) -> Span:
    """A marked answer without a token that ends earlier answers only: there the model is to write
    the stop token.
    """
    first, end = span
    other_end = template.end_of_earlier_answer
    if other_end is None or other_end in template.known_stops or not text.endswith(other_end, first, end):
        return span
    return first, end - len(other_end)


def _refuse_unanswered(messages: list[Message], trained: list[int]) -> None:
    if not trained:
        spoken = any(message["role"] == "assistant" for message in messages)
        roles = ", ".join(
            dict.fromkeys(one_line(str(message["role"]), limit=20) for message in messages[:20])
        )
        raise RowError(
            (
                "all its answers have weight 0"
                if spoken
                else f"it has no answer: no message of the assistant, only of {roles}"
            ),
            "add an answer, or remove the row",
        )
    for i in trained:
        if (
            not any(messages[i].get(name) for name in ("tool_calls", *THOUGHT_KEYS))
            and not messages[i]["content"].strip()
        ):
            raise _empty(messages[i], i + 1)


def _empty(message: Message, number: int) -> EmptyAnswerError:
    """The error of an answer without text, which may be under a key that is not read."""
    unread = [
        name
        for name, value in message.items()
        if value and name not in ("role", "content", "weight", "name", "id")
    ]
    if unread:
        key = one_line(unread[0], limit=40)
        return EmptyAnswerError(
            f"the answer in message {number} is empty, and its key {key} is not read",
            "write its text under `content`",
        )
    return EmptyAnswerError(f"the answer in message {number} is empty", "write an answer, or remove the row")


def _refuse_unrendered(template: ChatTemplate, conversation: Conversation) -> None:
    """Refuses rows of which the template would silently drop tool calls or tools."""
    source = template.source(conversation.tools)
    if "tool_call" not in source and any("tool_calls" in message for message in conversation.messages):
        raise RowError("the chat template does not render tool calls", "set data.template to one that does")
    if conversation.tools and "tools" not in source:
        raise RowError(
            "the chat template does not render tools",
            "set data.template to one that does, or remove tools",
        )


def _of_markers(spans: list[Span], spoken: list[int], trained: list[int]) -> list[Span]:
    """The blocks of the trained answers.

    If blocks and answers do not match one to one, only all of them can be used.
    """
    if len(spans) == len(spoken):
        return [span for span, message in zip(spans, spoken, strict=True) if message in trained]
    if trained == spoken:
        return spans
    raise RowError(
        f"the chat template marks {len(spans)} blocks for {len(spoken)} answers, so the last answer is"
        " ambiguous",
        "set data.loss_on: answers, or write the template with one {% generation %} block per answer",
    )


def _by_prefixes(
    template: ChatTemplate, conversation: Conversation, text: str, trained: list[int]
) -> list[Span] | None:
    spans: list[Span] = []
    messages, tools = conversation.messages, conversation.tools
    for i in trained:
        first = _begin_by_prompt(template, conversation, text, i)
        part = text if i == len(messages) - 1 else template.try_render(messages[: i + 1], tools)
        if first is None or part is None:
            return None
        end = len(part) - template.surplus(part)
        if first >= end or not text.startswith(part[:end]):
            return None
        spans.append((first, end))
    return spans if _in_order(spans) else None


def _begin_by_prompt(template: ChatTemplate, conversation: Conversation, text: str, i: int) -> int | None:
    """The end of the rendering before message i with the generation prompt, if it is a prefix of
    the text.
    """
    if i == 0:
        return None
    part = template.try_render(conversation.messages[:i], conversation.tools, prompt=True)
    return len(part) if part is not None and text.startswith(part) else None


def _by_marks(
    template: ChatTemplate, conversation: Conversation, text: str, trained: list[int]
) -> list[Span] | None:
    spans: list[Span] = []
    messages, tools = conversation.messages, conversation.tools
    for i in trained:
        last = template.try_render(messages[: i + 1], tools)
        end = _end_of_message(template, messages, tools, text, i)
        end_as_last = None if last is None else _end_of_message(template, messages[: i + 1], tools, last, i)
        if last is None or end is None or end_as_last is None:
            return None
        tail = last[end_as_last : len(last) - template.surplus(last)]
        other_end = template.end_of_earlier_answer
        if other_end is not None and text.startswith(other_end, end):
            tail = other_end if other_end in template.known_stops else ""
        first = _begin_by_prompt(template, conversation, text, i)
        if first is None:
            first = _begin_by_mark(template, conversation, text, i)
        if first is None:
            first = _begin_by_header(template, messages[i], text, end)
        if first is None or first > end or not text.startswith(tail, end):
            return None
        spans.append((first, end + len(tail)))
    return spans if _in_order(spans) else None


def _end_of_message(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, text: str, i: int
) -> int | None:
    """The character up to which message i extends at least: the end of its content, or of its last
    call's name.
    """
    ends: list[int] = []
    for marked in _marked(messages[i]):
        other = template.try_render([*messages[:i], marked, *messages[i + 1 :]], tools)
        if other is not None and other != text and _MARK in other:
            ends.append(common_beginning(text, other))
    return max(ends, default=None)


def _marked(message: Message) -> list[Message]:
    """The message with a mark after its content, and with one after the name of its last call."""
    variants = [message | {"content": message["content"] + _MARK}] if message["content"] else []
    calls = message.get("tool_calls")
    if calls:
        function = calls[-1]["function"]
        last = calls[-1] | {"function": function | {"name": function["name"] + _MARK}}
        variants.append(message | {"tool_calls": [*calls[:-1], last]})
    return variants


def _begin_by_mark(template: ChatTemplate, conversation: Conversation, text: str, i: int) -> int | None:
    """The end of the common part of generation prompt and text before the content of message i.

    A prompt may request reasoning (`<think>`) that the text of an earlier turn does not have.
    """
    messages, tools = conversation.messages, conversation.tools
    content = messages[i]["content"]
    offset = content.rfind(_THOUGHT) + len(_THOUGHT) if _THOUGHT in content else 0
    # Templates drop thoughts up to here.
    offset += len(content[offset:]) - len(content[offset:].lstrip()) if offset else 0
    marked = messages[i] | {"content": content[:offset] + _MARK + content[offset:]}
    other = template.try_render([*messages[:i], marked, *messages[i + 1 :]], tools)
    bare = template.try_render(messages[:i], tools) if i else None
    prompt = template.try_render(messages[:i], tools, prompt=True) if i else None
    if other is None or _MARK not in other or bare is None or prompt is None or not prompt.startswith(bare):
        return None
    content_begin, suffix = common_beginning(text, other), prompt[len(bare) :]
    if text.startswith(bare) and len(bare) <= content_begin:
        shared = common_beginning(text[len(bare) : content_begin], suffix)
        return len(bare) + shared if suffix[:shared].strip() else None
    fits = (n for n in range(len(suffix), 0, -1) if text.endswith(suffix[:n], 0, content_begin))
    return content_begin if suffix[: next(fits, 0)].strip() else None


def _begin_by_header(template: ChatTemplate, message: Message, text: str, end: int) -> int | None:
    """The end of the last header before an answer's end; None if the message itself contains the
    header.
    """
    header = template.frame.header if template.frame else ""
    if not header.strip() or header.strip() in all_text(Conversation([message])):
        return None
    position = text.rfind(header, 0, end)
    return None if position < 0 else position + len(header)


def _in_order(spans: list[Span]) -> bool:
    return all(before[1] <= after[0] for before, after in pairwise(spans))
