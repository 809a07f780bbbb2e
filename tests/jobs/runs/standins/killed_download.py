"""As front.py, but it is killed while it brings a run back from a storage: `python
killed_download.py MOMENT FAULTS-JSON train CONFIG …`.

MOMENT: fetched (nothing is published), adopted (the checkpoint is there, the plan is not), placed
(all is there).
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from unisono.jobs.remote_checkpoint import transfers
from unisono.trainer.checkpoint.store import CheckpointStore

moment = sys.argv.pop(1)
place = transfers._Download._place


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def place_and_die(bringing: Any, beside: Path) -> None:
    place(bringing, beside)
    die()


if moment == "fetched":
    setattr(CheckpointStore, "adopt", die)  # noqa: B010 - a method of a class is replaced on purpose
setattr(transfers._Download, "_place", die if moment == "adopted" else place_and_die)  # noqa: B010 - as above
runpy.run_path(str(Path(__file__).with_name("front.py")), run_name="__main__")
