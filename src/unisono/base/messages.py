"""The messages of a rank or a task to its front, and of a front to what shows them: one class for
each kind, as it stands in a line of JSON.

`Message` is their union; mypy narrows it by `message["kind"] == "step"`, and then knows the fields.
The classes say what a sender gives. A line that is read may lack fields, or have others, or a kind
that is not listed here: it is damaged, or a different version has written it. Readers therefore
use `get`, and ignore kinds that they do not know. Kinds that a dataclass describes are `TalkNews`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NotRequired, TypedDict, TypeGuard, TypeVar, cast, get_args

from unisono.base.files import parse_json


class _Fields(TypedDict):
    """The fields of every kind.

    Attributes:
        time: UTC, seconds; set when it is sent.
        rank: added by the front to messages of other ranks than 0, and in a job of several nodes
            with `place`, the label of that rank.
    """

    time: NotRequired[float]
    rank: NotRequired[int]
    place: NotRequired[str]


# ---- of ranks and tasks


class PhaseMessage(_Fields):
    """A phase begins, or makes progress: `done` of `total` units of work.

    Attributes:
        started: how the process began, `exec` or `fork`; in its first message.
        of_rank: a rank that speaks for itself, since others may wait for it; else rank 0 speaks for
            all.
    """

    kind: Literal["phase"]
    phase: NotRequired[str]
    text: str
    done: NotRequired[int | None]
    total: NotRequired[int | None]
    started: NotRequired[str]
    of_rank: NotRequired[int]


class ReadyMessage(_Fields):
    """Training begins; the worker alone knows the `facts`, e.g. parameters, attention, memory."""

    kind: Literal["ready"]
    facts: Mapping[str, object]


class ReferenceMessage(_Fields):
    """How many units have log-probabilities under the reference: computed now, or read from the
    run's store.

    Attributes:
        seconds, cpu_time_s: of the computation, if there was one.
    """

    kind: Literal["reference"]
    computed: int
    reused: int
    seconds: NotRequired[float]
    cpu_time_s: NotRequired[float]


class StepMessage(_Fields):
    """One line of metrics.jsonl, with the figures of the objective; ranks other than 0 send `step`
    alone, programs of `unisono run` their loss, with text where it is not finite.
    """

    kind: Literal["step"]
    step: int
    loss: NotRequired[float | None]
    tokens: NotRequired[int]
    tokens_per_second: NotRequired[float | None]


class EvalMessage(_Fields):
    """Figures of an evaluation, one of them `eval_loss`."""

    kind: Literal["eval"]
    step: int
    best: NotRequired[bool]


class SampleMessage(_Fields):
    """An answer of the model in training; `reference` is that of the row.

    `pictures` are names of thumbnails of the row's pictures, `drawn` of one that the model drew.
    """

    kind: Literal["sample"]
    step: int
    prompt: str
    text: str
    reference: NotRequired[str]
    pictures: NotRequired[Sequence[str]]
    drawn: NotRequired[str]


class CheckpointMessage(_Fields):
    """A checkpoint was saved in `seconds`; training waited for `blocking_s` of them. That of the
    first one has an estimate for all of the run, once it has been read back.
    """

    kind: Literal["checkpoint"]
    step: int
    path: str
    bytes: NotRequired[int]
    seconds: NotRequired[float]
    blocking_s: NotRequired[float]
    estimate: NotRequired[Mapping[str, object]]


class ShardWrittenMessage(_Fields):
    """This rank's part of a checkpoint is on its disk, or `error` says why not.

    Attributes:
        temporary: the directory's name, until the checkpoint is whole.
        files: their entries of the manifest, by name.
    """

    kind: Literal["shard_written"]
    step: int
    temporary: str
    directory: str
    files: Mapping[str, Mapping[str, object]]
    error: str
    verdict: NotRequired[Mapping[str, object] | None]


class ShardMovesMessage(_Fields):
    """This rank's part is being transferred and makes progress; repeated until it arrives."""

    kind: Literal["shard_moves"]
    step: NotRequired[int]
    temporary: str


class ShardsOverMessage(_Fields):
    """Rank 0 does not (or no longer) wait for parts of this checkpoint."""

    kind: Literal["shards_over"]
    step: int
    temporary: str


class MovedMessage(_Fields):
    """Rank 0 writes to `path` from now on, since the run's directory is lost."""

    kind: Literal["moved"]
    path: str


class DigestMessage(_Fields):
    """A digest of the weights that a rank trains, and what determines its rounding."""

    kind: Literal["digest"]
    step: int
    digest: str
    arithmetic: str


class AskedMessage(_Fields):
    """The name of a signal that the rank received, from its front or from outside."""

    kind: Literal["asked"]
    signal: str


class KeptMessage(_Fields):
    """Cost of the memory snapshots of an adapter, as medians of the first steps, and the memory;
    from here on every n-th step is kept, null: none.
    """

    kind: Literal["kept"]
    cost_s: float
    step_time_s: float
    bytes: int
    every: int | None


class RankReportMessage(_Fields):
    """The facts of one of several ranks, `RankReport.to_json()`; it then waits for `go` on
    stdin.
    """

    kind: Literal["rank_report"]
    report: Mapping[str, object]


class WarningMessage(_Fields):
    """A warning.

    Attributes:
        where: a path, or a row.
        step, rows: of a skipped step.
        signature, cause, line: of a line in a log that the catalogue knows.
        verdict: on what the warning is about.
    """

    kind: Literal["warning"]
    code: NotRequired[str]
    text: str
    fix: NotRequired[str]
    where: NotRequired[str]
    step: NotRequired[int | None]
    rows: NotRequired[list[str]]
    signature: NotRequired[str]
    cause: NotRequired[str | None]
    line: NotRequired[str]
    verdict: NotRequired[Mapping[str, object]]


class NoteMessage(_Fields):
    """A line for people."""

    kind: Literal["note"]
    text: str


class TokenMessage(_Fields):
    """A piece of an answer, streamed (generate, chat)."""

    kind: Literal["token"]
    text: str


class ProgressMessage(_Fields):
    """How many bytes of a copy are done."""

    kind: Literal["progress"]
    bytes: int
    of: int


class RoomMessage(_Fields):
    """Space on the disk of checkpoints, before one is read again: `trainer.checkpoint` has the
    terms.
    """

    kind: Literal["room"]
    free_bytes: int
    own_bytes: int
    steps: list[int]


class StoreMessage(_Fields):
    """The port on which rank 0 of a trial collective listens."""

    kind: Literal["store"]
    port: int


class RefusedMessage(_Fields):
    """An error that ended a process or a run, from `UnisonoError.to_json`; a callback in another
    program sends its `text`.
    """

    kind: Literal["refused"]
    exit_code: NotRequired[int]
    problems: NotRequired[Sequence[Mapping[str, object]]]
    verdict: NotRequired[Mapping[str, object] | None]
    text: NotRequired[str]


class CrashedMessage(_Fields):
    """An unexpected exception; `peer_lost`: it results from the failure of a different rank."""

    kind: Literal["crashed"]
    exit_code: NotRequired[int]
    error: str
    where: NotRequired[str]
    traceback: NotRequired[str]
    peer_lost: NotRequired[bool]
    step: NotRequired[int]


class ResultMessage(_Fields):
    """The last message: the fields of the `Result` that a task's request names, or of a
    `RunResult`, of which a rank sends a part. Named are those that are read here.
    """

    kind: Literal["result"]
    exit_code: NotRequired[int]
    outcome: NotRequired[str]
    output_dir: NotRequired[str | None]
    step: NotRequired[int | None]
    checkpoint: NotRequired[str | None]
    verdict: NotRequired[Mapping[str, object] | None]
    problems: NotRequired[Sequence[Mapping[str, object]]]
    loss: NotRequired[float | None]
    eval: NotRequired[Mapping[str, object]]
    tokens_per_second: NotRequired[float | None]
    weights: NotRequired[str | None]
    read_back: NotRequired[Mapping[str, object] | None]
    wall_time_s: NotRequired[float]
    held_by: NotRequired[str]


class TalkNews(_Fields):
    """What `chat` and `serve` answer: `trainer.plan.talk_messages` has a dataclass for each kind,
    and `decode_message` reads it. `pong` is a sign of life.
    """

    kind: Literal[
        "opened", "answer", "refused_turn", "begun", "pieces", "answered", "refused_ask", "failed_ask", "pong"
    ]  # fmt: skip


# ---- of programs of `unisono run`


class FactsMessage(_Fields):
    """What a callback has read of its trainer."""

    kind: Literal["facts"]
    facts: Mapping[str, object]


class FrameworkMessage(_Fields):
    """The framework that the program has loaded."""

    kind: Literal["framework"]
    name: str


class UnguardedMessage(_Fields):
    """Why a process of the program is not watched."""

    kind: Literal["unguarded"]
    text: str


# ---- of fronts


class PlanMessage(_Fields):
    """The object of plan.json: `RunPlan.to_json()`."""

    kind: Literal["plan"]
    output_dir: str
    total_steps: int
    world_size: int
    ranks: list[Mapping[str, object]]


class VerdictMessage(_Fields):
    """The object of verdict.json: `Verdict.to_json()`."""

    kind: Literal["verdict"]
    evidence: list[dict[str, str]]
    hosts: list[str]


class ConnectedMessage(_Fields):
    """The driver has reached the head of the Ray cluster."""

    kind: Literal["connected"]
    address: str
    host: str


class PlacedMessage(_Fields):
    """The hosts of a job's nodes under Ray; `shared`: whether the first one sees the run's
    directory.
    """

    kind: Literal["placed"]
    shared: bool
    hosts: list[str]


class RestartingMessage(_Fields):
    """A job under Ray is started again; `restart` is the dump of a `Restart`."""

    kind: Literal["restarting"]
    restart: Mapping[str, object]


class FrontEndedMessage(_Fields):
    """The exit code of a node's front under Ray."""

    kind: Literal["front_ended"]
    code: int


class StartRefusedMessage(_Fields):
    """The error of a front before it had a run, from `UnisonoError.to_json`; `type`: its class."""

    kind: Literal["start_refused"]
    type: NotRequired[str]
    exit_code: int
    problems: Sequence[Mapping[str, object]]
    verdict: Mapping[str, object] | None


class GoMessage(_Fields):
    """A front's driver under Ray may start the ranks: the run's directory is free for them."""

    kind: Literal["go"]


class SignalMessage(_Fields):
    """The name of a signal that a front has received, for its driver under Ray."""

    kind: Literal["signal"]
    name: str


class StoppedMessage(_Fields):
    """A signal ended a front before there was anything to save."""

    kind: Literal["stopped"]
    exit_code: int


class ReportMessage(_Fields):
    """The report of `unisono doctor`, with the fields of its JSON object."""

    kind: Literal["report"]
    exit_code: int
    host: str


FinalMessage = RefusedMessage | CrashedMessage | ResultMessage
Message = (
    PhaseMessage | ReadyMessage | ReferenceMessage | StepMessage | EvalMessage | SampleMessage |
    CheckpointMessage | ShardWrittenMessage | ShardMovesMessage | ShardsOverMessage | MovedMessage |
    DigestMessage | AskedMessage | KeptMessage | RankReportMessage | WarningMessage | NoteMessage |
    TokenMessage | ProgressMessage | RoomMessage | StoreMessage | FinalMessage | TalkNews | FactsMessage |
    FrameworkMessage | UnguardedMessage | PlanMessage | VerdictMessage | ConnectedMessage | PlacedMessage |
    RestartingMessage | FrontEndedMessage | StartRefusedMessage | StoppedMessage | ReportMessage | GoMessage |
    SignalMessage
)  # fmt: skip
Show = Callable[[Message], None]
"""How a front presents a message: on the screen, as JSON, or in a test."""

Kind = TypeVar("Kind", bound=_Fields)


def message_of(kind: type[Kind], fields: Mapping[str, object]) -> Kind:
    """A message whose fields a different type describes: those of its `to_json`, or the figures of
    an objective.
    """
    (name,) = get_args(kind.__annotations__["kind"])
    return cast("Kind", {"kind": name, "time": time.time(), **fields})


def fields_of(message: Message) -> dict[str, object]:
    """A message without kind and time."""
    return {name: value for name, value in message.items() if name not in ("kind", "time")}


def read_message(line: str) -> Message | None:
    """The message of one line, or None for a torn or foreign line."""
    try:
        return check_message(parse_json(line))
    except ValueError:
        return None


def check_message(value: object) -> Message:
    """The value, if it is a message: an object with a kind.

    Raises:
        ValueError: if it is not one.
    """
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError(f"not a message: {value!r:.40}")  # noqa: TRY004 - as for other lines
    return cast("Message", value)


def is_final(message: Message) -> TypeGuard[FinalMessage]:
    """Whether it is the last message of a rank or a task."""
    return message["kind"] in ("refused", "crashed", "result")


def notify(show: Show, text: str) -> None:
    """A line for people."""
    show({"kind": "note", "time": time.time(), "text": text})
