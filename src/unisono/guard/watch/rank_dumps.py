"""Reads what a rank leaves when it is inspected: the dump of torch's flight recorder, and stacks by
faulthandler or py-spy.

Pure.

Flight recorder, as torch 2.11 to 2.13 write it for gloo and NCCL: an entry's own `state` is not
reliable, since gloo leaves it at "scheduled". The last collective that began is in `pg_status`, and
whether one has ended in each entry's `retired`. The number of the last completed one in `pg_status`
counts only where no entry has it: gloo's threads finish in any order, each writes its own number
there, and so it was seen to decrease.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.base.text import one_line
from unisono.guard.watch.views import Collective

_DEFAULT = "default_pg"
_TEXT_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Flight:
    """Collectives of one rank, in the group that it waits in, or else in the group of all ranks.

    Attributes:
        begun: the last one that began; None if the recorder no longer has it. Not the first
            incomplete one: gloo marks collectives as completed late, so one that has long ended
            would be reported.
        completed: the number of the last completed one; None if there is none.
        recurs: whether one equal to `begun` came before it.
        may_step: for a rank of a foreign program: whether it can still reach the place where it
            makes its steps; None if unknown.
        thread: for such a rank: the number of the thread that trains; None if unknown.
    """

    begun: Collective | None = None
    completed: int | None = None
    recurs: bool = False
    may_step: bool | None = None
    thread: int | None = None


def read_flight(text: str) -> Flight:
    """The collectives in a dump; empty if it is empty, incomplete, or in a different format."""
    try:
        dump: Any = json.loads(text)
        entries = [entry for entry in dump.get("entries") or () if not entry.get("is_p2p")]
        groups = [
            GroupProgress.of(str(number), status).with_entries(entries)
            for number, status in dump["pg_status"].items()
        ]
        entered = [(group, group.entry(entries)) for group in groups if group.enqueued > 0]
        if not entered:
            return Flight()
        group, entry = max(entered, key=lambda pair: (pair[0].waits, _is_default(pair[1]), pair[0].enqueued))
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
    """A dump of at most `limit` characters, without its oldest entries.

    One that cannot be parsed is truncated.
    """
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
class GroupProgress:
    """Progress of a rank in one process group.

    Attributes:
        number: of the group, on this rank.
        enqueued: the number of the last collective that began; completed: of the last completed
            one, None if there is none.
    """

    number: str
    enqueued: int
    completed: int | None

    @classmethod
    def of(cls, number: str, status: Mapping[str, Any]) -> "GroupProgress":
        """From the group's entry in `pg_status`."""
        completed = int(status["last_completed_collective"])
        return cls(number, int(status["last_enqueued_collective"]), completed if completed >= 0 else None)

    def with_entries(self, entries: Sequence[Mapping[str, Any]]) -> "GroupProgress":
        """A copy with completion read from its entries: all before the first incomplete one."""
        members = [entry for entry in entries if str(entry["pg_id"]) == self.number and "retired" in entry]
        if not members:
            return self
        done = {int(entry["collective_seq_id"]): bool(entry["retired"]) for entry in members}
        pending = [number for number, is_retired in done.items() if not is_retired]
        # The newest are missing if the recorder keeps few, or was read during a call.
        before = self.completed or 0 if self.enqueued not in done else 0
        completed = min(pending) - 1 if pending else max(*done, before)
        return replace(self, completed=completed or None)

    @property
    def waits(self) -> bool:
        """Whether one began and is not completed."""
        return self.enqueued > (self.completed or 0)

    @property
    def first(self) -> int:
        """The number of the first incomplete one, or of the last if all are completed.

        In a live run gloo may still count one that has ended.
        """
        return (self.completed or 0) + 1 if self.waits else self.enqueued

    def entry(self, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The newest entry with the number of the last one that began."""
        for entry in reversed(entries):
            if str(entry["pg_id"]) == self.number and int(entry["collective_seq_id"]) == self.enqueued:
                return entry
        return None


def _recurs(entry: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an earlier one of its group has the same name and sizes."""
    if entry is None:
        return False
    like = [(one["pg_id"], one["profiling_name"], one["input_sizes"]) for one in entries]
    return like.count((entry["pg_id"], entry["profiling_name"], entry["input_sizes"])) > 1


def _is_default(entry: Mapping[str, Any] | None) -> bool:
    return entry is not None and _DEFAULT in entry["process_group"]


def _collective(entry: Mapping[str, Any], group: GroupProgress) -> Collective:
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
    """The main thread's frames, innermost first, as "file:line in function"; empty if there are
    none, or the text is incomplete.

    Args:
        trains: the number of the thread that trains instead of the main one, if any.

    faulthandler writes the newest thread first, so the main thread comes last, unless there are
        more than a hundred: the rest is omitted.
    "Current" marks the thread that received the signal, which is nearly always the main thread.
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
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append(_frame(match["file"], match["line"], match["function"]))
    if not threads:
        return ()
    if trained:
        return tuple(trained[:MOST_FRAMES])
    if is_cut:
        return next((tuple(frames[:MOST_FRAMES]) for is_current, frames in threads if is_current), ())
    return tuple(threads[-1][1][:MOST_FRAMES])


def main_thread_of_py_spy(text: str, *, pid: int) -> tuple[str, ...]:
    """The main thread's frames from the output of `py-spy dump --json`; a process's main thread has
    the process's number.
    """
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
