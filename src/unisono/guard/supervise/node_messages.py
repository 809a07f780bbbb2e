"""What the fronts of a job send each other while its program or its ranks run.

Messages are frozen dataclasses. On the wire each is a JSON object with its `kind`; a front ignores
kinds that only a newer version has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import core_schema

from unisono.base.causes import Verdict
from unisono.base.messages import Message, check_message
from unisono.guard.agree.reports import RankReport
from unisono.guard.agree.training import PreparedFacts
from unisono.guard.integrations.border import Answer, ReportedFacts
from unisono.guard.places.ranks import RankPlace
from unisono.guard.supervise.codec import decode_message, encode_message
from unisono.guard.supervise.evidence import RawEvidence
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.watch.views import Look, RankView


class _AsJson:
    """Marks types that convert themselves, with `to_json` and `from_json`."""

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, source) else source.from_json(value),
            serialization=core_schema.plain_serializer_function_ser_schema(source.to_json),
        )


class _AsMessage:
    """Marks a message of a rank: `check_message` reads it, and keeps its further fields."""

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(check_message)


def readable_verdicts(values: object) -> list[Verdict]:
    """Verdicts of a different front, without those that cannot be read: a newer version has sent
    them, and the others still count.
    """
    verdicts = []
    for value in values if isinstance(values, Sequence) else []:
        try:
            verdicts.append(value if isinstance(value, Verdict) else Verdict.from_json(value))
        except (ValueError, TypeError):
            continue
    return verdicts


# ---- from a node to the head


@dataclass(frozen=True, slots=True)
class RanksRegistered:
    """The ranks of a program on a node, as far as they are known.

    Attributes:
        attempt: number of their start, from 0.
        unseen: ranks without heartbeats.
        restarts: how often their launcher restarts them.
    """

    kind: ClassVar = "registered"
    places: tuple[RankPlace, ...]
    world_size: int
    attempt: int
    unseen: tuple[int, ...] = ()
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A message of a rank, as in base.messages."""

    kind: ClassVar = "rank_said"
    rank: int
    message: Annotated[Message, _AsMessage()]


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The end of a rank; `attempt` numbers the starts of a program's ranks, from 0."""

    kind: ClassVar = "rank_ended"
    end: Annotated[RankEnd, _AsJson()]
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class NodePrepared:
    """The result of `Prepare` on a node."""

    kind: ClassVar = "prepared"
    facts: PreparedFacts


@dataclass(frozen=True, slots=True)
class RankReported:
    """The facts of a rank that waits for `Go`."""

    kind: ClassVar = "rank_report"
    report: RankReport


@dataclass(frozen=True, slots=True)
class RankViews:
    """The ranks of a node as its front sees them.

    Attributes:
        links: their connections with unacknowledged data.
    """

    kind: ClassVar = "beats"
    views: tuple[Annotated[RankView, _AsJson()], ...]
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StacksCollected:
    """The result of `CollectStacks`, with the unparsed evidence by rank."""

    kind: ClassVar = "looked"
    looks: tuple[Annotated[Look, _AsJson()], ...]
    raw: dict[int, Annotated[RawEvidence, _AsJson()]]


@dataclass(frozen=True, slots=True)
class TimelineLines:
    """Lines of a node's timeline, for a head that does not see its file."""

    kind: ClassVar = "timeline"
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FactsReported:
    """Facts of a process for an agreement, which waits for `FactsAnswered` with the same key."""

    kind: ClassVar = "brought"
    key: str
    reported: ReportedFacts


@dataclass(frozen=True, slots=True)
class LauncherUnwatched:
    """A launcher whose ranks are not watched; `text` says why."""

    kind: ClassVar = "unwatched"
    text: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The name of a signal that a front received and passed on to its program."""

    kind: ClassVar = "asked"
    signal: str


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """The end of the program on a node.

    Attributes:
        returncode: negative: the signal that ended it.
        left: how many of its processes outlived it, and were ended.
        oom_killed: whether the kernel counted an OOM kill meanwhile; None: unknown.
        subreaper_lost: whether its subreaper was killed, and the program with it.
    """

    kind: ClassVar = "program_ended"
    returncode: int
    left: int = 0
    oom_killed: bool | None = None
    subreaper_lost: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """The cause in the program's output on a node; None: nothing is known."""

    kind: ClassVar = "diagnosed"
    verdict: Annotated[Verdict, _AsJson()] | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A node that did not start its part, from `UnisonoError.to_json`."""

    kind: ClassVar = "refused"
    problems: tuple[dict[str, object], ...] = ()
    verdict: dict[str, object] | None = None

    @property
    def error(self) -> dict[str, object]:
        """The output of `UnisonoError.to_json`."""
        return {"problems": self.problems, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class AllEnded:
    """All ranks of a node have ended."""

    kind: ClassVar = "all_ended"


@dataclass(frozen=True, slots=True)
class SnapshotsSent:
    """All that `SnapshotsRequested` asked for has been sent."""

    kind: ClassVar = "kept_sent"


# ---- in both directions


@dataclass(frozen=True, slots=True)
class Stop:
    """The name of a signal that stops the job.

    Attributes:
        again: whether it is a second one, which does not wait for a checkpoint.
    """

    kind: ClassVar = "stop"
    signal: str
    again: bool = False


# ---- from the head to the nodes


@dataclass(frozen=True, slots=True)
class Prepare:
    """The nodes agree; each prepares its data and model, and sends `NodePrepared`."""

    kind: ClassVar = "prepare"


@dataclass(frozen=True, slots=True)
class PlanDecided:
    """The ranks are to be started on this plan; `plan` is the object of plan.json."""

    kind: ClassVar = "plan"
    plan: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Start:
    """The program is to be started.

    Attributes:
        store: address of the program's MASTER_ADDR and MASTER_PORT.
    """

    kind: ClassVar = "start"
    store: tuple[str, int]
    run_id: str


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks agree; they meet at the store."""

    kind: ClassVar = "go"
    store: tuple[str, int]


@dataclass(frozen=True, slots=True)
class End:
    """The program or the ranks are to be ended at once."""

    kind: ClassVar = "end"
    why: str = ""


@dataclass(frozen=True, slots=True)
class CollectStacks:
    """Stacks and flight recorders of some ranks are wanted."""

    kind: ClassVar = "look"
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FactsAnswered:
    """The result of an agreement, for the process whose facts had this key."""

    kind: ClassVar = "answer"
    key: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class DiagnosisRequested:
    """The cause in the program's output is wanted."""

    kind: ClassVar = "diagnose"


@dataclass(frozen=True, slots=True)
class VerdictReached:
    """A verdict that every node shows."""

    kind: ClassVar = "verdict"
    verdict: Annotated[Verdict, _AsJson()]


@dataclass(frozen=True, slots=True)
class Note:
    """A line that every node shows."""

    kind: ClassVar = "note"
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning that every node shows."""

    kind: ClassVar = "warning"
    code: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotsRequested:
    """The steps that the ranks of a node kept in memory are wanted; the ranks have ended."""

    kind: ClassVar = "kept_wanted"


@dataclass(frozen=True, slots=True)
class StoppedBy:
    """A signal that ended a job before its ranks started.

    Attributes:
        signal: its name.
        where: the node that received it.
    """

    signal: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """A checkpoint as each node must see it: its directory's name and its manifest's digest."""

    name: str
    manifest: str


@dataclass(frozen=True, slots=True)
class Again:
    """The ranks are started again, if the nodes still agree.

    Attributes:
        round: a number that no earlier agreement of this job had.
        checkpoint: to resume from; None if there is none.
    """

    kind: ClassVar = "again"
    round: int
    checkpoint: CheckpointIdentity | None = None


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The head's last message: how the job ended.

    Attributes:
        verdicts: the decisive one first.
        problems: of the error that ended it, from `UnisonoError.to_json`.
        result: of result.json; None if nothing was trained or run.
        stopped: the signal that ended the job before its ranks started.
    """

    kind: ClassVar = "ended"
    exit_code: int = 1
    verdicts: Annotated[
        tuple[Annotated[Verdict, _AsJson()], ...],
        BeforeValidator(lambda value: tuple(readable_verdicts(value))),
    ] = ()
    problems: tuple[dict[str, object], ...] = ()
    result: dict[str, object] | None = None
    stopped: StoppedBy | None = None


NodeNews = (
    NodePrepared
    | RanksRegistered
    | RankSaid
    | RankEnded
    | RankReported
    | RankViews
    | StacksCollected
    | TimelineLines
    | FactsReported
    | LauncherUnwatched
    | SignalReceived
    | ProgramEnded
    | Diagnosed
    | Refused
    | AllEnded
    | SnapshotsSent
    | Stop
)
HeadRequest = (
    Prepare
    | PlanDecided
    | Start
    | Go
    | End
    | CollectStacks
    | FactsAnswered
    | DiagnosisRequested
    | SnapshotsRequested
    | VerdictReached
    | Warned
    | Note
    | Stop
    | Again
    | JobEnded
)


def encode(message: NodeNews | HeadRequest) -> dict[str, object]:
    """The message as a JSON object."""
    return encode_message(message)


def decode_news(value: Mapping[str, object]) -> NodeNews | None:
    """Reads a message of a node; None for a kind that is not one of these.

    Raises:
        KeyError, TypeError, ValueError: if its fields cannot be read.
    """
    return decode_message(value, NodeNews)


def decode_request(value: Mapping[str, object]) -> HeadRequest | None:
    """Reads a message of the head; None for a kind that is not one of these.

    Raises:
        KeyError, TypeError, ValueError: if its fields cannot be read.
    """
    return decode_message(value, HeadRequest)
