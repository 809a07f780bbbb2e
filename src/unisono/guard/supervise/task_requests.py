"""What fronts request of task processes, and what those that a guard starts give."""

from dataclasses import dataclass
from typing import ClassVar, Generic, TypedDict, TypeVar

Result_co = TypeVar("Result_co", covariant=True)


class TaskRequest(Generic[Result_co]):
    """A request, a frozen dataclass.

    `Result_co` has the fields of the message `result`: our own process writes it, of the same
    version.

    Attributes:
        task: its name, one of `unisono.trainer.task.entry.TASKS`.
    """

    __slots__ = ()
    task: ClassVar[str]


class RowOrigins(TypedDict):
    """File and line of rows, in their order."""

    rows: list[str]


@dataclass(frozen=True, slots=True)
class RowsRequest(TaskRequest[RowOrigins]):
    """The rows of `sequences` of the training split of a token table, which is in a directory."""

    task: ClassVar = "rows"
    table: str
    sequences: tuple[int, ...]


class CollectiveResult(TypedDict):
    """The outcome of a small collective, on one rank.

    Attributes:
        text: the outcome, one line; after a failure it has torch's message.
        missing: ranks that did not join.
        small_s: the time for a sum of one number over existing connections; None if that was not
            reached.
    """

    ok: bool
    text: str
    seconds: float
    missing: list[int]
    bytes_per_second: float | None
    small_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest(TaskRequest[CollectiveResult]):
    """A small collective.

    Attributes:
        backend: gloo or nccl.
        device_index: among the visible accelerators; None: the CPU.
        store_host: where the store of rank 0 listens.
        store_ports: to try before one that the system chooses.
        deadline_s: from the line on stdin.
        rounds: of the large sum, over tensors of `large_bytes`.
        names: of the ranks, for `text`.
    """

    task: ClassVar = "collective"
    rank: int
    world_size: int
    backend: str = "gloo"
    device_index: int | None = None
    store_host: str = "127.0.0.1"
    store_ports: tuple[int, ...] = ()
    deadline_s: float = 15.0
    rounds: int = 3
    large_bytes: int = 4 << 20
    names: tuple[str, ...] = ()
