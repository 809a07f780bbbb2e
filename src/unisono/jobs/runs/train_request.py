"""The request of one training run: command line options, and the config that results from them."""

import glob
import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from unisono.base._version import __version__
from unisono.base.causes import Verdict
from unisono.base.errors import ConfigError, Problem, UnisonoError, UsageError
from unisono.base.messages import Show, notify
from unisono.guard.facts import Environment, Probes
from unisono.guard.facts.environment import all_variables
from unisono.guard.facts.slurm import SlurmStep
from unisono.guard.places.placement import device_words
from unisono.guard.places.topology import TopologyRequest, parse_hosts
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.jobs.remote_checkpoint.verification import ReadingRate
from unisono.jobs.runs.config_changes import read_allowed
from unisono.jobs.runs.config_file import load_config, read_translation
from unisono.jobs.runs.start_decision import decide_start
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.config.own_code import own_code_digests, own_code_of, with_code_path
from unisono.trainer.config.sections import NamesFile, Section
from unisono.trainer.plan import needed_packages


class LostNodeSource(Protocol):
    """The launcher that started the fronts, as a source of the causes of lost nodes."""

    def of_lost(self, node_rank: int) -> tuple[Verdict, float] | None:
        """Why a node is gone, and how many seconds that word was waited for; None where there is
        none in bounded time.
        """


def with_absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    """The config with every path absolute.

    Hub ids, URLs and `builtin:` names stay as they are.

    A name counts as a path if it exists relative to `base`.
    """
    located = _located(config, base)
    for code in own_code_of(config):
        located = with_code_path(located, code, _absolute(str(code.path), base))
    return located


def config_yaml(config: RunConfig, *, command: str) -> str:
    """The text of config.yaml: runnable as it is."""
    body = config.model_dump(mode="json", by_alias=True)
    return (
        f"# Written by unisono {__version__}: the complete config, defaults included.\n"
        f"# Run it again with: {command}\n"
        + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=110)
    )


Kind = TypeVar("Kind", bound=Section)


def _located(section: Kind, base: Path) -> Kind:
    """A section with the paths in it, and in its own sections, absolute."""
    changes = {}
    for name, info in type(section).model_fields.items():
        before = getattr(section, name)
        after = _located_value(before, NamesFile.of(info), base)
        if after != before:
            changes[name] = after
    return section.model_copy(update=changes)


def _located_value(value: Any, mark: NamesFile | None, base: Path) -> Any:
    if isinstance(value, Section):
        return _located(value, base)
    if isinstance(value, list):
        return [_located_value(item, mark, base) for item in value]
    if mark is None or value == mark.besides:
        return value
    return str(_joined(value, base)) if mark.is_output else _absolute(value, base)


def _absolute(value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = _joined(value, base)
    there = path.exists() or (glob.has_magic(value) and _matches(path))
    return str(path) if there else value


def _joined(value: str, base: Path) -> Path:
    return Path(os.path.normpath(base / Path(value).expanduser()))


def _matches(pattern: Path) -> bool:
    """Whether a glob pattern finds anything."""
    return next(glob.iglob(str(pattern), recursive=True), None) is not None  # noqa: PTH207 - absolute patterns


@dataclass(frozen=True)
class TrainRequest:
    """One `unisono train`: the command line's part, and what tests put in place of the machine.

    Attributes:
        overrides: `key.sub=value`, laid over it.
        resume: also start where nothing exists, and extend a finished run.
        fresh: rename what is there, and begin.
        allow: `--allow` as typed: keys that may change when a run resumes. Node 0 decides.
        trust: also resume from a checkpoint that is not signed with this user's key. Node 0
            decides.
        trust_code: run classes of the user's own files, on this node.
        devices: `--devices` as it was typed: indices or UUIDs between commas.
        nodes: how many there are: a number, or MIN:MAX.
        node_rank: which of them this is.
        head: where node 0 is: HOST or HOST:PORT.
        hosts: `--hosts` as it was typed: this machine and those that it starts over ssh, between
            commas.
        token_file: a file with the job's secret; `-`: the first line of stdin, whose end is then
            this front's end.
        join_timeout_s: how long the nodes wait for each other.
        launcher: the name of what starts the fronts; None: this one, and whoever has the same
            command.
        launcher_options: by the names of that launcher's fields.
        expects_nodes: whether a job of this node alone is refused, unless `--nodes 1` is given.
        origins: where each value of the config came from, where another front has resolved it;
            None: as it is read here.
        debug_comm: enable verbose communication logs of the ranks.
        rehearse: several ranks make a checkpoint after the first step, which is read back.
        limit_rows: only so many rows are read; a rehearsal's.
        programs: what is started as worker and task.
        ssh: the program that starts `--hosts`, with options; tests have a port and keys of their
            own.
        probes: how this machine is inspected; tests replace it.
        faults: written into the plan; only tests and drills do.
        rhythm: how fast checkpoints are re-read during the run; tests use a faster one.
        lost_node_source: the launcher's knowledge of lost nodes; None if the launcher knows no more
            than the head.
    """

    config_path: Path
    overrides: tuple[str, ...] = ()
    resume: bool = False
    fresh: bool = False
    allow: tuple[str, ...] = ()
    trust: bool = False
    trust_code: bool = False
    devices: str | None = None
    restarts: int | None = None
    nproc: int | None = None
    nodes: str | None = None
    node_rank: int | None = None
    head: str | None = None
    hosts: str | None = None
    token_file: str | None = None
    join_timeout_s: float = 300.0
    launcher: str | None = None
    launcher_options: Mapping[str, str] = field(default_factory=dict)
    expects_nodes: bool = False
    origins: dict[str, str] | None = None
    debug_comm: bool = False
    rehearse: bool = True
    limit_rows: int | None = None
    programs: Programs = field(default_factory=Programs)
    ssh: tuple[str, ...] = ("ssh",)
    probes: Probes = field(default_factory=Probes)
    faults: dict[str, object] = field(default_factory=dict)
    rhythm: ReadingRate = field(default_factory=ReadingRate)
    lost_node_source: LostNodeSource | None = None

    @property
    def command(self) -> str:
        """The command line that it came from, near enough to be pasted."""
        options = (("--nproc", self.nproc), ("--devices", self.devices))
        given = [f"{name} {value}" for name, value in options if value is not None]
        return " ".join(["unisono train", str(self.config_path), *map(shlex.quote, self.overrides), *given])

    @property
    def allowed(self) -> frozenset[str]:
        """The names given to `--allow`.

        Raises:
            UsageError: with each word that names nothing.
        """
        return read_allowed(self.allow)

    @property
    def topology(self) -> TopologyRequest:
        """The request's part about nodes and ranks.

        Raises:
            UsageError: if a list has an empty entry.
        """
        return TopologyRequest(
            nproc=self.nproc,
            nodes=self.nodes,
            node_rank=self.node_rank,
            head=self.head,
            devices=device_words(self.devices),
            hosts=parse_hosts(self.hosts),
            command=self.command,
        )


def load_requested(request: TrainRequest) -> LoadedConfig:
    """The config with overrides and options laid over it, its paths absolute.

    Raises:
        ConfigError: with every problem that was found.
        UsageError: if the options contradict each other.
    """
    if request.resume and request.fresh:
        raise UsageError.of(
            "--resume and --fresh contradict each other",
            where="command line",
            fix="--resume continues the run, --fresh renames it and starts a new one",
        )
    _ = request.allowed  # a misspelt key is refused before anything else is looked at
    overrides = request.overrides
    if request.restarts is not None:
        overrides = (*overrides, f"restarts={request.restarts}")
    loaded = load_config(request.config_path, overrides)
    if not request.trust_code:
        refuse_code(loaded.config, loaded.origins)
    origins = loaded.origins if request.origins is None else request.origins
    return replace(loaded, config=with_absolute_paths(loaded.config, Path.cwd()), origins=origins)


def refuse_code(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses classes of the user's own, without --trust-code.

    Args:
        origins: of keys of the config.

    Raises:
        UsageError: if the config has one.
    """
    problems = [
        Problem(
            f"{code.key}: {code.path}:{code.name} is code that has not been trusted",
            origins.get(code.key, code.key),
            "each rank would execute the file, with your rights",
            "read it, and pass --trust-code (in Python: trust_code=True) on every node",
        )
        for code in own_code_of(config)
    ]
    if problems:
        raise UsageError(*problems)


def refuse_missing_packages(loaded: LoadedConfig, installed: Collection[str]) -> None:
    """Refuses a config with options whose packages are missing, which would fail when they are
    first used.

    Raises:
        ConfigError: with the command that installs them.
    """
    problems = []
    for needed in needed_packages(loaded.config):
        missing = [name for name in needed.names if name not in installed]
        if missing:
            packages = " and ".join(missing)
            what = f"{needed.words} needs the {'packages' if len(missing) > 1 else 'package'} {packages}"
            where = loaded.origins.get(needed.key, needed.key)
            problems.append(Problem(what, where, "not installed here", f"pip install {' '.join(missing)}"))
    if problems:
        raise ConfigError(*problems)


def named_code_digests(config: RunConfig) -> dict[str, str]:
    """`own_code_digests` with names for people, e.g. `objective focal.py`.

    Raises:
        ConfigError: as there.
    """
    names = {code.key: f"{code.what} {code.path.name}" for code in own_code_of(config)}
    return {names.get(key, key): digest for key, digest in own_code_digests(config).items()}


def with_overwriting(request: TrainRequest) -> TrainRequest:
    """The request with `fresh` if a LLaMA-Factory file says `overwrite_output_dir: true` and its
    directory has a finished or a different run.

    An unfinished run of the same config is still resumed: the same command after a failure
    continues.
    """
    if request.resume or request.fresh or not request.config_path.is_file():  # a pipe can be read only once
        return request
    try:
        translation = read_translation(request.config_path, request.overrides)
        if translation is None or not translation.overwrites_output:
            return request
        loaded = load_requested(request)
    except UnisonoError:
        return request  # refused when it is loaded for the run
    run = RunDir(Path(loaded.config.output_dir))
    try:
        decide_start(run, loaded.config, resume=False, fresh=False, allow=request.allowed)
    except UsageError:
        return replace(request, fresh=True)
    return request


def show_notes(loaded: LoadedConfig, show: Show) -> None:
    """Says once that a file of LLaMA-Factory was read, what of it was ignored, and what differs."""
    if loaded.translation is not None:
        for text in loaded.translation.notes(all_variables()):
            notify(show, text)


def refuse_live_launcher(environment: Environment, request: TrainRequest) -> None:
    """unisono starts its ranks itself; under a launcher each of its processes would train the same
    run.

    Raises:
        UsageError: if this process is one of several ranks of torchrun or srun.
    """
    _refuse_several_tasks(environment.slurm_step, request)
    launcher = environment.live_launcher
    if launcher is None:
        return
    variable = "TORCHELASTIC_RUN_ID" if launcher == "torchrun" else "SLURM_NTASKS"
    nodes = environment.slurm_nodes or 1
    many = launcher == "srun" and nodes > 1
    start = {"torchrun": "", "srun": "srun --ntasks-per-node=1 " if many else "srun --ntasks=1 "}[launcher]
    launcher_size = environment.leftovers.get("LOCAL_WORLD_SIZE", "")
    ranks = (
        f" --nproc {launcher_size}"
        if launcher_size.isdigit() and int(launcher_size) > 1 and request.nproc is None
        else ""
    )
    raise UsageError.of(
        f"unisono train was started by {launcher} as one of {environment.world_size} ranks",
        where=f"WORLD_SIZE={environment.world_size}, {variable} is set",
        why="it starts its ranks itself; started several times, all would train the same run",
        fix=f"run it once{' on each node' if many else ''}: {start}{request.command}{ranks}",
    )


def _refuse_several_tasks(step: SlurmStep | None, request: TrainRequest) -> None:
    """Also without WORLD_SIZE: each task would take the run's directory for its own.

    Raises:
        UsageError: if this process is one of several tasks of a step on its node.
    """
    if step is None or step.tasks <= step.nodes:
        return
    each, remainder = divmod(step.tasks, step.nodes)
    ranks = f" --nproc {each}" if request.nproc is None and not remainder else ""
    start = "srun --ntasks-per-node=1" if step.nodes > 1 else "srun --ntasks=1"
    raise UsageError.of(
        f"unisono train was started by srun as one of {step.tasks} tasks on {step.nodes}"
        f" node{'' if step.nodes == 1 else 's'}",
        where=f"step {step.name}, SLURM_STEP_NUM_TASKS={step.tasks}",
        why="it starts its ranks itself; started several times, all would train the same run",
        fix=f"one task on each node: {start} {request.command}{ranks}",
    )
