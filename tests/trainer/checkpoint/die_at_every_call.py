"""Dies at the n-th thing that is done to the file system, for every n: started by test_kills.py
with a folder.

Saves step 3 where 1 and 2 are, and prunes to 2. For each point of death: what was there, and what
the next start makes of it. Prints a JSON list.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from unisono.trainer.checkpoint.store import CheckpointStore

KEY = b"k" * 32
EVENTS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "fcntl.flock",
    "shutil.rmtree",
    "os.scandir",
)


def save(store: CheckpointStore, step: int) -> None:
    def fill(directory: Path) -> None:
        for n in range(2):
            (directory / f"file-{n}").write_bytes(b"%d" % step * 100)

    store.save(
        step, fill,
        run_id="r", config_digest="c", world_size=1, threads=1, holder="h",
    )  # fmt: skip


def work(root: Path) -> None:
    store = CheckpointStore(root, key=KEY)
    save(store, 3)
    store.prune(2)


def die_at(point: int, root: Path) -> bool:
    """Whether the work was killed at that point; False: there are fewer."""
    pid = os.fork()
    if pid == 0:
        left = [point]

        def count(event: str, _: tuple[Any, ...]) -> None:
            if event in EVENTS:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work(root)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WIFSIGNALED(status)


def main() -> None:
    folder = Path(sys.argv[1])
    template = folder / "template"
    for step in (1, 2):
        save(CheckpointStore(template, key=KEY), step)
    found, point, killed = [], 0, True
    while killed:
        root = folder / "checkpoints"
        shutil.copytree(template, root)
        killed = die_at(point, root)
        store = CheckpointStore(root, key=KEY)
        newest = store.newest_intact()
        damaged = [str(item) for path in store.list() for item in store.verify(path)]
        store.sweep()
        work(root)  # the next start comes to the same step
        found.append({
            "killed": killed, "newest": newest.step if newest else None, "damaged": damaged,
            "after": sorted(path.name for path in root.iterdir()), "bad_after": [str(d) for p in store.list() for d in store.verify(p)],
        })  # fmt: skip
        shutil.rmtree(root)
        point += 1
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
