"""How fast `unisono diagnose` reads a gigabyte of log, and in how much memory.

Run: python bench/diagnose.py; writes bench/results/diagnose.json.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.diagnose_log import blocks, write_log  # noqa: E402 - found through the line above

RESULT = Path(__file__).parent / "results/diagnose.json"
ENGINE_BYTES = 32 << 20
LIMITS = {"cpu_s": 20.0, "memory_bytes": 200 << 20}
"""For 1 GB on one core."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "train.log"
        size = write_log(log, arguments.bytes)
        read = diagnosed(log)
    found = {
        "schema": 1, "what": "unisono diagnose --json of one synthetic log: 8 ranks, bars, losses, NCCL INFO; the end is an exception on rank 3 and a time-out on rank 0",
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "log_bytes": size, **read, "limits_for_1_gb": LIMITS, "engines_mb_per_cpu_s": engines(),
    }  # fmt: skip
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def diagnosed(log: Path) -> dict[str, Any]:
    """Time and memory of one process that reads the log, and what it says."""
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "unisono", "diagnose", "--json", "--quiet", str(log)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    said = json.loads(child.stdout.read())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    return {
        "cpu_s": round(cpu_s, 2), "wall_s": round(time.monotonic() - began, 2), "mb_per_cpu_s": round(log.stat().st_size / 1e6 / cpu_s, 1), "memory_bytes": usage.ru_maxrss * 1024,
        "cause": said["cause"], "ranks": said["ranks"], "evidence": [item["where"].rpartition("/")[2] for item in said["evidence"]], "exit_code": child.returncode,
    }  # fmt: skip


def engines() -> dict[str, float]:
    """How fast each engine finds all hints in the same bytes, without any of them being left out as
    frequent.
    """
    from unisono.guard.diagnosis.lines import _finder
    from unisono.guard.diagnosis.scan import STRONG, WEAK

    words = sorted({word.encode() for word in (*STRONG, *WEAK)})
    data = b"".join(blocks(ENGINE_BYTES))[:ENGINE_BYTES]
    chunks = [data[place : place + (4 << 20)] for place in range(0, len(data), 4 << 20)]
    plain_re = re.compile(b"|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
    found = {
        "google-re2": rate(
            lambda chunk: sum(1 for _ in _finder(frozenset(words))(chunk, 0, len(chunk))), chunks
        )
    }
    try:
        import ahocorasick
    except ImportError:
        pass
    else:
        automaton = ahocorasick.Automaton()
        for word in words:
            automaton.add_word(word.decode("latin-1"), word)
        automaton.make_automaton()
        found["pyahocorasick"] = rate(
            lambda chunk: sum(1 for _ in automaton.iter(chunk.decode("latin-1"))), chunks
        )
    found["re"] = rate(lambda chunk: sum(1 for _ in plain_re.finditer(chunk)), chunks[:1])
    return found


def rate(look: Callable[[bytes], int], chunks: list[bytes]) -> float:
    """MB per second of this process's time."""
    look(chunks[0][:1000])
    began = time.process_time()
    for chunk in chunks:
        look(chunk)
    return round(sum(map(len, chunks)) / 1e6 / (time.process_time() - began), 1)


def cpu() -> str:
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.processor()


if __name__ == "__main__":
    main()
