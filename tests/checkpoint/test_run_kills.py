"""Real runs that are killed at random moments end bit-equal to an undisturbed one. Run: pytest tests/checkpoint/test_run_kills.py"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "run_kills.py"


def _kill(model: Path, rows: Path, tmp_path: Path, *, kills: int, steps: int) -> dict[str, Any]:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", str(kills), "--steps", str(steps), "--model", str(model), "--data", str(rows),
         "--out", str(out)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.slow
def test_five_random_kills_change_no_bit(model_dir: Path, rows_file: Path, tmp_path: Path) -> None:
    result = _kill(model_dir, rows_file, tmp_path, kills=5, steps=20)
    assert (result["kills"], result["unequal"], result["refused"]) == (5, 0, [])


@pytest.mark.long
@pytest.mark.timeout(2400)  # six and a half minutes on a quiet machine
def test_fifty_random_kills_change_no_bit(model_dir: Path, rows_file: Path, tmp_path: Path) -> None:
    result = _kill(model_dir, rows_file, tmp_path, kills=50, steps=60)
    assert (result["kills"], result["unequal"], result["refused"]) == (50, 0, [])
    assert result["moments"]["inside a save"] > 0
