"""What a training start was asked for, and the config that comes of it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.compat import load_own_config
from unisono.config import LoadedConfig
from unisono.errors import UsageError
from unisono.facts import Environment
from unisono.facts.machine import DeviceProbe, probe_nvidia
from unisono.launch.command import Programs
from unisono.launch.resolved import with_absolute_paths


@dataclass(frozen=True)
class TrainRequest:
    """One `unisono train`: the command line's part, and what tests put in place of the machine.

    Attributes:
        config_path: the YAML file.
        overrides: `key.sub=value`, laid over it.
        resume: also start where nothing exists, and extend a finished run.
        fresh: rename what is there, and begin.
        devices: an index or a UUID.
        restarts: in place of the config's.
        limit_rows: only so many rows are read; a rehearsal's.
        programs: what is started as worker and task.
        probe: lists the accelerators.
        faults: written into the plan; only tests and drills do.
    """

    config_path: Path
    overrides: tuple[str, ...] = ()
    resume: bool = False
    fresh: bool = False
    devices: str | None = None
    restarts: int | None = None
    limit_rows: int | None = None
    programs: Programs = field(default_factory=Programs)
    probe: DeviceProbe = probe_nvidia
    faults: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command line that it came from, near enough to be pasted."""
        return " ".join(["unisono train", str(self.config_path), *self.overrides])


def load_asked(request: TrainRequest) -> LoadedConfig:
    """The config with overrides and options laid over it, its paths absolute.

    Raises:
        ConfigError: with every problem that was found.
        UsageError: if the options contradict each other.
    """
    if request.resume and request.fresh:
        raise UsageError.of(
            "--resume and --fresh contradict each other", where="command line",
            fix="--resume goes on with the run, --fresh renames it and begins anew",
        )  # fmt: skip
    overrides = request.overrides
    if request.restarts is not None:
        overrides = (*overrides, f"restarts={request.restarts}")
    loaded = load_own_config(request.config_path, overrides)
    return replace(loaded, config=with_absolute_paths(loaded.config, Path.cwd()))


def refuse_live_launcher(environment: Environment, request: TrainRequest) -> None:
    """One device needs no launcher; under one, each of its processes would train the same run.

    Raises:
        UsageError: if this process is one of several ranks of torchrun or srun.
    """
    launcher = environment.live_launcher
    if launcher is None:
        return
    variable = "TORCHELASTIC_RUN_ID" if launcher == "torchrun" else "SLURM_NTASKS"
    once = "srun --ntasks=1 " if launcher == "srun" else ""
    raise UsageError.of(
        f"unisono train was started by {launcher} as one of {environment.world_size} ranks",
        where=f"WORLD_SIZE={environment.world_size}, {variable} is set",
        why="it starts its rank itself; started several times, all would train the same run",
        fix=f"run it once: {once}{request.command}",
    )
