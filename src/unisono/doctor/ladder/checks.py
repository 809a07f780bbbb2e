"""The ladder over this machine's ranks."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unisono.doctor.check import CheckFunction, Finding, Surroundings, found
from unisono.doctor.devices.way import Kind, expected_way
from unisono.doctor.ladder.attempt import attempt_here
from unisono.doctor.ladder.climb import Outcome, climb
from unisono.doctor.ladder.record import Record, record_name
from unisono.doctor.ladder.rungs import Settings, rungs
from unisono.doctor.ladder.saying import LADDER, say
from unisono.doctor.network.choice import leads_out, usable
from unisono.facts.accelerators import DevicesDetails
from unisono.facts.machine import read_processors

DEADLINE_S = 15.0
_ENOUGH: dict[Kind, float] = {"nvlink": 20e9, "p2p": 2e9, "shm": 0.5e9, "net": 0.1e9, "broken": 0.1e9}
"""Bytes per second of a sum of 64 MiB that the expected transport should give at the least: about a tenth of what is usual."""
_ENOUGH_ON_CPU = 2e6  # on one machine, whose cores may all be busy; of nodes see unisono.doctor.between


def check_ladder(around: Surroundings) -> list[Finding]:
    """Only with --ladder, and over the ranks of this machine; several nodes climb together (see `nodes`)."""
    if not around.request.ladder or around.here.topology.nodes > 1:
        return []
    places = around.here.devices
    if len(places) < 2:
        return [found(LADDER, "pass", "one rank: it talks to nobody", fix=["--nproc 2 tries two"])]
    backend = "nccl" if places[0].kind == "cuda" else "gloo"
    interfaces = [one.name for one in usable(around.report.interfaces) if leads_out(one)]
    loopback = [one.name for one in usable(around.report.interfaces) if one.loopback]
    steps = rungs(
        backend, interfaces=[*loopback, *interfaces], set_by_hand=sorted(around.environment.variables)
    )

    record = Record(Path("runs") / record_name(str(os.getpid()))) if around.request.debug_comm else None

    def attempt(settings: Settings, name: str) -> Outcome:
        return attempt_here(
            places, settings, backend=backend, deadline_s=DEADLINE_S, programs=around.request.programs,
            record=record.attempt(name) if record else None,
        )  # fmt: skip

    enough = (
        enough_rate(around.probes.details(), [device.index for device in around.report.chosen])
        if backend == "nccl"
        else _ENOUGH_ON_CPU
    )
    return [kept_in(say(climb(steps, attempt, enough=enough)), record)]


def kept_in(finding: Finding, record: Record | None) -> Finding:
    """With the line that says where everything is that the libraries said."""
    if record is None:
        return finding
    return replace(finding, evidence=(*finding.evidence, record.said()))


def enough_rate(details: DevicesDetails, chosen: Sequence[int]) -> float:
    """What the worst way between two of these devices should give, in bytes per second."""
    vendor = read_processors().vendor
    pairs = [(a, b) for place, a in enumerate(chosen) for b in chosen[place + 1 :]]
    return min(
        (_ENOUGH[expected_way(details, *pair, vendor=vendor).kind] for pair in pairs), default=_ENOUGH["shm"]
    )


CATALOGUE = (LADDER,)
CHECKS: tuple[CheckFunction, ...] = (check_ladder,)
