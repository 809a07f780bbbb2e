"""How much disk the checkpoints of a run take, and how much there is for them."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.keeping import Rules
from unisono.checkpoint.trouble import free_bytes
from unisono.checkpoint.verify import read_manifest

_OWN = re.compile(r"(step-(?P<step>\d{8,})|step-\d{8,}\.tmp-[0-9a-f]+|\.trash-\d{8,}-[0-9a-f]+)")


@dataclass(frozen=True)
class Room:
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


def measure_room(root: Path, *, key: bytes) -> Room:
    """Looks at a directory of checkpoints.

    Args:
        root: the directory.
        key: the user's key; what is not signed with it is not ours.

    Raises:
        OSError: if it cannot be read.
    """
    before = _own(root, key)
    free = free_bytes(root)
    after = _own(root, key)
    # A checkpoint that is deleted meanwhile is in the first sum and free already: the smaller one is right.
    own = min(sum(before.values()), sum(after.values()))
    steps = [int(found["step"]) for name in after if (found := _OWN.fullmatch(name)) and found["step"]]
    return Room(free, own, tuple(sorted(steps)))


def _own(root: Path, key: bytes) -> dict[str, int]:
    """Bytes by directory."""
    found = {}
    for path in root.iterdir():
        named = _OWN.fullmatch(path.name)
        if named is None:
            continue
        manifest = read_manifest(path) if named["step"] else None
        if manifest is None or manifest.is_signed_by(key):
            found[path.name] = _size(path)
    return found


def _size(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # it is being deleted
        for file in directory.iterdir():
            total += file.stat().st_size
    return total


def most_at_once(there: Sequence[int], due: Sequence[int], rules: Rules, *, best: bool) -> int:
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
    return min(len(steps), for_ever + most_in_turn(rules.keep, best=best))


def most_in_turn(keep: int, *, best: bool) -> int:
    """The same for those that do not stay for ever, of a run that makes more than enough of them.

    They are those that are kept, one that is written, the last one that was read back where nobody has read a newer one yet, and the best.
    """
    return keep + 2 + best
