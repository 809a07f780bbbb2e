"""A real Slurm of a test's own: munged, slurmctld and a slurmd on each of a few network namespaces,
in a temporary folder.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.jobs.nodes.network_namespaces import HOSTS, Namespaces, Own
from tests.needs import lacking, program

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
_UP_S = 60.0
_DEVICES = ("/dev/null", "/dev/zero")
"""What slurmd counts as accelerators: it wants a file for each."""
_CONF = """
ClusterName=unisono
SlurmctldHost=ada(10.231.7.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task-prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
SlurmctldTimeout=30
KillWait=60
EnforcePartLimits={limits}
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{gres}
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=narrow Nodes={names} MaxNodes=1 MaxTime=5 State=UP
PartitionName=closed Nodes={names} AllowAccounts=nobody State=UP
"""


def why_no_slurm() -> str:
    """Why there can be no cluster here; empty where there can."""
    return lacking(*_PROGRAMS)


@dataclass
class Cluster:
    """Daemons that were started, and a way to run Slurm's commands on the first node.

    Attributes:
        networks: the nodes.
        folder: configuration, state and logs.
        nodes: how many of the nodes have a slurmd.
        limits: EnforcePartLimits: whether sbatch refuses what a partition does not allow, or lets
            it wait for ever.
        own: what each node sees in place of the machine's own files; () as a rule.
        gpus: how many accelerators each node is said to have, two at the most; there are none
            behind them.
    """

    networks: Namespaces
    folder: Path
    nodes: int = 2
    limits: str = "NO"
    own: Sequence[Own] = ()
    gpus: int = 0
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to find this cluster and no other."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def names(self) -> tuple[str, ...]:
        return HOSTS[: self.nodes]

    def up(self) -> None:
        """Starts the daemons, and waits until all nodes are idle."""
        self.folder.chmod(0o755)
        for name in ("state", *(f"spool-{host}" for host in self.names)):
            (self.folder / name).mkdir()
        has = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        lines = [
            f"NodeName={host} NodeAddr={self.networks.address(node)} CPUs=8{has} State=UNKNOWN"
            for node, host in enumerate(self.names)
        ]
        if self.gpus:
            files = [f"Name=gpu File={path}" for path in _DEVICES[: self.gpus]]
            (self.folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *files, ""]))
        # Slurm sets these in a job. The session's fork server has imported without them, and would
        # refuse all ranks.
        script = (
            "#!/bin/sh\nfor name in ENVIRONMENT HOSTNAME SLURMD_NODENAME SRUN_DEBUG; do echo unset $name;"
            " done\n"
        )
        (self.folder / "task-prolog").write_text(script)
        (self.folder / "task-prolog").chmod(0o755)
        munge = self._munge()
        # Nothing is bound to control groups here, and what the machine has of them is not for every
        # slurmd.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")
        self.conf.write_text(
            _CONF.format(
                munge=munge,
                folder=self.folder,
                nodes="\n".join(lines),
                names=",".join(self.names),
                limits=self.limits,
                gres="GresTypes=gpu" if self.gpus else "",
            )
        )
        self._start("slurmctld", 0, "slurmctld", "-D", "-c", "-f", str(self.conf))
        for node in range(self.nodes):
            self.start_node(node)
        self.until(
            lambda: self.states() == dict.fromkeys(self.names, "idle"),
            what="all nodes are idle",
            limit_s=_UP_S,
        )

    def start_node(self, node: int) -> None:
        """Starts a node's slurmd."""
        self._start(HOSTS[node], node, "slurmd", "-D", "-N", HOSTS[node], "-f", str(self.conf))

    def stop_node(self, node: int) -> None:
        """Kills a node's slurmd, and all that it started there: the machine is gone."""
        self.end(HOSTS[node])
        for pid in self.networks.pids(node):
            if _environment_of(pid).get("SLURM_CONF") == str(self.conf) or "slurmstepd" in _command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _munge(self) -> Path:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        key, socket = folder / "key", folder / "socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        words = [
            "munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", f"--log-file={folder / 'log'}",
            f"--pid-file={folder / 'pid'}", f"--seed-file={folder / 'seed'}", "--group-update-time=-1",
        ]  # fmt: skip
        self._start(
            "munged", 0, *words
        )  # in a namespace all is swept up, also after a test run that was killed
        self.until(socket.exists, what="munged listens", limit_s=_UP_S)
        return socket

    def _start(self, name: str, node: int, command_name: str, *words: str) -> None:
        path = program(command_name)
        assert path is not None
        command = self.networks.command(node, [path, *words], self.sees(node))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        }
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env={**kept, **self.environment}, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def sees(self, node: int) -> Own:
        """What the node sees in place of the machine's own files."""
        own = self.own[node] if node < len(self.own) else Own()
        # A network namespace has a /sys of its own without control groups, and slurmd wants to see
        # something there.
        return replace(own, small=[*own.small, (Path("/sys/fs/cgroup"), 65_536)])

    def end(self, name: str) -> None:
        """Kills a daemon that this cluster started."""
        process = self.daemons.pop(name, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, *words: str, node: int = 0, check: bool = True) -> str:
        """Runs a command of Slurm's on a node; gives what it prints."""
        done = subprocess.run(
            self.networks.command(node, words, Own()), env={**os.environ, **self.environment}, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr}\n{self.transcript()}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """The state of each node, as sinfo has it; empty while the controller does not answer."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T", check=False).splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def jobs(self) -> list[str]:
        """The ids of jobs that wait or run."""
        return self.run("squeue", "-h", "-o", "%A").split()

    def cancel_all(self) -> None:
        """Ends all jobs, at once, and puts nodes in order again."""
        for job in self.jobs():
            self.run("scancel", "--signal=KILL", "--full", job, check=False)
            self.run("scancel", job, check=False)
        self.until(lambda: not self.jobs(), what="all jobs are gone")

    def mend(self) -> None:
        """Without jobs, and with all nodes idle."""
        self.cancel_all()
        for node, host in enumerate(self.names):
            if host not in self.daemons:
                self.start_node(node)
        self.run("scontrol", "update", f"nodename={','.join(self.names)}", "state=resume", check=False)
        self.until(self.idle, what="all nodes are idle")

    def idle(self) -> bool:
        """Whether nothing runs anywhere and everything can."""
        return self.states() == dict.fromkeys(self.names, "idle")

    def until(self, seen: Callable[[], object], *, what: str, limit_s: float = 120.0) -> None:
        """Waits for an event, with a limit."""
        limit = time.monotonic() + limit_s
        while not seen():
            gone = [name for name, process in self.daemons.items() if process.poll() is not None]
            assert not gone, f"ended: {gone}\n{self.transcript()}"
            assert time.monotonic() < limit, f"never happened: {what}\n{self.transcript()}"
            time.sleep(0.1)

    def transcript(self) -> str:
        """The ends of the daemons' logs, for a test that fails."""
        logs = sorted(
            [*self.folder.glob("*.log"), *self.folder.glob("*.out"), *self.folder.glob("munge/log")]
        )
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in logs)

    def close(self) -> None:
        """Leaves nothing behind: daemons, and what they started."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.cancel_all()
        for name in list(self.daemons):
            self.end(name)
        for node in range(self.nodes):
            for pid in self.networks.pids(node):
                if "slurmstepd" in _command_of(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def cluster(
    networks: Namespaces, folder: Path, *, nodes: int = 2, limits: str = "NO", own: Sequence[Own] = (), gpus: int = 0
) -> Iterator[Cluster]:  # fmt: skip
    """A cluster that is up, and is gone afterwards."""
    made = Cluster(networks, folder, nodes, limits, own, gpus)
    try:
        made.up()
        yield made
    finally:
        made.close()


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _environment_of(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}
