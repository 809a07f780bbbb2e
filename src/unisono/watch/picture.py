"""All that the judge looks at: every rank and every node at one moment, and what was gathered of those that are suspected."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from unisono.plan import RankPlace
from unisono.watch.views import RankView


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
            "rank": self.rank, "stack": list(self.stack), "how": self.how, "completed": self.completed, "rows": list(self.rows),
            "note": self.note, "recurs": self.recurs, "may_step": self.may_step,
            "begun": None if begun is None else {"group": begun.group, "number": begun.number, "name": begun.name, "sizes": begun.sizes},
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads what to_json gave.

        Raises:
            KeyError, TypeError, ValueError: if it is no such object.
        """
        begun, completed, may_step = value["begun"], value["completed"], value.get("may_step")
        return cls(
            rank=int(value["rank"]), stack=tuple(map(str, value["stack"])), how=str(value["how"]), rows=tuple(map(int, value["rows"])),
            note=str(value["note"]), recurs=bool(value.get("recurs")), may_step=None if may_step is None else bool(may_step), completed=None if completed is None else int(completed),
            begun=None if begun is None else Collective(
                str(begun["group"]), int(begun["number"]), str(begun["name"]), str(begun["sizes"])
            ),
        )  # fmt: skip


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
