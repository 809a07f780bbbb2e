"""What a rank and the processes of an environment send each other, and what comes of a call.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, final

from unisono.trainer.objectives.rewards.calls import CallFailed, FailureKind, LoadRefused, Text

REWARD, RESET = "reward", "reset"
"""The methods that are not tools."""


class EnvironmentSetup(TypedDict):
    """The first line for the process that loads the class; `source` is the file, each byte as a
    character.
    """

    path: str
    name: str
    source: str
    memory_bytes: int


@final
class EnvironmentLoaded(TypedDict):
    """The answer: schemas of the tools as chat templates expect them, whether there is a method
    `reward`, and `FILE.py:LINE` of the class.
    """

    tools: list[dict[str, object]]
    has_reward: bool
    where: str


@final
class EpisodeStarted(TypedDict):
    """The answer to a socket: the process of an episode that reads it."""

    pid: int


class MethodCall(TypedDict):
    """A call in an episode; the first is `reset` with the row and the seed of Python's `random`.

    `arguments` are those of the method; a tool's are checked against its signature.
    """

    method: str
    arguments: Mapping[str, object]
    seed: NotRequired[int]


@final
class MethodResult(TypedDict):
    """What a method gave: of `reset` messages or None, of a tool a text, of `reward` a number or
    None.
    """

    value: Text | float | None


@final
class ToolRefused(TypedDict):
    """Why a tool gave nothing, for the model: there is none of that name, its arguments do not fit,
    or it raised an exception.
    """

    told: str


MethodReply = MethodResult | ToolRefused | CallFailed
LoadReply = EnvironmentLoaded | LoadRefused | EpisodeStarted


@dataclass(frozen=True, slots=True)
class EnvironmentFailure:
    """A call that ends its episode.

    Attributes:
        row: that the prompt is from, e.g. `train.jsonl:17`.
        method: that was called.
        kind: as in `rewards.calls.RewardFailure`.
        seconds: that the call took.
        text: the exception, or what is wrong.
        where: `FILE.py:LINE`.
    """

    row: str
    method: str
    kind: FailureKind
    seconds: float
    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Given:
    """What a call gave.

    Attributes:
        value: see `MethodResult`; for a refused tool the text for the model.
        is_refused: whether a tool was refused, or raised an exception.
    """

    value: Text | float | None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A call of a tool by the model.

    Attributes:
        id: within the answer.
        name: of the tool; there may be none of that name.
        arguments: by name.
    """

    id: str
    name: str
    arguments: Mapping[str, object]

    def to_message(self) -> dict[str, object]:
        """As in the message of an assistant."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def as_prompt(prompt: Any) -> list[dict[str, Any]]:
    """The prompt of a row as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def as_messages(value: object) -> list[dict[str, object]] | None:
    """What `reset` gave as messages; None if it is anything else.

    A text is the message of a user.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value.strip() else None
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        return None
    is_right = all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    )
    return [dict(one) for one in value] if is_right else None
