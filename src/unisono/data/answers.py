"""Finds the characters of a rendered conversation that the model is to write itself.

Three ways, in this order; what the first that works gives is right, and where none works the row is refused:

1. The template marks them (`{% generation %}`): taken as they are.
2. Prefixes: an answer begins where the rendering of all before it, with the prompt for an answer, ends; and ends where
   the rendering up to it ends. Holds if both are beginnings of the whole.
3. Turns: a template that renders earlier turns differently (drops their reasoning) breaks 2. Then the header of an
   answer must occur as often as there are answers, and the end-of-turn token ends each; neither may occur in a message.
"""

from dataclasses import dataclass

from unisono.data.rows import Conversation, Message, RowError
from unisono.data.template import ChatTemplate

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: what the tokenizer gets.
        answers: first and end character of each trained answer, its stop token included.
    """

    text: str
    answers: list[Span]


def render_answers(template: ChatTemplate, conversation: Conversation, *, last_only: bool) -> Rendered:
    """The text of a conversation and its trained answers, of which there is at least one.

    A message with `weight: 0` (as in OpenAI's fine-tuning files) is no trained answer.

    Args:
        template: the run's.
        conversation: the row.
        last_only: only the last answer is trained.

    Raises:
        RowError: if there is no answer, the template refuses the row, or the answers cannot be found for certain.
    """
    messages, tools = conversation.messages, conversation.tools
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [i for i in (spoken[-1:] if last_only else spoken) if messages[i].get("weight") != 0]
    _refuse_silent(messages, wanted)
    _refuse_unseen(template, conversation)
    if template.marks_answers:
        text, spans = template.render_marked(messages, tools)
        return Rendered(text, _of_markers(spans, spoken, wanted))
    text = template.render(messages, tools)
    spans_found = _by_prefixes(template, conversation, text, wanted)
    if spans_found is None:
        spans_found = _by_turns(template, conversation, text, spoken, wanted)
    if spans_found is None:
        raise RowError(
            "the chat template renders earlier turns differently, so the answers' places are not certain",
            "put {% generation %} blocks into the template (data.template), set data.loss_on: last-answer, or leave the row out",
        )
    return Rendered(text, spans_found)


def _refuse_silent(messages: list[Message], wanted: list[int]) -> None:
    if not wanted:
        spoken = any(message["role"] == "assistant" for message in messages)
        raise RowError(
            "all its answers have weight 0" if spoken else "it has no answer: no assistant speaks",
            "add an answer, or remove the row",
        )
    for i in wanted:
        if (
            not any(messages[i].get(name) for name in ("tool_calls", "reasoning_content"))
            and not messages[i]["content"].strip()
        ):
            raise RowError(f"the answer in message {i + 1} is empty", "write an answer, or remove the row")


def _refuse_unseen(template: ChatTemplate, conversation: Conversation) -> None:
    """Refuses what the template would leave out without a word."""
    source = template.source(conversation.tools)
    if "tool_call" not in source and any("tool_calls" in message for message in conversation.messages):
        raise RowError("the chat template does not render tool calls", "set data.template to one that does")
    if conversation.tools and "tools" not in source:
        raise RowError(
            "the chat template does not render tools",
            "set data.template to one that does, or leave tools out",
        )


def _of_markers(spans: list[Span], spoken: list[int], wanted: list[int]) -> list[Span]:
    """The blocks of the trained answers. Where blocks and answers do not pair up, only all of them can be taken."""
    if len(spans) == len(spoken):
        return [span for span, message in zip(spans, spoken, strict=True) if message in wanted]
    if wanted == spoken:
        return spans
    raise RowError(
        f"the chat template marks {len(spans)} blocks for {len(spoken)} answers, so the last one is not certain",
        "set data.loss_on: answers, or give the template one {% generation %} block an answer",
    )


def _by_prefixes(
    template: ChatTemplate, conversation: Conversation, text: str, wanted: list[int]
) -> list[Span] | None:
    spans: list[Span] = []
    messages, tools = conversation.messages, conversation.tools
    for i in wanted:
        first = _length_if_prefix(template, messages[:i], tools, text, prompt=True)
        last = i == len(messages) - 1
        end = len(text) if last else _length_if_prefix(template, messages[: i + 1], tools, text, prompt=False)
        if first is None or end is None or first >= end or (spans and first < spans[-1][1]):
            return None
        spans.append((first, end))
    return spans


def _length_if_prefix(
    template: ChatTemplate, messages: list[Message], tools: list[object] | None, text: str, *, prompt: bool
) -> int | None:
    if not messages:
        return None
    try:
        part = template.render(messages, tools, prompt=prompt)
    except RowError:
        return None  # a template may refuse a part of a conversation that it takes as a whole
    return len(part) if text.startswith(part) else None


def _by_turns(
    template: ChatTemplate, conversation: Conversation, text: str, spoken: list[int], wanted: list[int]
) -> list[Span] | None:
    frame, stop = template.frame, template.end_of_turn
    if frame is None or not frame.header.strip() or stop is None:
        return None
    parts = text.split(frame.header)
    if (
        len(parts) != len(spoken) + 1
        or _occurs(conversation, frame.header.strip())
        or _occurs(conversation, stop)
    ):
        return None
    spans: dict[int, Span] = {}
    place = len(parts[0])
    for message, part in zip(spoken, parts[1:], strict=True):
        first = place + len(frame.header)
        place = first + len(part)
        found = part.find(stop)
        if found < 0 or template.has_control_token(part[:found]):
            return None  # without its own end the answer would seem to run into the next turn
        spans[message] = (first, first + found + len(stop))
    return [spans[i] for i in wanted]


def _occurs(conversation: Conversation, text: str) -> bool:
    from unisono.data.formats import all_text

    return text in all_text(conversation)
