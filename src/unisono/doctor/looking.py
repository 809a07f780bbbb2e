"""Reads this machine once, for all checks: what agreement would be told by this node, and what the run's config asks for."""

from dataclasses import dataclass
from pathlib import Path

from unisono.config import LoadedConfig
from unisono.config.load import build_config
from unisono.doctor.asked import DoctorRequest
from unisono.doctor.check import Surroundings
from unisono.facts import Environment, read_environment, read_machine
from unisono.facts.storage import probe_storage
from unisono.launch.node_report import make_node_report
from unisono.launch.planning import LocalNode, look_around
from unisono.launch.train_request import load_asked
from unisono.rendezvous.party import ChannelFacts

STORAGE_S = 10.0
"""So long a disk may say nothing: a doctor that waits as long as a start does would not be quick."""

NO_FILES = {"note": "not looked at: no CONFIG was given"}


@dataclass(frozen=True)
class Asked:
    """The config that is looked at, and what is here for it.

    Attributes:
        loaded: the one that was given, its paths absolute; without CONFIG one of defaults, which writes below `runs`.
        given: whether there was one.
    """

    loaded: LoadedConfig
    given: bool
    here: LocalNode


def read_asked(request: DoctorRequest, environment: Environment) -> Asked:
    """The config, the machine, and this node's part of the job.

    Raises:
        ConfigError: with every problem of the config.
        UsageError: if the options contradict each other or the machine.
    """
    given = request.config_path is not None
    loaded = read_config(request)
    machine = read_machine(request.probes.devices)
    return Asked(loaded, given, look_around(request.training, loaded, machine, environment))


def read_config(request: DoctorRequest) -> LoadedConfig:
    """The config that was given, its paths absolute; else one of defaults, which writes below `runs`.

    Raises:
        ConfigError: with every problem of the config.
    """
    return load_asked(request.training) if request.config_path is not None else _without_config()


def look_here(request: DoctorRequest, asked: Asked | None = None) -> Surroundings:
    """All that checks are given.

    Raises:
        UnisonoError: as `read_asked`.
    """
    asked = asked or read_asked(request, read_environment())
    report = make_node_report(
        loaded=asked.loaded, here=asked.here, standing=ChannelFacts("127.0.0.1", {}, 0.0, []), files=NO_FILES,
        output=probe_storage(Path(asked.loaded.config.output_dir), limit_s=STORAGE_S), probes=request.probes,
    )  # fmt: skip
    return Surroundings(request, asked.here, report, asked.loaded if asked.given else None)


def _without_config() -> LoadedConfig:
    raw = {
        "model": {"path": "builtin:tiny"},
        "data": {"train": "-"},
        "output_dir": str(Path.cwd() / "runs"),
    }
    return build_config(raw, lines={}, name="(no config)")
