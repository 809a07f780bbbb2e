"""What a reward function gets, what it gives, and the sum of several of them. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypedDict, final

Text = str | list[dict[str, object]]
"""A prompt or an answer: a text, or messages with `role` and `content`."""
FailureKind = Literal["error", "timeout", "value", "memory", "died"]

_MOST_TEXT = 4000  # characters of a prompt or an answer in a line of rewards.jsonl


@dataclass(frozen=True, slots=True)
class RewardCall:
    """The answers to one prompt (a group), which are scored together.

    Attributes:
        row: that the prompt is from, e.g. `train.jsonl:17`.
        prompt: a text, or messages.
        completions: the answers: texts, or for messages a list with one message each.
        completion_ids: the tokens of each answer.
        columns: the other columns of the row, one value each.
    """

    row: str
    prompt: Text
    completions: Sequence[Text]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, object] = field(default_factory=dict)


# ---- what the process of a rank and one that calls reward functions send each other


@final
class OwnFunction(TypedDict):
    """A function of the user's own; `source` is the file, each byte as a character."""

    use: str
    path: str
    name: str
    source: str


@final
class BuiltInFunction(TypedDict):
    """A built-in function with its settings."""

    use: str
    settings: Mapping[str, object]


@final
class ModelFunction(TypedDict):
    """A reward model, which a process has for itself: the directory of its run."""

    use: str
    run: str
    threads: int


Function = OwnFunction | BuiltInFunction | ModelFunction


class Setup(TypedDict):
    """The first line: what to load, and the bytes that may be mapped beside; 0: any number."""

    functions: Sequence[Function]
    memory_bytes: int


@final
class Loaded(TypedDict):
    """The answer to a setup: `FILE.py:LINE` of each function."""

    ready: list[str]


@final
class LoadRefused(TypedDict):
    """The answer to a setup that cannot be loaded: its problems."""

    refused: list[Mapping[str, object]]


class CallRequest(TypedDict):
    """A call, in each line after the first; `function` is the index in the setup."""

    function: int
    prompt: Text
    completions: list[Text]
    completion_ids: list[list[int]]
    columns: dict[str, object]


@final
class CallReply(TypedDict):
    """What a function gave: for each answer a number, None, or what is wrong; and the values of
    `log_metric` and `log_extra`.
    """

    values: list[float | str | None]
    metrics: dict[str, list[float]]
    extras: dict[str, list[object]]


@final
class CallFailed(TypedDict):
    """Why a call gave nothing; see `RewardFailure`."""

    kind: FailureKind
    text: str
    where: str


Reply = Loaded | LoadRefused | CallReply | CallFailed


# ---- what comes of them


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A call of a function that gave no usable value.

    Attributes:
        row: as in `RewardCall`.
        answer: its index in the group; None: all answers of the group.
        function: its name, see `config.answer_functions.function_names`.
        kind: it raised an exception, missed its deadline, gave something that is not a number,
            exceeded its memory, or its process ended.
        seconds: that the call took.
        text: the exception, or what is wrong.
        where: `FILE.py:LINE` in the user's file; empty for a built-in function.
        prompt: its text, cut.
        completion: the text of the answer, cut; empty for all answers.
    """

    row: str
    answer: int | None
    function: str
    kind: FailureKind
    seconds: float
    text: str
    where: str = ""
    prompt: str = ""
    completion: str = ""

    def to_json(self) -> dict[str, object]:
        """A line of rewards.jsonl."""
        return asdict(self)

    def __str__(self) -> str:
        answer = "" if self.answer is None else f", answer {self.answer}"
        where = f" ({self.where})" if self.where else ""
        return f"{self.function} on {self.row}{answer}: {self.text}{where}"


class RewardError(Exception):
    """A reward failed whose `on_error` is `error`.

    Attributes:
        failure: the one that ended the call of `score`.
        failures: all failures of that call of `score`, also those that were skipped.
    """

    def __init__(self, failure: RewardFailure, failures: Sequence[RewardFailure] = ()) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.failures = tuple(failures) or (failure,)


@dataclass(frozen=True, slots=True)
class Scored:
    """The rewards of a group. Each list has one entry for each answer.

    Attributes:
        rewards: by the name of the function; None: it does not apply to this answer.
        totals: the sum of rewards × weights over the functions that apply. None: the answer leaves
            its group, since a function failed whose `on_error` is `skip`, or since none applies.
        failures: those that did not end the run.
        metrics: what the functions gave to `log_metric`, the mean over its calls.
        extras: what they gave to `log_extra`; None where an answer has no value.
        skipped: the answers that leave their group since a function failed.
    """

    rewards: list[dict[str, float | None]]
    totals: list[float | None]
    failures: list[RewardFailure] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, list[object]] = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()


@dataclass(slots=True)
class FunctionResult:
    """What one function gave for one group.

    Attributes:
        values: one for each answer.
        skipped: the answers that leave their group.
        failures: in the order in which they occurred.
        metrics: all values of `log_metric`, by name.
        extras: one value for each answer, by column.
    """

    values: list[float | None]
    skipped: set[int] = field(default_factory=set)
    failures: list[RewardFailure] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[object]] = field(default_factory=dict)

    def add(self, answers: Iterable[int], reply: CallReply) -> list[tuple[int, str]]:
        """Takes what a call gave for these answers. Returns what is not a number, with its answer.

        Args:
            answers: for which the function was called.
            reply: of the process that called it.
        """
        answers = list(answers)
        for name, numbers in reply["metrics"].items():
            self.metrics.setdefault(name, []).extend(numbers)
        for column, entries in reply["extras"].items():
            row = self.extras.setdefault(column, [None] * len(self.values))
            for answer, entry in zip(answers, entries, strict=True):
                row[answer] = entry
        unusable = []
        for answer, value in zip(answers, reply["values"], strict=True):
            if isinstance(value, str):
                unusable.append((answer, value))
            else:
                self.values[answer] = value
        return unusable

    def fail(self, failure: RewardFailure, on_error: float | str) -> None:
        """Notes a failure that does not end the run.

        Args:
            failure: of one answer or of all.
            on_error: `skip`, or the reward of these answers.
        """
        self.failures.append(failure)
        for answer in range(len(self.values)) if failure.answer is None else (failure.answer,):
            self.values[answer] = None if isinstance(on_error, str) else float(on_error)
            if isinstance(on_error, str):
                self.skipped.add(answer)


def combined(results: Mapping[str, FunctionResult], weights: Mapping[str, float], *, count: int) -> Scored:
    """The rewards of a group of `count` answers, from the results of all functions by name."""
    skipped: frozenset[int] = frozenset().union(*(result.skipped for result in results.values()))
    rewards = [{name: result.values[answer] for name, result in results.items()} for answer in range(count)]
    totals = [None if answer in skipped else total(rewards[answer], weights) for answer in range(count)]
    metrics: dict[str, list[float]] = {}
    for result in results.values():
        for name, numbers in result.metrics.items():
            metrics.setdefault(name, []).extend(numbers)
    return Scored(
        rewards,
        totals,
        [failure for result in results.values() for failure in result.failures],
        {name: math.fsum(numbers) / len(numbers) for name, numbers in metrics.items() if numbers},
        {column: row for result in results.values() for column, row in result.extras.items()},
        skipped,
    )


def total(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The sum of rewards × weights over the functions that apply; None if none does."""
    terms = [weights[name] * value for name, value in rewards.items() if value is not None]
    return math.fsum(terms) if terms else None


def text_of(text: Text) -> str:
    """The text of a prompt or an answer; of messages all contents."""
    if isinstance(text, str):
        return text
    return "\n".join(str(message.get("content") or "") for message in text)


def cut(text: Text) -> str:
    """Its beginning, as long as a line of rewards.jsonl has it."""
    whole = text_of(text)
    return whole if len(whole) <= _MOST_TEXT else whole[: _MOST_TEXT - 1] + "…"
