"""A front as process 1, as it is in a container.

Run: pytest tests/jobs/nproc/test_container.py (-m long for all of it). Skipped where no process
namespace can be made.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Loopback, Own

ROOT = Path(__file__).parents[3]
_INSIDE = ["unshare", "--pid", "--fork", "--mount-proc"]


class Inside(Loopback):
    """What is started is process 1 of a namespace of its own."""

    def command(self, node: int, words: Sequence[str], own: Own) -> list[str]:
        del node, own
        return [*_INSIDE, *words]

    def place(self, node: int, own: Own) -> None:
        """A forked front could not become process 1."""
        del node, own


@pytest.fixture
def job(tmp_path: Path, model_dir: Path, rows_file: Path, caches: Path) -> Iterator[Job]:
    try:
        tried = subprocess.run([*_INSIDE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"needs unshare: {error}")
    if tried.returncode != 0:
        pytest.skip(f"needs process namespaces: {tried.stderr.strip()}")
    folder = tmp_path / "job"
    folder.mkdir()
    made = Job(Inside(), folder, model=model_dir, rows=rows_file, caches=caches, nodes=1)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.ranks
def test_stopping_the_container_saves_a_checkpoint_and_the_run_continues(job: Job) -> None:
    """The kernel keeps from process 1 every signal that it has not asked for."""
    job.config(duration="30 steps", checkpoint={"every": "10 steps"})
    front = job.start(0, "--nproc", "2", topology=False, json=False)
    job.waits_for_step(3)
    (first,) = psutil.Process(front.pid).children()
    assert "unisono" in " ".join(first.cmdline())
    status = Path(f"/proc/{first.pid}/status").read_text()
    assert re.search(r"^NSpid:.*\s1$", status, re.MULTILINE), "it is not process 1"
    first.send_signal(signal.SIGTERM)
    assert front.wait() == 75, front.text()
    saved = job.read("result.json")
    assert saved["outcome"] == "preempted"
    assert saved["checkpoint"]
    job.wait_gone()
    again = job.start(0, "--nproc", "2", topology=False, json=False)
    assert again.wait() == 0, again.text()
    assert [line["step"] for line in job.metrics()] == list(range(1, 31))


def test_dockerfile_copies_existing_files_and_has_a_supported_python() -> None:
    lines = (ROOT / "examples/container/Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert not [name for name in copied if not (ROOT / name).exists()]
    base = next(line for line in lines if line.startswith("FROM "))
    found = re.search(r"python:(\d+)\.(\d+)", base)
    assert found is not None
    requires = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert requires is not None
    assert tuple(map(int, found.groups())) >= tuple(map(int, requires.groups()))
    readme = re.search(r'readme = "(\S+)"', (ROOT / "pyproject.toml").read_text())
    assert readme is not None
    assert readme.group(1) in copied
    assert 'ENTRYPOINT ["unisono"]' in lines
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "--help"], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, "what it runs where nothing is said"
