"""Runs the tests, and says at the end what they took: minutes, CPU seconds, how busy the cores
were, what lasted longer than a minute.

Run: python scripts/measure_suite.py make test. The exit status is that of the command; with one
core to spare, more WORKERS make it faster.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60.0
_DURATION = re.compile(r"^(\d+\.\d+)s (?:call|setup|teardown) +(\S.*)$")
_COUNTS = re.compile(r"\d+ passed.* in \d+\.\d+s")


@dataclass(frozen=True)
class Ticks:
    """CPU time of the machine since its start, in seconds."""

    busy: float
    idle: float

    @classmethod
    def now(cls) -> "Ticks":
        """Up to this moment."""
        user, nice, system, idle, iowait, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
        busy = sum(map(int, (user, nice, system, irq, softirq)))
        per_second = os.sysconf("SC_CLK_TCK")
        return cls(busy / per_second, (int(idle) + int(iowait)) / per_second)


def summary(lines: list[str], minutes: float, before: Ticks, after: Ticks) -> list[str]:
    """What is said at the end.

    Args:
        lines: what the command printed.
        minutes: how long it took.
        before: of the machine at its start.
        after: at its end.
    """
    busy, idle = after.busy - before.busy, after.idle - before.idle
    counts = next((found[0] for line in reversed(lines) if (found := _COUNTS.search(line))), "no tests")
    durations = [(float(found[1]), found[2]) for line in lines if (found := _DURATION.match(line))]
    long = [f"  {seconds:.0f} s {name}" for seconds, name in durations if seconds > LIMIT_S]
    return [
        f"suite: {minutes:.1f} minutes; {busy:.0f} CPU seconds on {os.cpu_count()} cores, busy {busy / (busy + idle):.0%} of the time; {counts}",
        f"longer than {LIMIT_S:.0f} s: {len(long) or 'nothing'}",
        *long,
    ]  # fmt: skip


def main(command: list[str]) -> int:
    """Runs the command, and gives its exit status."""
    before, began = Ticks.now(), time.monotonic()
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line.rstrip("\n"))
    print("\n".join(summary(lines, (time.monotonic() - began) / 60, before, Ticks.now())))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
