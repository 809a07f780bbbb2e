"""What the judge reads, and what it reports as long as the run may continue: every rank and node at one moment, and a Suspicion."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from unisono.causes import Verdict
from unisono.plan import RankPlace
from unisono.watch.beat import PHASES, phase_named
from unisono.watch.rank_record import Beat, PhaseTimes


@dataclass(frozen=True, slots=True)
class ProcessView:
    """State of a rank's process as reported by the system.

    Attributes:
        state: of its main thread, as in ps(1): R, S, D, T, Z; an empty string if it is gone or unknown.
        waits_in: the kernel function that the main thread waits in, or an empty string.
        cpu_s: CPU seconds of all its threads.
        children: states of its child processes, e.g. loaders: one letter each.
        gpu_percent: utilization of its device; None without one.
    """

    state: str = ""
    waits_in: str = ""
    cpu_s: float = 0.0
    children: str = ""
    gpu_percent: int | None = None


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank as seen by its node's front.

    Attributes:
        beat: its last heartbeat; None before the first.
        idle_s: seconds since the last heartbeat of the main thread, by the clock of the front, without time in which the front was stopped.
        pulse_idle_s: the same for its second thread.
        has_ended: whether its process is gone or about to exit: it has refused or crashed.
        reported_result: whether it has reported its result.
    """

    rank: int
    node_rank: int
    beat: Beat | None
    idle_s: float
    pulse_idle_s: float
    process: ProcessView
    has_ended: bool = False
    reported_result: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for others: by its phase; for a foreign program, which has few phases, also by pending collectives.

        These include collectives that are not called from Python, as in DDP's backward.
        """
        if self.beat is None:
            return False
        return PHASES[phase_named(self.beat.phase)].waits or (self.beat.is_foreign and self.beat.pending > 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON object for the head."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the result of to_json.

        Raises:
            KeyError, TypeError, ValueError: if it is not such an object.
        """
        beat = value["beat"]
        if beat is not None:
            beat = Beat(
                **{
                    **beat,
                    "shares_s": tuple(float(share) for share in beat["shares_s"]),
                    "times": PhaseTimes(**beat["times"]),
                }
            )
        return cls(
            rank=int(value["rank"]),
            node_rank=int(value["node_rank"]),
            beat=beat,
            idle_s=float(value["idle_s"]),
            pulse_idle_s=float(value["pulse_idle_s"]),
            process=ProcessView(**value["process"]),
            has_ended=bool(value["has_ended"]),
            reported_result=bool(value["reported_result"]),
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as seen by the head.

    Attributes:
        silent_s: seconds since its last message, by the head's clock; 0 for the head's own node.
        links: connections between ranks with unacknowledged data, as reported by this node's kernel: "node 0 (a) → 10.0.0.3:41233: 4
            retransmissions".
    """

    node_rank: int
    host: str
    silent_s: float = 0.0
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of torch's flight recorder.

    Attributes:
        group: of which process group.
        sizes: of its tensors, as "[[1000]]".
    """

    group: str
    number: int
    name: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number} {self.sizes}"


@dataclass(frozen=True, slots=True)
class Look:
    """Data collected from one rank after it was suspected, or while it waited for a suspected one.

    Attributes:
        stack: of its main thread, innermost call first, as "file:line in function"; empty if the process did not respond.
        how: the source of the stack: "faulthandler", "py-spy", or why there is none.
        begun: the last collective that began, from the flight recorder; None if unknown.
        completed: the number of the last completed one.
        recurs: whether an equal one began before.
        may_step: whether it can still reach the place where it makes its steps; None if unknown.
        note: other information for a person, e.g. a frozen cgroup.
    """

    rank: int
    stack: tuple[str, ...] = ()
    how: str = ""
    begun: Collective | None = None
    completed: int | None = None
    rows: tuple[int, ...] = ()
    note: str = ""
    recurs: bool = False
    may_step: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object for the head."""
        begun = self.begun
        return {
            "rank": self.rank,
            "stack": list(self.stack),
            "how": self.how,
            "completed": self.completed,
            "rows": list(self.rows),
            "note": self.note,
            "recurs": self.recurs,
            "may_step": self.may_step,
            "begun": None
            if begun is None
            else {"group": begun.group, "number": begun.number, "name": begun.name, "sizes": begun.sizes},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the result of to_json.

        Raises:
            KeyError, TypeError, ValueError: if it is not such an object.
        """
        begun, completed, may_step = value["begun"], value["completed"], value.get("may_step")
        return cls(
            rank=int(value["rank"]),
            stack=tuple(map(str, value["stack"])),
            how=str(value["how"]),
            rows=tuple(map(int, value["rows"])),
            note=str(value["note"]),
            recurs=bool(value.get("recurs")),
            may_step=None if may_step is None else bool(may_step),
            completed=None if completed is None else int(completed),
            begun=None
            if begun is None
            else Collective(
                str(begun["group"]), int(begun["number"]), str(begun["name"]), str(begun["sizes"])
            ),
        )


@dataclass(frozen=True)
class RunView:
    """The run at one moment.

    Attributes:
        places: all ranks of the plan.
        nodes: of a job of several nodes, including the head's.
        looks: data of the ranks that were inspected since the last progress.
    """

    places: Mapping[int, RankPlace]
    views: Mapping[int, RankView]
    nodes: Mapping[int, NodeView] = field(default_factory=dict)
    looks: Mapping[int, Look] = field(default_factory=dict)
    total_steps: int = 0


@dataclass(frozen=True)
class Suspicion:
    """A suspected stall; the run continues.

    Attributes:
        verdict: the preliminary verdict. It does not stop the run.
        since_s: seconds without progress.
        is_named: whether it is certain enough to be reported with cause and rank; before that, only that ranks are inspected is reported.
        ends_in_s: seconds without progress after which the run is stopped; None if it is not stopped for that.
        wanted: ranks to inspect: their stacks and flight recorders.
    """

    verdict: Verdict
    since_s: float
    is_named: bool
    ends_in_s: float | None
    wanted: tuple[int, ...] = ()
