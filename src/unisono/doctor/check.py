"""What doctor looks at, as data: a check, what one finds, and the surroundings that a check is given to judge."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from unisono.agree.reports import NodeReport
from unisono.config import LoadedConfig
from unisono.doctor.asked import DoctorRequest
from unisono.facts import Environment, Machine, Probes
from unisono.launch.planning import LocalNode

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
    """All that checks are given; `doctor.looking.look_here` reads it once. What a check reads beyond it goes through `probes`.

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
                    Finding(str(one["id"]), one["status"], tuple(map(str, one["evidence"])), tuple(map(str, one["fix"])), str(one.get("where", "")))
                )  # fmt: skip
    return read


def found(check: Check, status: Status, *evidence: str, fix: tuple[str, ...] | list[str] = ()) -> Finding:
    """A finding of a check on this machine."""
    return Finding(check.id, status, evidence, tuple(fix))
