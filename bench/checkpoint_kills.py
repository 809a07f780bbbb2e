"""Kills a writer of checkpoints at random moments: what survives?

What damage does is in damage.py, what kills do to whole runs in resumes.py.

    python bench/checkpoint_kills.py                       200 kills; writes bench/results/checkpoint_kills.json
    python bench/checkpoint_kills.py --kills 25 --out FILE

A real process writes and prunes checkpoints, and acknowledges each that it has saved. It gets
SIGKILL at a random moment; the next one goes on from what is there. After each kill there must be
an intact checkpoint, and none older than the last acknowledged; and it must hold, byte for byte,
what was written at its step.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from unisono.trainer.checkpoint.store import CheckpointStore, IntactCheckpoint

KEY = b"k" * 32
KEEP = 3
FILES = 3
FILE_BYTES = 1 << 18


def content(step: int, number: int) -> bytes:
    """What file `number` of a step holds."""
    return random.Random(step * 100 + number).randbytes(1 << 12) * (FILE_BYTES >> 12)


def save(store: CheckpointStore, step: int) -> None:
    def fill(directory: Path) -> None:
        for number in range(FILES):
            (directory / f"part-{number}.safetensors").write_bytes(content(step, number))

    store.save(step, fill, run_id="run", config_digest="c", world_size=1, threads=1, holder="host")


def holds_what_was_written(found: IntactCheckpoint) -> bool:
    return all(
        (found.path / f"part-{number}.safetensors").read_bytes() == content(found.step, number)
        for number in range(FILES)
    )


def write_for_ever(root: Path, acknowledge: int) -> None:
    """The body of the writer: go on from what is there, save, acknowledge, prune."""
    store = CheckpointStore(root, key=KEY)
    store.sweep()
    found = store.newest_intact()
    step = found.step if found else 0
    os.write(acknowledge, f"{step}\n".encode())
    while True:
        step += 1
        save(store, step)
        os.write(acknowledge, f"{step}\n".encode())
        store.prune(KEEP)


def start_writer(root: Path) -> tuple[int, int]:
    """Starts a writer; gives its pid and the pipe of its acknowledgements."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(root, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    return pid, read_end


def kill_at_random(root: Path, kills: int, chance: random.Random) -> dict[str, int]:
    counts = {"kills": 0, "died_by_itself": 0, "none_intact": 0, "acknowledged_lost": 0, "wrong_content": 0, "leftovers_of_dead": 0,
              "published_but_damaged": 0}  # fmt: skip
    acknowledged = 0
    for number in range(kills):
        pid, pipe = start_writer(root)
        first = os.read(pipe, 64)  # it has read what is there, and begins to save
        if number % 5 == 0:
            first += os.read(pipe, 64)  # a step at the least, however slow the disk is
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        with os.fdopen(pipe, "rb") as rest:
            words = (first + rest.read()).split(b"\n")[:-1]
        counts["kills"] += 1
        counts["died_by_itself"] += not os.WIFSIGNALED(status)
        acknowledged = max([acknowledged, *map(int, words)])
        store = CheckpointStore(root, key=KEY)
        counts["leftovers_of_dead"] += sum(
            not path.name.startswith("step-") or "." in path.name for path in root.iterdir()
        )
        counts["published_but_damaged"] += sum(bool(store.verify(path)) for path in store.list())
        found = store.newest_intact()
        counts["none_intact"] += found is None and acknowledged > 0
        counts["acknowledged_lost"] += (found.step if found else 0) < acknowledged
        counts["wrong_content"] += found is not None and not holds_what_was_written(found)
    counts["steps_acknowledged"] = acknowledged
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint_kills.json"
    )
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        killed = kill_at_random(root, arguments.kills, chance)
    result = {
        "schema": 1, "seed": arguments.seed, "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(), "checkpoint_bytes": FILES * FILE_BYTES, "keep": KEEP, "kills": killed,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    wrong = [
        killed[name]
        for name in (
            "died_by_itself",
            "none_intact",
            "acknowledged_lost",
            "wrong_content",
            "published_but_damaged",
        )
    ]
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
