"""The thoughts of a row's answers: where rows have them, and where a template reads them. Pure."""

import re
from collections.abc import Mapping

from unisono.trainer.data import Conversation, Message, ThoughtKey
from unisono.trainer.data.formats import THOUGHT_KEYS

_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def placed(conversation: Conversation, *, key: ThoughtKey | None, in_content: bool) -> Conversation:
    """The conversation with the thought of each message where the template reads it.

    A thought that the template reads nowhere stays under `reasoning_content`.

    Args:
        conversation: with thoughts under any of THOUGHT_KEYS.
        key: that the template reads; None if there is none.
        in_content: whether the template reads thoughts at the beginning of the content.
    """
    messages = [_placed(message, key, in_content=in_content) for message in conversation.messages]
    return Conversation(messages, conversation.tools)


def has_keys(conversation: Conversation) -> bool:
    """Whether a message has a thought under a key."""
    return any(key in message for message in conversation.messages for key in THOUGHT_KEYS)


def stripped(conversation: Conversation) -> Conversation:
    """The conversation without thoughts."""
    return Conversation([_stripped(message) for message in conversation.messages], conversation.tools)


def thought_of(message: Mapping[str, object]) -> str:
    """The thought that a message has under one of THOUGHT_KEYS; "" without one."""
    texts = map(message.get, THOUGHT_KEYS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _placed(message: Message, key: ThoughtKey | None, *, in_content: bool) -> Message:
    if not any(name in message for name in THOUGHT_KEYS):
        return message
    thought, plain = thought_of(message), _without_thoughts(message)
    if thought and key is None and in_content:
        plain["content"] = "\n".join(("<think>", thought, "</think>", "", plain["content"]))
    elif thought:
        plain[key or THOUGHT_KEYS[0]] = thought
    return plain


def _stripped(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    plain = _without_thoughts(message)
    plain["content"] = _THOUGHT.sub("", plain["content"])
    return plain


def _without_thoughts(message: Message) -> Message:
    plain = message.copy()
    for name in THOUGHT_KEYS:
        plain.pop(name, None)
    return plain


def key_in(source: str) -> ThoughtKey | None:
    """The key under which a template reads thoughts; None if there is none."""
    return next((name for name in THOUGHT_KEYS if re.search(rf"[.'\"]{name}\b", source)), None)
