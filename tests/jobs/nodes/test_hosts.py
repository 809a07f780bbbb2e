"""`--hosts` does over ssh what the same command on every node does.

Run: pytest -m long tests/jobs/nodes/test_hosts.py

Two network namespaces, with a real sshd in the second; skipped with the reason where there is none.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.needs import need

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(1800)]
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
_ENTRY = Path(__file__).parents[2] / "jobs" / "runs" / "standins" / "ssh_front.py"
_PORT = 2222
FAR = "2000000 steps"


class Hosts:
    """A job whose second node is started over ssh.

    Attributes:
        job: of two nodes.
        binds: (file or directory, where the second node sees it).
    """

    def __init__(self, networks: Namespaces, job: Job, folder: Path) -> None:
        self.job = job
        self.binds: list[tuple[Path, Path]] = []
        self._networks = networks
        self._folder = folder
        self._sshd: subprocess.Popen[bytes] | None = None

    def type(self, *words: str) -> Front:
        """Types the command with --hosts on the first node; it has no token."""
        self._up()
        command = [
            sys.executable, str(_ENTRY), json.dumps(self._ssh()), "train", "c.yaml", "--hosts", "bob", "--nproc", "1", "--json",
            "--no-first-checkpoint", *words,
        ]  # fmt: skip
        front = Front(
            self._networks.command(0, command, Own()), node=0, host="ada", cwd=self.job.home(0),
            environment=self.job._environment(0, {"UNISONO_TOKEN": ""}), json=True,
        )  # fmt: skip
        self.job.fronts.append(front)
        return front

    def _ssh(self) -> list[str]:
        return [
            "ssh", "-p", str(_PORT), "-i", str(self._folder / "user"), "-o", "StrictHostKeyChecking=no", "-o", "IdentitiesOnly=yes",
            "-o", f"UserKnownHostsFile={self._folder / 'known'}", "-o", "LogLevel=ERROR", "-F", "none",
        ]  # fmt: skip

    def _up(self) -> None:
        """An sshd on the second node, whose sessions have the variables of the job's harness."""
        if self._sshd is not None:
            return
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)], check=True
            )
        variables = self.job._environment(1, {"UNISONO_TOKEN": ""})
        wanted = ("OMP_NUM_THREADS", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HUB_OFFLINE", "TEST_JOB")
        lines = [
            f"Port {_PORT}", "ListenAddress 0.0.0.0", f"HostKey {self._folder / 'host'}", "UsePAM no", "StrictModes no",
            f"AuthorizedKeysFile {self._folder / 'user.pub'}", f"PidFile {self._folder / 'pid'}", "PermitRootLogin prohibit-password",
            "SetEnv " + " ".join(f'{name}="{variables[name]}"' for name in wanted),
        ]  # fmt: skip
        (self._folder / "config").write_text("\n".join(lines) + "\n")
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(exist_ok=True)
        words = [SSHD or "sshd", "-D", "-e", "-f", str(self._folder / "config")]
        with (self._folder / "log").open("wb") as log:
            self._sshd = subprocess.Popen(
                self._networks.command(1, words, Own(binds=self.binds)), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        there = self._networks.command(0, [*self._ssh(), "-o", "ConnectTimeout=5", "bob", "true"], Own())
        self.job.until(lambda: _ends_well(there), what="sshd answers", limit_s=60)

    def close(self) -> None:
        """Ends the sshd."""
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait()


def _ends_well(command: list[str]) -> bool:
    """Whether it does, in 20 s: a connection that nobody takes up must not hold the test."""
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.fixture
def hosts(networks: Namespaces, pair: Job, tmp_path: Path) -> Iterator[Hosts]:
    """A job of two nodes, the second over ssh."""
    need("sshd", "ssh", "ssh-keygen")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    made = Hosts(networks, pair, folder)
    yield made
    made.close()


def test_nodes_that_disagree_are_refused_and_nothing_is_trained(hosts: Hosts) -> None:
    job = hosts.job
    changed = job.folder / "changed.jsonl"
    changed.write_text(job.rows.read_text().replace("cat", "dog", 1))
    hosts.binds = [(changed, job.rows)]
    front = hosts.type()
    assert front.wait() == 3, front.text()
    (verdict,) = front.verdicts
    assert verdict.cause == "data_mismatch"
    assert "node 0 (ada)" in verdict.summary
    assert "node 1 (bob)" in verdict.summary
    assert not (job.out / "metrics.jsonl").exists()
    job.wait_gone()


def test_a_stopped_rank_on_the_host_is_named(hosts: Hosts) -> None:
    job = hosts.job
    job.config(duration=FAR)
    front = hosts.type("--restarts", "0")
    job.waits_for_step(5)
    job.ranks()[1].suspend()
    assert front.wait() == 4, front.text()
    (verdict,) = front.verdicts
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("rank_stopped", (1,), ("bob",))
    job.wait_gone()


def test_without_a_shared_disk_everything_ends_whole_here(hosts: Hosts) -> None:
    job = hosts.job
    disk = job.folder / "disk"
    for folder in (disk, job.out):
        folder.mkdir()
    hosts.binds = [(disk, job.out)]
    job.config(parallel={"strategy": "fsdp"})
    front = hosts.type()
    assert front.wait() == 0, front.text()
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]
    assert {path.name for path in (job.out / "checkpoints").glob("step-*")} == {
        "step-00000002",
        "step-00000004",
    }
    assert (job.out / "adapter" / "adapter_model.safetensors").exists()
    assert not (disk / "checkpoints").exists()
    assert [node["shares_output"] for node in job.read("plan.json")["nodes"]] == [True, False]


def test_a_killed_rank_on_the_host_is_named_and_the_run_continues(hosts: Hosts) -> None:
    job = hosts.job
    job.config(duration="40 steps", batch={"global": 8, "micro": 1})
    front = hosts.type("--restarts", "1")
    job.waits_for_step(4)
    job.ranks()[1].kill()
    assert front.wait(limit_s=900) == 0, front.text()
    (restart,) = job.read("result.json")["restarts"]
    assert (restart["verdict"]["cause"], restart["verdict"]["hosts"]) == ("rank_killed", ["bob"])
    assert [line["step"] for line in job.metrics()] == list(range(1, 41))
    job.wait_gone()


def test_preempted_host_saves_a_checkpoint_and_the_same_command_continues(hosts: Hosts) -> None:
    job = hosts.job
    job.config(duration="40 steps", batch={"global": 8, "micro": 1})
    front = hosts.type()
    job.waits_for_step(4)
    there = next(process for process in job.processes() if "--node-rank" in process.cmdline())
    there.send_signal(signal.SIGTERM)
    assert front.wait(limit_s=900) == 75, front.text()
    saved = job.read("result.json")
    assert saved["outcome"] == "preempted"
    assert saved["checkpoint"]
    job.wait_gone()
    again = hosts.type()
    assert again.wait(limit_s=900) == 0, again.text()
    assert again.messages("plan")[0]["resume"]["step"] == saved["step"]
    assert [line["step"] for line in job.metrics()] == list(range(1, 41))
