"""What the tasks `chat` and `serve` and their fronts send each other."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from unisono.base.messages import TalkNews
from unisono.guard.supervise.codec import encode_message
from unisono.trainer.plan.task_requests import NamedAdapter, SamplingParams

PICTURE_TAG = "<image>"
"""Where a picture belongs in a text, as in rows."""

Gives = Literal["answers", "embeddings", "scores", "labels"]
"""What a model gives: texts, or values of texts."""
Thought = Literal["none", "possible", "open"]
"""Whether an answer has no thought, may begin with one, or continues one that the prompt opens."""
THOUGHT_MARKS = ("<think>", "</think>")
"""What models write around thoughts."""


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
        gives: what a server gives.
        labels: of a classifier, in order.
        width: numbers of an embedding.
    """

    kind: ClassVar = "opened"
    description: str
    note: str
    context: int = 0
    in_parts: bool = False
    blind: str = ""
    gives: Gives = "answers"
    labels: tuple[str, ...] = ()
    width: int = 0


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
class AnswerForm:
    """What an answer has to be: a grammar selects among its tokens.

    Attributes:
        schema: JSON schema of the text; None: any text.
        tools: functions whose calls follow their schemas, as in OpenAI's protocol.
        must_call: whether the answer is one or more of these calls.
        one_call: whether it has at most one.
    """

    schema: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    must_call: bool = False
    one_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A prompt.

    Attributes:
        adapter: the name of the adapter that answers; empty: the model itself.
        messages: of a chat, with `tools`, both as in OpenAI's protocol; None: `prompt` is to be
            continued, a text or its tokens.
        continues: whether the last message is the beginning of the answer.
        template_settings: variables of the chat template.
        effort: of the reasoning, by OpenAI's words; None: that of the template.
        max_tokens: None: what the context has room for.
        place: of the random stream, among those of the same seed.
        marks: special tokens that are part of the answer's text.
        form: None: any text.
        top: most likely tokens in each place that are given with the log-probability of the
            answer's; None: no log-probabilities.
        echo: whether the prompt is given before the answer, with its log-probabilities if `top` is
            not None.
    """

    adapter: str = ""
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    continues: bool = False
    template_settings: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None
    prompt: str | list[int] = ""
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    place: int = 0
    marks: tuple[str, ...] = ()
    form: AnswerForm | None = None
    top: int | None = None
    echo: bool = False

    @property
    def part(self) -> str:
        """The parameter of the request that has the prompt."""
        return "prompt" if self.messages is None else "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsRequest:
    """Texts whose values are wanted.

    Attributes:
        texts: each a text or its tokens; of pairs the first sides.
        seconds: the second sides of pairs, each of which gets one value; empty: texts are no pairs.
        prefix: which of the model's prefixes stands before each text.
        most_tokens: to which texts are cut, -1: that the model reads; None: longer ones are
            refused.
    """

    adapter: ClassVar = ""  # these models have none
    part: ClassVar = "input"
    texts: tuple[str | list[int], ...]
    seconds: tuple[str, ...] = ()
    prefix: Literal["query", "document"] | None = None
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; its `id` is in all messages on it."""

    kind: ClassVar = "ask"
    id: int
    question: PromptRequest | TextsRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for this answer any more."""

    kind: ClassVar = "drop"
    id: int


@dataclass(frozen=True, slots=True)
class Ping:
    """A sign of life is wanted, `pong`, between two forwards."""

    kind: ClassVar = "ping"


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """An adapter is to be put on the model; the answer is `AdapterChanged` or `RefusedAsk`."""

    kind: ClassVar = "load_adapter"
    id: int
    adapter: NamedAdapter


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """An adapter that nobody uses is to be taken off the model."""

    kind: ClassVar = "unload_adapter"
    id: int
    name: str


# ---- from a server


@dataclass(frozen=True, slots=True)
class Begun:
    """A request is being answered.

    Attributes:
        thought: whether the answer may begin with a thought, by its prompt.
    """

    kind: ClassVar = "begun"
    id: int
    prompt_tokens: int
    thought: Thought = "none"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a prompt or answer.

    Attributes:
        text: its own; that of a part of a character is U+FFFD.
        log_prob: before penalties and temperature; None: nothing precedes it.
        top: the most likely tokens in its place.
        is_stop: whether it ended the answer, whose text it is not part of.
    """

    text: str
    log_prob: float | None
    top: tuple[tuple[str, float], ...] = ()
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """New text of a request, and its new tokens if it gets log-probabilities; the text may lag
    behind the tokens.
    """

    id: int
    text: str
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is new of all requests that got something."""

    kind: ClassVar = "pieces"
    pieces: tuple[AnswerPiece, ...]


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
        problem: the parameter of the request, or `length`: its number of tokens.
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


@dataclass(frozen=True, slots=True)
class Valued:
    """The values of a request.

    Attributes:
        values: of each text or pair: float32 numbers, little-endian, as base64.
        tokens: of all texts.
    """

    kind: ClassVar = "valued"
    id: int
    values: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """An adapter is on the model now, or has been taken off."""

    kind: ClassVar = "adapter_changed"
    id: int


ChatInput = Say | Attach | Clear
ChatNews = Ready | Attached | TokenText | TurnAnswer | RefusedTurn
ServeInput = Ask | Drop | Ping | LoadAdapter | UnloadAdapter
ServeNews = Ready | Begun | Pieces | Answered | RefusedAsk | FailedAsk | Valued | AdapterChanged


def encode_news(news: ChatNews | ServeNews) -> TalkNews:
    """The message of a chat or a server."""
    return cast("TalkNews", encode_message(news))
