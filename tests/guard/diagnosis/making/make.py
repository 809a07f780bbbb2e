"""Make the cases: `python -m tests.guard.diagnosis.making.make OUT [NAME…]` runs what has no file in OUT
yet (of all, or of those that match a NAME), one after another.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOMS = (
    "runs_tools",
    "runs_loops",
    "runs_torch",
    "runs_more",
    "runs_nodes",
    "runs_trainers",
    "runs_ray",
    "runs_libraries",
)


def main() -> int:
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for room in ROOMS:
        base = Path(tempfile.mkdtemp(prefix="dgm-"))
        for name, make in importlib.import_module(f"tests.guard.diagnosis.making.{room}").cases(base):
            file = out / f"{name}.json"
            if (wanted and not any(re.fullmatch(w, name) for w in wanted)) or (
                file.exists() and name not in wanted
            ):
                continue
            begin = time.monotonic()
            try:
                file.write_text(json.dumps(make(), ensure_ascii=False) + "\n")
                print(f"{name} {time.monotonic() - begin:.1f} s", flush=True)
            except (ValueError, OSError, subprocess.SubprocessError) as e:
                failed += 1
                print(f"{name} NOT MADE: {e}", flush=True)
        shutil.rmtree(base, ignore_errors=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
