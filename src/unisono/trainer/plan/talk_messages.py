"""What the tasks `chat` and `serve` and their fronts send each other."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from unisono.base.messages import TalkNews
from unisono.guard.supervise.codec import encode_message
from unisono.trainer.plan.task_requests import SamplingParams

PICTURE_TAG = "<image>"
"""Where a picture belongs in a text, as in rows."""


def with_places(text: str, count: int) -> str:
    """A message with a tag for each of its pictures: its own if there are as many, else before
    it.
    """
    return text if text.count(PICTURE_TAG) == count else PICTURE_TAG * count + text


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded.

    Attributes:
        note: a warning for the user; may be empty.
        context: tokens of prompt and answer; 0 in a chat.
        in_parts: whether long prompts are read in parts.
        blind: why the model reads no pictures; empty if it does.
    """

    kind: ClassVar = "opened"
    description: str
    note: str
    context: int = 0
    in_parts: bool = False
    blind: str = ""


# ---- to a chat


@dataclass(frozen=True, slots=True)
class Say:
    """A message of the user."""

    kind: ClassVar = "say"
    text: str


@dataclass(frozen=True, slots=True)
class Attach:
    """A picture belongs to the next message of the user."""

    kind: ClassVar = "attach"
    file: str


@dataclass(frozen=True, slots=True)
class Clear:
    """The conversation is to be forgotten, with what is attached."""

    kind: ClassVar = "clear"


# ---- from a chat


@dataclass(frozen=True, slots=True)
class Attached:
    """A picture can be used; `tokens`: of a prompt, which stand for it."""

    kind: ClassVar = "attached"
    width: int
    height: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenText:
    """A piece of the answer."""

    kind: ClassVar = "token"
    text: str


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """A complete answer; `ended`: stop, length or interrupted."""

    kind: ClassVar = "answer"
    text: str
    tokens: int
    ended: str


@dataclass(frozen=True, slots=True)
class RefusedTurn:
    """Why a turn cannot be answered, or a picture cannot be attached."""

    kind: ClassVar = "refused_turn"
    text: str
    fix: str


# ---- to a server


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A prompt.

    Attributes:
        messages: of a chat, with `tools`, both as in OpenAI's protocol; None: `prompt` is to be
            continued, a text or its tokens.
        max_tokens: None: what the context has room for.
        place: of the random stream, among those of the same seed.
        marks: special tokens that are part of the answer's text.
    """

    messages: list[Any] | None = None
    tools: list[Any] | None = None
    prompt: str | list[int] = ""
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    place: int = 0
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; its `id` is in all messages on it."""

    kind: ClassVar = "ask"
    id: int
    question: PromptRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for this answer any more."""

    kind: ClassVar = "drop"
    id: int


@dataclass(frozen=True, slots=True)
class Ping:
    """A sign of life is wanted, `pong`, between two forwards."""

    kind: ClassVar = "ping"


# ---- from a server


@dataclass(frozen=True, slots=True)
class Begun:
    """A request is being answered."""

    kind: ClassVar = "begun"
    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Id and new text of all requests that got some."""

    kind: ClassVar = "pieces"
    pieces: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete answer; `ended`: stop or length."""

    kind: ClassVar = "answered"
    id: int
    tokens: int
    ended: str


@dataclass(frozen=True, slots=True)
class RefusedAsk:
    """Why a request has no answer.

    Attributes:
        problem: messages, tools or prompt: the part of the request; `length`: its number of tokens.
    """

    kind: ClassVar = "refused_ask"
    id: int
    problem: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class FailedAsk:
    """The exception that ended a request, and no other; `where` it was raised."""

    kind: ClassVar = "failed_ask"
    id: int
    text: str
    where: str


ChatInput = Say | Attach | Clear
ChatNews = Ready | Attached | TokenText | TurnAnswer | RefusedTurn
ServeInput = Ask | Drop | Ping
ServeNews = Ready | Begun | Pieces | Answered | RefusedAsk | FailedAsk


def encode_news(news: ChatNews | ServeNews) -> TalkNews:
    """The message of a chat or a server."""
    return cast("TalkNews", encode_message(news))
