"""Writers that die at any moment cost nothing that was saved.

Run: pytest tests/trainer/checkpoint/test_kills.py
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_dying_at_any_call_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    script = Path(__file__).with_name("die_at_every_call.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], check=True, capture_output=True, text=True
    )
    points = json.loads(done.stdout)
    assert len(points) > 20
    assert not points[-1]["killed"]
    assert all(point["damaged"] == [] and point["bad_after"] == [] for point in points)
    newest = [point["newest"] for point in points]
    assert set(newest) == {2, 3}
    assert newest == sorted(newest), "once step 3 is published it stays"
    assert all(point["after"] == ["step-00000002", "step-00000003"] for point in points)


def test_random_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        str(ROOT / "bench" / "checkpoint_kills.py"),
        "--kills",
        "25",
    ]
    done = subprocess.run([*command, "--out", str(out)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["kills"]["kills"] == 25
    assert result["kills"]["steps_acknowledged"] > 0
