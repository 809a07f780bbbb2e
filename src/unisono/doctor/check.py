"""Data of doctor: its request, a check, a finding, and the surroundings that a check judges."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unisono.agree.reports import NodeReport
from unisono.config import LoadedConfig
from unisono.events import Message
from unisono.facts import Environment, Machine, Probes
from unisono.launch.planning import LocalNode
from unisono.launch.train_request import TrainRequest
from unisono.rendezvous.ssh import RemoteCommand
from unisono.supervise.child_process import Programs

Show = Callable[[Message], None]


class _DoctorTraining(TrainRequest):
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
        return _DoctorTraining(
            self.config_path or Path(),
            self.overrides,
            nproc=self.nproc,
            devices=self.devices,
            nodes=self.nodes,
            node_rank=self.node_rank,
            head=self.head,
            hosts=self.hosts,
            token_file=self.token_file,
            join_timeout_s=self.join_timeout_s,
            programs=self.programs,
            probes=self.probes,
            launcher=self.launcher,
            ray_address=self.ray_address,
            partition=self.partition,
            time=self.time,
        )

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
            "--join-timeout": f"{self.join_timeout_s:g}",
            "--nproc": self.nproc,
            "--devices": self.devices,
            "--ladder": self.ladder or None,
            "--debug-comm": self.debug_comm or None,
            "--end-orphans": self.end_orphans or None,
        }


Area = Literal["system", "settings", "config", "devices", "network", "peers"]
Status = Literal["pass", "warn", "fail", "unknown"]

AREAS: dict[Area, str] = {
    "system": "This machine",
    "settings": "Environment variables",
    "config": "What this run needs",
    "devices": "Devices",
    "network": "Network",
    "peers": "The other nodes",
}
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that doctor looks at; the docs page has a paragraph for each.

    Attributes:
        id: stable, `AREA.NAME`: `system.shm`.
        title: what is looked at, in a few words.
        why: what goes wrong in training where it is not as it should be, one sentence.
        how: how it is looked at, and what makes it pass, warn, fail or unknown; for the docs page.
        causes: ids of the catalogue of causes that it prevents.
    """

    id: str
    title: str
    why: str
    how: str
    causes: tuple[str, ...] = ()

    @property
    def area(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check; a check may have several findings, one for each thing that is wrong.

    Attributes:
        id: of the check.
        status: fail: a run would not work, or not as it should; warn: it would, at a price; unknown: could not be looked at.
        evidence: the value seen, in one line; further lines are rows of a table.
        fix: what to type, the best first; empty where nothing is to be done.
        where: the node it is about, in a job of several: `node 1 (b)`; empty: this machine.
    """

    id: str
    status: Status
    evidence: tuple[str, ...]
    fix: tuple[str, ...] = ()
    where: str = ""

    def to_json(self) -> dict[str, Any]:
        """As DESIGN A1 has it; lines are lists."""
        body = {"id": self.id, "status": self.status, "evidence": list(self.evidence), "fix": list(self.fix)}
        return body | ({"where": self.where} if self.where else {})


@dataclass(frozen=True)
class Surroundings:
    """All that checks are given; `doctor.local_report.look_here` reads it once. What a check reads beyond it goes through `probes`.

    A test puts recorded answers into the request's probes, and variables into the environment.

    Attributes:
        request: what was asked: config, nodes, devices, ladder …
        here: machine (cores, memory, accelerators), environment, topology, and the devices of this node's ranks.
        report: what this node would bring to agreement: limits, interfaces, versions, settings, output_dir …
        loaded: the config, its paths absolute; None without CONFIG.
    """

    request: DoctorRequest
    here: LocalNode
    report: NodeReport
    loaded: LoadedConfig | None = None

    @property
    def environment(self) -> Environment:
        """The variables, without secrets."""
        return self.here.environment

    @property
    def machine(self) -> Machine:
        """Cores, memory, accelerators as the probe listed them."""
        return self.here.machine

    @property
    def probes(self) -> Probes:
        """Devices, network, clock, packages."""
        return self.request.probes


CheckFunction = Callable[[Surroundings], list[Finding]]
"""Judges; several of different areas run side by side, in threads. What it raises is a defect of ours."""


def findings_of(value: object) -> list[Finding]:
    """Findings of another machine or process, as doctor's JSON has them; what is none is left out."""
    read = []
    for one in value.get("checks") or [] if isinstance(value, dict) else []:
        with contextlib.suppress(KeyError, TypeError):
            if one["status"] in ("pass", "warn", "fail", "unknown") and one["evidence"]:
                read.append(
                    Finding(
                        str(one["id"]),
                        one["status"],
                        tuple(map(str, one["evidence"])),
                        tuple(map(str, one["fix"])),
                        str(one.get("where", "")),
                    )
                )
    return read


def found(check: Check, status: Status, *evidence: str, fix: tuple[str, ...] | list[str] = ()) -> Finding:
    """A finding of a check on this machine."""
    return Finding(check.id, status, evidence, tuple(fix))
