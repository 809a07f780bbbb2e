"""`unisono …` on a machine that it has not got: `python front.py ANSWERS.json train CONFIG …`, as
tests start it.

The answers, each of them optional: `gpus` (fields of facts.machine.Gpu), `machine` (a file of
tests/front/checks/recorded), `packages` (name to version, laid over the installed ones), `clock_offset_s`
(of the wall clock), `names` (host name to addresses), `faults` (of the plan), `task` and `worker`
(what is started for tasks and ranks: this interpreter, -m and a module, which the session's fork
server forks).
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import unisono.jobs.runs.train_request
from unisono.front.checks import check as doctor_check
from unisono.front.cli.app import main
from unisono.guard.facts import Probes, package_versions
from unisono.guard.facts.machine import DeviceProbe, DevicesDetails, Gpu
from unisono.guard.facts.network import NetworkInterface, SystemNetwork
from unisono.guard.supervise import fork_server
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.fork_server import ForkServer


@dataclass(frozen=True)
class SkewedClock:
    """A wall clock that is off."""

    offset_s: float

    def wall(self) -> float:
        return time.time() + self.offset_s

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(frozen=True)
class OwnNames:
    """The real interfaces, with recorded answers for some names."""

    names: dict[str, list[str]]

    def interfaces(self) -> list[NetworkInterface]:
        return SystemNetwork().interfaces()

    def resolve(self, name: str) -> list[str]:
        return self.names[name] if name in self.names else SystemNetwork().resolve(name)


def device_probe(gpus: list[dict[str, Any]]) -> DeviceProbe:
    """Lists recorded devices."""
    found = [Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in gpus]
    return lambda: (found, "" if found else "no NVIDIA driver")


def read_recorded(machine: dict[str, Any]) -> DevicesDetails:
    """What NVML would say there.

    This file runs from anywhere, so the tests are not on its path yet.
    """
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.front.checks.replay import details_from

    return details_from(machine)


def with_details(made: Probes, details: DevicesDetails) -> Probes:
    """The same with a recorded machine's devices."""
    gpus = [
        Gpu(one.index, one.uuid, one.name, one.memory_bytes, one.memory_bytes - one.memory_used_bytes, one.capability, one.bus_id, one.numa_node)
        for one in details.devices
        if not one.trouble
    ]  # fmt: skip
    return replace(made, details=lambda: details, devices=lambda: (gpus, "" if gpus else "no NVIDIA driver"))


def probes(answers: dict[str, Any]) -> Probes:
    """The real probes, with what is recorded in their place."""
    made = Probes()
    if "gpus" in answers:
        made = replace(made, devices=device_probe(answers["gpus"]))
    if "machine" in answers:
        made = with_details(made, read_recorded(answers["machine"]))
    if "packages" in answers:
        made = replace(made, packages=lambda: package_versions() | answers["packages"])
    if "clock_offset_s" in answers:
        made = replace(made, clock=SkewedClock(answers["clock_offset_s"]))
    if "names" in answers:
        made = replace(made, network=OwnNames(answers["names"]))
    return made


ANSWERS = json.loads(Path(sys.argv[1]).read_text())
if ANSWERS.get("exec"):  # each rank is a fresh interpreter, as where nothing can be forked
    ForkServer.start = lambda *_, **__: None  # type: ignore[method-assign]


def with_program(programs: Programs, kind: str) -> Programs:
    """The same with the answers' program for tasks or ranks."""
    command = tuple(ANSWERS[kind])
    fork_server._SERVED = (*fork_server._SERVED, command[2])
    return replace(programs, task=command) if kind == "task" else replace(programs, worker=command)


class Request(unisono.jobs.runs.train_request.TrainRequest):
    """The same request, with the answers in it."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        object.__setattr__(self, "probes", probes(ANSWERS))
        object.__setattr__(self, "faults", ANSWERS.get("faults", {}))
        for kind in ("task", "worker"):
            if kind in ANSWERS:
                object.__setattr__(self, "programs", with_program(self.programs, kind))


class Look(doctor_check.DoctorRequest):
    """What doctor is asked for, with the answers in it."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        object.__setattr__(self, "probes", probes(ANSWERS))
        if "task" in ANSWERS:
            object.__setattr__(self, "programs", with_program(self.programs, "task"))


unisono.jobs.runs.train_request.TrainRequest = Request  # type: ignore[misc]
doctor_check.DoctorRequest = Look  # type: ignore[misc]
main(sys.argv[2:])
