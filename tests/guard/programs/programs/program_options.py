"""What the programs of this folder can be asked for.

They are the programs of other people: nothing of unisono but --callback.
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

# Imports make a million objects that stay, and the collector would look at all of them again and
# again.
gc.disable()
FAULTS = ("unseeded", "steps", "destroy")


def parse() -> argparse.Namespace:
    """The arguments of a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a folder for the losses of each rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--step-s", type=float, default=0.0, help="seconds that a step takes beside its arithmetic"
    )
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument(
        "--callback", action="store_true", help="with unisono's callback, the one line of change"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def own_rank() -> int:
    """As the launcher says."""
    return int(
        os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    )  # Lightning's own launcher gives the latter alone


class Losses:
    """Writes each step's loss, to the last bit, and the process's id: who breaks this program reads
    when and whom.
    """

    def __init__(self, options: argparse.Namespace, rank: int | None = None) -> None:
        gc.freeze()
        gc.enable()
        self._path = options.out / f"rank-{own_rank() if rank is None else rank}.jsonl"
        self._step_s = options.step_s
        self._path.unlink(missing_ok=True)

    def add(self, step: int, loss: Any) -> None:
        """One line."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": float(loss), "pid": os.getpid()}) + "\n")
        time.sleep(self._step_s)
