"""What a look before the start was asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unisono.events import Message
from unisono.facts import Probes
from unisono.launch.train_request import TrainRequest
from unisono.rendezvous.ssh import RemoteCommand
from unisono.supervise.child_process import Programs

Show = Callable[[Message], None]


class _Look(TrainRequest):
    """A start that is only looked at; what people are told to type is a look, too."""

    @property
    def command(self) -> str:
        """The command line that it came from, near enough to be pasted."""
        return (
            super()
            .command.replace("unisono train .", "unisono doctor")
            .replace("unisono train", "unisono doctor")
        )


@dataclass(frozen=True)
class DoctorRequest:
    """One `unisono doctor`.

    Attributes:
        config_path: the YAML file; None: only the machine is looked at.
        overrides: `key.sub=value`, laid over it.
        nproc: ranks on this node.
        devices: `--devices` as it was typed.
        nodes: how many there are: a number, or MIN:MAX.
        node_rank: which of them this is.
        head: where node 0 is.
        hosts: `--hosts` as it was typed: this machine and those on which it starts the same look over ssh.
        token_file: a file with the job's secret.
        join_timeout_s: how long the nodes wait for each other.
        ladder: whether a real collective is tried, with one setting after the other where it fails.
        debug_comm: whether what the libraries say in that collective is kept.
        end_orphans: whether ranks that an earlier run has left behind are ended.
        launcher: `--launcher` as it was typed.
        ray_address: of the Ray cluster.
        partition: of the Slurm cluster.
        time: limit of the Slurm step.
        programs: what is started as task.
        probes: what this machine is asked through.
        show: sees what takes long: data that are prepared, nodes that are waited for.
    """

    config_path: Path | None = None
    overrides: tuple[str, ...] = ()
    nproc: int | None = None
    devices: str | None = None
    nodes: str | None = None
    node_rank: int | None = None
    head: str | None = None
    hosts: str | None = None
    token_file: str | None = None
    join_timeout_s: float = 300.0
    ladder: bool = False
    debug_comm: bool = False
    end_orphans: bool = False
    launcher: str | None = None
    ray_address: str | None = None
    partition: str | None = None
    time: str | None = None
    programs: Programs = field(default_factory=Programs)
    probes: Probes = field(default_factory=Probes)
    show: Show = lambda _message: None

    @property
    def training(self) -> TrainRequest:
        """The training start that this is the look before; its config is empty where none was given."""
        return _Look(
            self.config_path or Path(), self.overrides, nproc=self.nproc, devices=self.devices, nodes=self.nodes,
            node_rank=self.node_rank, head=self.head, hosts=self.hosts, token_file=self.token_file, join_timeout_s=self.join_timeout_s,
            programs=self.programs, probes=self.probes, launcher=self.launcher, ray_address=self.ray_address, partition=self.partition,
            time=self.time,
        )  # fmt: skip

    @property
    def remote(self) -> RemoteCommand:
        """The same look, on another node."""
        return RemoteCommand(*self.look(None if self.config_path is None else str(self.config_path)))

    def look(
        self, config: str | None, *, resolved: bool = False
    ) -> tuple[tuple[str, ...], dict[str, object]]:
        """The same look on another node: words of `unisono`, and options by their names; those of None are left out.

        Args:
            config: where the config is there; None: there is none.
            resolved: whether it has the overrides in it.
        """
        words = ("doctor", *(() if config is None else (config,)), *(() if resolved else self.overrides))
        return words, {
            "--join-timeout": f"{self.join_timeout_s:g}", "--nproc": self.nproc, "--devices": self.devices,
            "--ladder": self.ladder or None, "--debug-comm": self.debug_comm or None, "--end-orphans": self.end_orphans or None,
        }  # fmt: skip
