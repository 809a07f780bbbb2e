"""Reads what a rank leaves when it is inspected: the dump of torch's flight recorder, and stacks by faulthandler or py-spy. Pure.

Flight recorder, as torch 2.11 to 2.13 write it for gloo and NCCL: an entry's own `state` is not reliable, since gloo leaves it
at "scheduled". The last collective that began is in `pg_status`, and whether one has ended in each entry's `retired`. The number
of the last completed one in `pg_status` counts only where no entry has it: gloo's threads finish in any order, each writes its own
number there, and so it was seen to decrease.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.text import one_line
from unisono.watch.views import Collective

_DEFAULT = "default_pg"
_TEXT_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Flight:
    """The collectives of one rank, in the group that it waits in, or else in the group of all ranks.

    Attributes:
        begun: the last one that was begun; None where the recorder does not have it any more. Not the first that is not completed: gloo
            counts a collective as completed late, and one that has long ended would be told.
        completed: the number of the last that was completed; None where none was.
        recurs: whether one like `begun` has been before it.
        may_step: of a rank of somebody else's program: whether it can still come to where it makes its steps; None where it is not known.
        thread: of such a rank: the number of the thread that trains; None where it is not told.
    """

    begun: Collective | None = None
    completed: int | None = None
    recurs: bool = False
    may_step: bool | None = None
    thread: int | None = None


def read_flight(text: str) -> Flight:
    """What a dump says; nothing where it is empty, torn, or of another form."""
    try:
        dump: Any = json.loads(text)
        entries = [entry for entry in dump.get("entries") or () if not entry.get("is_p2p")]
        groups = [
            Group.of(str(number), status).as_entries_tell(entries)
            for number, status in dump["pg_status"].items()
        ]
        found = [(group, group.entry(entries)) for group in groups if group.enqueued > 0]
        if not found:
            return Flight()
        group, entry = max(found, key=lambda pair: (pair[0].waits, _is_default(pair[1]), pair[0].enqueued))
        may_step, thread = dump.get("may_step"), dump.get("thread")
        return Flight(
            _collective(entry, group) if entry is not None else None,
            group.completed,
            recurs=_recurs(entry, entries),
            may_step=may_step if isinstance(may_step, bool) else None,
            thread=thread if isinstance(thread, int) else None,
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return Flight()


def shortened(text: str, *, limit: int) -> str:
    """A dump of at most so many characters: its oldest entries are left out first. One that cannot be read is cut."""
    if len(text) <= limit:
        return text
    try:
        dump: Any = json.loads(text)
        entries = list(dump["entries"])
    except (ValueError, LookupError, TypeError):
        return text[:limit]
    while entries and len(text) > limit:
        entries = entries[(len(entries) + 1) // 2 :]
        text = json.dumps({**dump, "entries": entries})
    return text if len(text) <= limit else text[:limit]


@dataclass(frozen=True, slots=True)
class Group:
    """How far a rank is in one process group.

    Attributes:
        number: the group's, on this rank.
        enqueued: the number of the last collective that was begun; completed: of the last that is done, None where none is.
    """

    number: str
    enqueued: int
    completed: int | None

    @classmethod
    def of(cls, number: str, status: Mapping[str, Any]) -> "Group":
        """What `pg_status` says of one group."""
        completed = int(status["last_completed_collective"])
        return cls(number, int(status["last_enqueued_collective"]), completed if completed >= 0 else None)

    def as_entries_tell(self, entries: Sequence[Mapping[str, Any]]) -> "Group":
        """The same with what its entries say has ended: all before the first that has not."""
        own = [entry for entry in entries if str(entry["pg_id"]) == self.number and "retired" in entry]
        if not own:
            return self
        done = {int(entry["collective_seq_id"]): bool(entry["retired"]) for entry in own}
        pending = [number for number, is_retired in done.items() if not is_retired]
        # The newest are not among them where the recorder keeps few, or was read in the middle of a call.
        known = self.completed or 0 if self.enqueued not in done else 0
        completed = min(pending) - 1 if pending else max(*done, known)
        return replace(self, completed=completed or None)

    @property
    def waits(self) -> bool:
        """Whether one was begun and is not done."""
        return self.enqueued > (self.completed or 0)

    @property
    def first(self) -> int:
        """The number of the first that is not completed; of the last, where all are. In a live run gloo may still count one that has ended."""
        return (self.completed or 0) + 1 if self.waits else self.enqueued

    def entry(self, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The youngest that has the number of the last that was begun."""
        for entry in reversed(entries):
            if str(entry["pg_id"]) == self.number and int(entry["collective_seq_id"]) == self.enqueued:
                return entry
        return None


def _recurs(entry: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an earlier one of its group has its name and its sizes."""
    if entry is None:
        return False
    like = [(one["pg_id"], one["profiling_name"], one["input_sizes"]) for one in entries]
    return like.count((entry["pg_id"], entry["profiling_name"], entry["input_sizes"])) > 1


def _is_default(entry: Mapping[str, Any] | None) -> bool:
    return entry is not None and _DEFAULT in entry["process_group"]


def _collective(entry: Mapping[str, Any], group: Group) -> Collective:
    name = str(entry["profiling_name"]).partition(":")
    return Collective(
        group=one_line(":".join(map(str, entry["process_group"])), limit=_TEXT_LIMIT),
        number=group.enqueued,
        name=one_line(name[2] or name[0], limit=_TEXT_LIMIT),
        sizes=one_line(json.dumps(entry["input_sizes"]), limit=_TEXT_LIMIT),
    )


MOST_FRAMES = 40
_LINE_LIMIT = 300
_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_CUT_SHORT = "..."


def main_thread_of_faulthandler(text: str, *, trains: int | None = None) -> tuple[str, ...]:
    """The main thread's frames, innermost first, as "file:line in function"; empty where there is none, or the text is torn.

    Args:
        text: that faulthandler has written.
        trains: the number of the thread that does the main one's work, if it is among them.

    faulthandler writes the youngest thread first, so the main thread comes last, unless there are more than a hundred: those are left out.
    It calls that one "Current" which got the signal, and that is nearly always the main thread.
    """
    threads: list[tuple[bool, list[str]]] = []
    is_cut, trained = False, None
    for line in text.splitlines():
        if _HEADER.match(line):
            threads.append((line.startswith("Current"), []))
            if trains is not None and f"0x{trains:016x} " in line:
                trained = threads[-1][1]
        elif line == _CUT_SHORT:
            is_cut = True
        elif threads and (found := _FRAME.match(line)):
            threads[-1][1].append(_frame(found["file"], found["line"], found["function"]))
    if not threads:
        return ()
    if trained:
        return tuple(trained[:MOST_FRAMES])
    if is_cut:
        return next((tuple(frames[:MOST_FRAMES]) for is_current, frames in threads if is_current), ())
    return tuple(threads[-1][1][:MOST_FRAMES])


def main_thread_of_py_spy(text: str, *, pid: int) -> tuple[str, ...]:
    """The same from what `py-spy dump --json` prints; a process's main thread has the process's number."""
    try:
        threads: Any = json.loads(text[text.index("[") :])
        frames = next(thread["frames"] for thread in threads if thread["os_thread_id"] == pid)
        return tuple(
            _frame(str(frame["filename"]), str(frame["line"]), str(frame["name"]))
            for frame in frames[:MOST_FRAMES]
        )
    except (ValueError, LookupError, TypeError, StopIteration):
        return ()


def _frame(file: str, line: str, function: str) -> str:
    return one_line(f"{file}:{line} in {function}", limit=_LINE_LIMIT)
