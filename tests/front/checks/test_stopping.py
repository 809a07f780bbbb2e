"""A look that is stopped ends at once, whatever its checks wait for.

Run: pytest tests/front/checks/test_stopping.py
"""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.front.checks.doctor_process import LIMIT_S, environment

_AT_ONCE_S = 60.0  # seen: 1 s; the check itself would wait for five minutes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_it_and_the_task_that_waits_for_rows(
    tmp_path: Path, model_dir: Path, number: signal.Signals, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the call, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/rows.jsonl"
        body = {
            "model": {"path": str(model_dir)},
            "data": {"train": url},
            "duration": "4 steps",
            "device": "cpu",
        }
        (tmp_path / "c.yaml").write_text(json.dumps(body | {"output_dir": str(tmp_path / "out")}))
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "doctor", "c.yaml"], cwd=tmp_path, env=environment(tmp_path),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        silent.settimeout(LIMIT_S)
        try:
            caller, _ = silent.accept()
            process.send_signal(number)
            out, err = process.communicate(timeout=_AT_ONCE_S)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, out) == (code, b""), err.decode()
        with caller:  # held by the task that reads the rows: it has ended, too
            caller.settimeout(_AT_ONCE_S)
            while caller.recv(4096):
                pass
