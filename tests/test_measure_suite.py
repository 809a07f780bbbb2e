"""What a run of the suite took is said at its end. Run: pytest tests/test_measure_suite.py"""

import subprocess
import sys
from pathlib import Path

from measure_suite import Ticks, summary

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_suite.py"
PRINTED = """120.51s setup    tests/a.py::test_it
59.90s call     tests/b.py::test_it[a b]
61.00s call     tests/c.py::test_it[a b]
== 7 passed, 1 skipped in 812.30s (0:13:32) ==""".splitlines()


def test_the_summary_has_minutes_cores_counts_and_what_lasts_too_long() -> None:
    first, *rest = summary(PRINTED, 14.0, Ticks(100.0, 50.0), Ticks(1600.0, 250.0))
    assert "14.0 minutes; 1500 CPU seconds" in first
    assert "busy 88% of the time; 7 passed, 1 skipped in 812.30s" in first
    assert rest == ["longer than 60 s: 2", "  121 s tests/a.py::test_it", "  61 s tests/c.py::test_it[a b]"]


def test_output_and_exit_status_are_those_of_the_command() -> None:
    command = [sys.executable, "-c", "print('printed'); raise SystemExit(3)"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout.startswith("printed\nsuite: 0.0 minutes")
    assert "longer than 60 s: nothing" in done.stdout
