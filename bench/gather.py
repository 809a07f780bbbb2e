"""Memory of rank 0 while a sharded model of 135 M parameters is written whole, over 2 ranks, for
two sizes of a file of the result.

    python bench/gather.py

Numbers are of the kernel: the resident memory of each rank before, and its peak while it writes
(VmHWM, counted anew). For comparison, the same with torch's own way: get_model_state_dict with
full_state_dict, then save_pretrained. Results go to bench/results/gather.json.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workload import make  # type: ignore[import-not-found]  # beside this script

RANK = Path(__file__).parent.parent / "tests" / "trainer" / "ranks" / "gather_rank.py"
WORLD = 2


def gathered(model: Path, out: Path, *, limit: int, way: str) -> list[dict[str, Any]]:
    """What the memory of each rank did, in bytes."""
    more = [str(WORLD), f"{out}.store", str(limit), "float32", way]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), str(model), str(out), str(rank), *more], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(WORLD)
    ]  # fmt: skip
    return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


def main() -> None:
    """Both sizes, and torch's own way."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, rows=10)
        for way, limit in (("ours", 50 * 10**6), ("ours", 10**9), ("torch", 10**9)):
            out = work / f"{way}-{limit}"
            ranks = gathered(work / "m135", out, limit=limit, way=way)
            files = [file.stat().st_size for file in sorted(out.glob("*.safetensors"))]
            first = ranks[0]
            line = {
                "way": way, "max_shard_size": limit, "files": len(files), "model_bytes": sum(files), "largest_file_bytes": max(files),
                "own_part_bytes": first["own_part"], "rank_0_more_bytes": first["peak"] - first["before"],
                "rank_1_more_bytes": ranks[1]["peak"] - ranks[1]["before"], "rank_0_peak_bytes": first["peak"],
                "seconds": round(first["seconds"], 2),
            }  # fmt: skip
            print(json.dumps(line))
            found.append(line)
    target = Path(__file__).parent / "results" / "gather.json"
    machine = {"cores": os.cpu_count(), "backend": "gloo", "threads": 1, "ranks": WORLD}
    target.write_text(
        json.dumps({"schema": 1, "command": "python bench/gather.py", "machine": machine, "found": found}, indent=1) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
