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
    """What the system says of a rank's process.

    Attributes:
        state: of its main thread, as ps(1) has it: R, S, D, T, Z; an empty string where it is gone or not told.
        waits_in: the kernel's function that the main thread waits in, or an empty string.
        cpu_s: CPU seconds of all its threads so far.
        children: states of the processes that it has started, as loaders are: one letter each.
        gpu_percent: how busy its device is; None without one.
    """

    state: str = ""
    waits_in: str = ""
    cpu_s: float = 0.0
    children: str = ""
    gpu_percent: int | None = None


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank, as its node's front sees it.

    Attributes:
        rank: which.
        node_rank: its node.
        beat: its record; None before its first.
        idle_s: seconds for which the main thread has not beaten, by the clock of the front; time in which that was stopped itself is none.
        pulse_idle_s: the same of its second thread.
        process: what the system says.
        has_ended: its process is gone, or about to be: it has refused or crashed.
        told_result: it has handed over its result.
    """

    rank: int
    node_rank: int
    beat: Beat | None
    idle_s: float
    pulse_idle_s: float
    process: ProcessView
    has_ended: bool = False
    told_result: bool = False

    @property
    def waits(self) -> bool:
        """Whether its beat says that it waits for others: by its phase; of somebody else's program, which has few, by what it has begun.

        That is a collective that is not done, also one that nobody called from Python, as in DDP's backward.
        """
        if self.beat is None:
            return False
        return PHASES[phase_named(self.beat.phase)].waits or (self.beat.is_foreign and self.beat.pending > 0)

    def to_json(self) -> dict[str, Any]:
        """For the way to the head."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads what to_json gave.

        Raises:
            KeyError, TypeError, ValueError: if it is no such object.
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
            told_result=bool(value["told_result"]),
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, as the head hears it.

    Attributes:
        node_rank: which.
        host: its name.
        silent_s: seconds since anything came from it, by the head's clock; 0 for the head's own node.
        links: connections between ranks of which this node's kernel says that what was sent is not acknowledged: "node 0 (a) → 10.0.0.3:41233: 4
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
        number: of the collective in its group.
        name: as "all_reduce".
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
    """What was gathered of one rank after it had been suspected, or had waited for one that was.

    Attributes:
        rank: which.
        stack: of its main thread, innermost call first, as "file:line in function"; empty where the process did not answer.
        how: by what the stack was got: "faulthandler", "py-spy", or why there is none.
        begun: the last collective that was begun, by the flight recorder; None where it is not known.
        completed: the number of the last that was completed.
        recurs: whether one like it has been before.
        may_step: whether it can still come to where it makes its steps; None where that is not known.
        rows: the sequences that it works on.
        note: anything else that a person should read, as a frozen cgroup.
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
        """For the way to the head."""
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
        """Reads what to_json gave.

        Raises:
            KeyError, TypeError, ValueError: if it is no such object.
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
class Picture:
    """The run at one moment.

    Attributes:
        places: all ranks of the plan.
        views: of the ranks that have been heard of.
        nodes: of a job of several nodes; the head's is among them.
        looks: of the ranks that were looked at since the last progress.
        total_steps: of the plan.
    """

    places: Mapping[int, RankPlace]
    views: Mapping[int, RankView]
    nodes: Mapping[int, NodeView] = field(default_factory=dict)
    looks: Mapping[int, Look] = field(default_factory=dict)
    total_steps: int = 0


@dataclass(frozen=True)
class Suspicion:
    """Somebody does not move; the run goes on.

    Attributes:
        verdict: what it is, as far as is known. It ends nothing.
        since_s: how long.
        is_named: whether it is sure enough to be told with cause and rank; before, it is a line that something is looked at.
        ends_in_s: after how many seconds more without progress the run is ended; None where it is not ended for that.
        wanted: ranks to be looked at: their stacks and the flight recorder.
    """

    verdict: Verdict
    since_s: float
    is_named: bool
    ends_in_s: float | None
    wanted: tuple[int, ...] = ()
