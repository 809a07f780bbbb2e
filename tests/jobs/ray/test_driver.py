"""The process that is connected to Ray dies. Run: pytest tests/jobs/ray/test_driver.py"""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_LIMIT_S = 120.0


def _drivers(front: int) -> list[psutil.Process]:
    """Those below a front, which has shorter-lived children, too."""
    found = []
    for process in psutil.Process(front).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "unisono.jobs.launchers.ray_driver" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.slow
def test_its_end_is_reported_with_the_cluster_and_nothing_is_left(
    tmp_path: Path, model_dir: Path, rows_file: Path
) -> None:
    """It tries to reach a cluster that takes up its call and never answers."""
    pytest.importorskip("ray")
    (tmp_path / "c.yaml").write_text(
        f"model: {model_dir}\ndata: {{train: {rows_file}}}\ndevice: cpu\noutput_dir: {tmp_path / 'out'}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(_LIMIT_S)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "unisono",
            "train",
            "c.yaml",
            "--launcher",
            "ray",
            "--ray-address",
            address,
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        front = subprocess.Popen(
            command, cwd=tmp_path, env={**kept, "XDG_CONFIG_HOME": str(tmp_path / "settings")}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            call, _ = silent.accept()
            (driver,) = _drivers(front.pid)
            driver.kill()
            printed, _ = front.communicate(timeout=_LIMIT_S)
        finally:
            front.kill()
            front.communicate()
        call.close()
    assert front.returncode == 5, printed
    assert "the process that is connected to Ray ended: killed by SIGKILL" in printed
    assert f"where: Ray cluster {address}" in printed
    assert "the same command resumes from the latest checkpoint" in printed
    assert not (tmp_path / "out").exists()
