"""Which checkpoints stay and which are deleted (pure), and how much disk space they need.

The run's store, `checkpoint prune` and remote storage share the rules. The newest intact ones stay, the best stays, and those at the
multiples of a period stay forever. One that is damaged, or not yet verified, never counts as kept: nothing is deleted before as many as
are wanted are known to be intact. What was only written may not be what the disk returns, so the newest one that was found intact by
reading stays, too, until a newer one was.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.verify import read_manifest
from unisono.checkpoint.writer import free_bytes

_OWN_NAME = re.compile(r"(step-(?P<step>\d{8,})|step-\d{8,}\.tmp-[0-9a-f]+|\.trash-\d{8,}-[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published checkpoint.

    Attributes:
        step: optimizer steps done when it was saved.
        intact: whether it is; None before anybody has looked.
        foreign: not signed by this user; it is not ours to delete, and nothing to rely on.
        read_back: whether somebody has read it through since it was written, and found it intact; None before anybody has looked.
    """

    step: int
    intact: bool | None = None
    foreign: bool = False
    read_back: bool | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """What is asked for.

    Attributes:
        keep: how many of the newest intact ones stay; at least 1.
        every: those at its multiples stay for ever, in steps; None: no such period.
        protect: steps that stay, as that of the best.
    """

    keep: int
    every: int | None = None
    protect: Collection[int] = ()

    def are_for_ever(self, step: int) -> bool:
        """Whether a step is one of those that stay for ever."""
        return self.every is not None and step > 0 and step % self.every == 0

    def protects(self, step: int) -> bool:
        """Whether a step stays whatever its age and state."""
        return step in self.protect or self.are_for_ever(step)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of them.

    Attributes:
        go: the steps to delete, oldest first.
        ask: the step whose state must be found out before anything can be decided, by reading if need be; nothing goes until then.
        recall: the step of which must be known whether it was read back; it need not be read for that, and nothing goes until then.
        oldest_kept: the oldest of the newest that stay; what was set aside before it can go. None if there are too few.
    """

    go: tuple[int, ...] = ()
    ask: int | None = None
    recall: int | None = None
    oldest_kept: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether something must be found out first."""
        return self.ask is not None or self.recall is not None


def decide(candidates: Iterable[Candidate], rules: Rules) -> Decision:
    """Which steps go. Those that are damaged stay until they are older than all that are kept.

    Args:
        candidates: all that are there, in any order, each step once.
        rules: what is asked for.
    """
    assert rules.keep >= 1
    own = sorted((one for one in candidates if not one.foreign), key=lambda one: one.step, reverse=True)
    kept: list[int] = []
    go: list[int] = []
    for candidate in own:
        if len(kept) < rules.keep:
            if candidate.intact is None:
                return Decision(ask=candidate.step)
            if candidate.intact:
                kept.append(candidate.step)
        elif not rules.protects(candidate.step):
            go.append(candidate.step)
    if len(kept) < rules.keep:
        return Decision()
    last = _last_read_back(own, since=go[-1]) if go else None
    if last is not None and last.read_back is None:
        return Decision(recall=last.step)
    spared = last.step if last is not None else None
    return Decision(go=tuple(step for step in reversed(go) if step != spared), oldest_kept=kept[-1])


def _last_read_back(newest_first: Iterable[Candidate], *, since: int) -> Candidate | None:
    """The newest that was read back, or of which nobody has said yet that it was not; None where there is none from that step on."""
    return next((one for one in newest_first if one.step >= since and one.read_back is not False), None)


# ---- disk space


@dataclass(frozen=True)
class DiskSpace:
    """What is in a directory of checkpoints, and beside it.

    Attributes:
        free_bytes: on its file system.
        own_bytes: of what the run itself has there: published, being written, being deleted. A stranger's stays, and is not among it.
        steps: of the published ones, oldest first.
    """

    free_bytes: int
    own_bytes: int
    steps: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What the run's checkpoints can take, all together."""
        return self.free_bytes + self.own_bytes


def measure_disk_space(root: Path, *, key: bytes) -> DiskSpace:
    """Looks at a directory of checkpoints.

    Args:
        root: the directory.
        key: the user's key; what is not signed with it is not ours.

    Raises:
        OSError: if it cannot be read.
    """
    before = _own_bytes(root, key)
    free = free_bytes(root)
    after = _own_bytes(root, key)
    # A checkpoint that is deleted meanwhile is in the first sum and free already: the smaller one is right.
    own = min(sum(before.values()), sum(after.values()))
    steps = [int(found["step"]) for name in after if (found := _OWN_NAME.fullmatch(name)) and found["step"]]
    return DiskSpace(free, own, tuple(sorted(steps)))


def _own_bytes(root: Path, key: bytes) -> dict[str, int]:
    """Bytes by directory."""
    found = {}
    for path in root.iterdir():
        named = _OWN_NAME.fullmatch(path.name)
        if named is None:
            continue
        manifest = read_manifest(path) if named["step"] else None
        if manifest is None or manifest.is_signed_by(key):
            found[path.name] = _directory_bytes(path)
    return found


def _directory_bytes(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # it is being deleted
        for file in directory.iterdir():
            total += file.stat().st_size
    return total


def max_on_disk(there: Sequence[int], due: Sequence[int], rules: Rules, *, best: bool) -> int:
    """How many checkpoints are on disk at the same time at the most: when the last one is written, before others go.

    Args:
        there: the steps of those that are there, oldest first.
        due: those that will come, oldest first.
        rules: which of them stay.
        best: whether the best one stays, too, whichever it will be.
    """
    steps = [*there, *due]
    older = steps[: -(rules.keep + 1)]
    for_ever = sum(1 for step in older if rules.protects(step))
    return min(len(steps), for_ever + max_without_permanent(rules.keep, best=best))


def max_without_permanent(keep: int, *, best: bool) -> int:
    """The same for those that do not stay for ever, of a run that makes more than enough of them.

    They are those that are kept, one that is written, the last one that was read back where nobody has read a newer one yet, and the best.
    """
    return keep + 2 + best
