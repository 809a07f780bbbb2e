"""What a rank's imports cost with Python's collector at work, and with `loading_modules`: CPU seconds, in pairs of fresh processes.

python bench/imports.py [--pairs 10]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import contextlib, time
from unisono.child import loading_modules
with {how}():
    begun = time.process_time()
    import unisono.train.rank_run
    print(time.process_time() - begun)
"""


def main() -> None:
    """Measures, prints, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    pairs = parser.parse_args().pairs
    _seconds("contextlib.nullcontext")  # compiles, and warms the files
    rows = [(_seconds("contextlib.nullcontext"), _seconds("loading_modules")) for _ in range(pairs)]
    ratios = sorted(after / before for before, after in rows)
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "schema": 1,
        "command": f"python bench/imports.py --pairs {pairs}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
        "collecting_cpu_s": statistics.median(before for before, _ in rows),
        "resting_cpu_s": statistics.median(after for _, after in rows),
        "ratio": {"median": statistics.median(ratios), "quartiles": [quartiles[0], quartiles[2]]},
    }
    print(json.dumps(result, indent=2))
    path = Path(__file__).parent / "results" / "imports.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _seconds(how: str) -> float:
    program = _PROGRAM.format(how=how)
    return float(
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    )


if __name__ == "__main__":
    main()
