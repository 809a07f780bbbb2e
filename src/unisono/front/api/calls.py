"""What a Python program calls: the config, `train`, `stream`, `doctor` and `diagnose`."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pydantic import PrivateAttr

from unisono.base.causes.verdict import Evidence, Verdict
from unisono.base.errors import ConfigError, UsageError
from unisono.base.text import one_line
from unisono.front.api import Result
from unisono.front.api.front import Failed, Front, FrontRequest, Notice, Stream, shown
from unisono.front.checks.check import Finding, findings_of
from unisono.guard.diagnosis.reading import diagnose_paths
from unisono.jobs.runs.config_file import load_config
from unisono.jobs.runs.train_request import config_yaml
from unisono.trainer.config import build_config
from unisono.trainer.config.schema import RunConfig

_log = logging.getLogger("unisono")

Section = Mapping[str, Any]


class Keys(TypedDict, total=False):
    """The top-level keys of a config; the reference of the config describes all keys."""

    model: str | Section
    adapter: Section | None
    freeze: Sequence[str]
    train_only: Section | None
    train_parts: Sequence[str]
    data: Section
    objective: str
    preference: Section
    rewards: Sequence[str | Section]
    rollout: Section
    grpo: Section
    classify: Section
    embed: Section
    diffusion: Section
    optim: Section
    duration: str
    batch: Section
    eval: Section
    checkpoint: Section
    parallel: Section
    device: str
    memory: Section
    watch: Section
    restarts: int
    grace: str
    reasons: Mapping[str, str]
    track: Sequence[str]
    deterministic: bool
    seed: int
    output_dir: str


class Config(RunConfig):
    """A complete, valid, immutable config. The keys of a YAML file are its attributes, e.g.
    `config.optim.lr`.

    Relative paths are resolved against the working directory at the time of each call.
    """

    _source: tuple[Path, tuple[str, ...]] | None = PrivateAttr(default=None)

    def __init__(self, **keys: Unpack[Keys]) -> None:
        """Builds a config from the keys that a file would have; sections are mappings:
        `Config(model="builtin:tiny", data={"train": …}, …)`.

        Raises:
            ConfigError: with every problem.
        """
        plain = json.loads(json.dumps(keys, default=_plain))
        try:
            config = build_config(plain, lines={}, name="Config(…)").config
        except ConfigError as error:
            raise shown(error) from None
        super().__init__(**{name: getattr(config, name) for name in config.model_fields_set})

    @classmethod
    def from_file(
        cls, path: str | PathLike[str], overrides: Mapping[str, Any] | Sequence[str] = ()
    ) -> "Config":
        """Loads a config from a YAML file, or from a file of LLaMA-Factory or sd-scripts.

        Args:
            path: the file.
            overrides: values by dotted key, `{"optim.lr": 1e-4}`; or texts as on the command line,
                `["optim.lr=1e-4"]`.

        Raises:
            ConfigError: with every problem, each with its line in the file.
        """
        words = _words(overrides)
        try:
            loaded = load_config(Path(path), words)
        except ConfigError as error:
            raise shown(error) from None
        config = cls.of(loaded.config)
        config._source = (Path(path), words)  # noqa: SLF001 - of this class
        return config

    @classmethod
    def of(cls, config: RunConfig) -> "Config":
        """Builds a config with the values of a config that is already valid."""
        values = {name: getattr(config, name) for name in config.model_fields_set}
        return Config.model_construct(config.model_fields_set, **values)

    @property
    def source(self) -> tuple[Path, tuple[str, ...]] | None:
        """The file that still has these values, and its overrides; None if no file has them."""
        if self._source is None:
            return None
        path, words = self._source
        try:
            same = load_config(path, words).config.model_dump() == self.model_dump()
        except (ConfigError, OSError):
            return None
        return self._source if same else None

    def to_yaml(self) -> str:
        """Returns the text of a config file with all keys."""
        return config_yaml(self, command="unisono train THIS_FILE")


class JobOptions(TypedDict, total=False):
    """Where the ranks of a job are; TrainOptions describes each."""

    nproc: int
    devices: str
    nodes: int | str
    node_rank: int
    head: str
    hosts: str
    token_file: str
    join_timeout_s: float
    launcher: str
    ray_address: str
    partition: str
    time: str
    launcher_options: Mapping[str, str]
    debug_comm: bool


class TrainOptions(JobOptions, total=False):
    """The options of `unisono train`, by the names of the command line.

    Attributes:
        nproc: number of ranks on this node; default: one per device.
        devices: devices of this node, one per rank: `0,1`, or UUIDs.
        resume: resume the run in output_dir, extend a finished run, or start a new run.
        fresh: rename an existing output_dir to `OUT.old-N` and start from scratch.
        allow: resume even if these keys have changed, e.g. `["optim.lr"]`.
        trust: resume from a checkpoint that is not signed with your key.
        trust_code: execute your own `FILE.py:CLASS` of `objective` and `optim.kind` in each rank.
        restarts: number of automatic restarts after a failure.
        nodes: number of nodes, or `MIN:MAX`; run the same program on each node.
        node_rank: rank of this node, from 0.
        head: address of node 0, `HOST[:PORT]`.
        hosts: nodes to start over SSH, e.g. `a,b`; each of them must have the config file.
        token_file: file with the job's token; default: the variable UNISONO_TOKEN.
        join_timeout_s: how long nodes wait for each other, in seconds.
        launcher: local, nodes, ray, slurm, or a launcher of another package.
        ray_address: address of the Ray cluster.
        partition: Slurm partition.
        time: time limit of a Slurm job, e.g. `8:00:00`.
        launcher_options: options of a launcher of another package.
        debug_comm: enable verbose communication logs.
    """

    resume: bool
    fresh: bool
    allow: Sequence[str]
    trust: bool
    trust_code: bool
    restarts: int


def train(config: RunConfig | str | PathLike[str], **options: Unpack[TrainOptions]) -> Result:
    """Fine-tunes a model like `unisono train`, and returns how the run ended. If it failed, the
    result has a verdict.

    Each rank runs in a separate process. The program needs no `if __name__ == "__main__"`, can be a
    notebook, and can call this function in a thread. Warnings and verdicts go to the logger
    `unisono`. Ctrl-C (KeyboardInterrupt) saves a checkpoint first.

    Args:
        config: a Config, or the path of a config file.
        options: the options of the command line.

    Raises:
        UnisonoError: if the config, data, model or machine is refused before the start.
    """
    with stream(config, **options) as events:
        for event in events:
            if isinstance(event, Notice):
                _log.log(logging.WARNING if event.is_warning else logging.INFO, "%s", one_line(event.text))
            elif isinstance(event, Failed):
                _log.error("%s [%s]", event.verdict.summary, event.verdict.cause)
        return events.result()


def stream(config: RunConfig | str | PathLike[str], **options: Unpack[TrainOptions]) -> Stream:
    """Starts a run, and returns an iterator over its events; see `train`.

    The run proceeds whether or not the events are read.

    Args:
        config: a Config, or the path of a config file.
        options: the options of the command line.

    Raises:
        ConfigError: if the config is refused. Errors found later are raised while iterating.
    """
    path, words, text = _named(config)
    _refuse_hosts_without_file(options, text)
    return Stream(Front(FrontRequest("train", path, words, _given(options)), config=text))


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of `doctor`.

    Attributes:
        checks: all findings, grouped by area.
        exit_code: 0, or 6 if a check fails, or 3 if the nodes disagree.
    """

    checks: tuple[Finding, ...]
    exit_code: int

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that must be fixed before a run."""
        return tuple(check for check in self.checks if check.status == "fail")

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `unisono doctor --json` prints."""
        return {"schema": 1, "checks": [check.to_json() for check in self.checks]}


class DoctorOptions(JobOptions, total=False):
    """The options of `unisono doctor`; those of TrainOptions with the same names mean the same.

    Attributes:
        ladder: try a real collective; if it fails, look for a setting that works.
        strict: return exit_code 6 also if a check warns or is unknown.
        end_orphans: end your ranks that are left over from earlier runs.
    """

    ladder: bool
    strict: bool
    end_orphans: bool


def doctor(config: RunConfig | str | PathLike[str] | None = None, **options: Unpack[DoctorOptions]) -> Report:
    """Checks this machine, or all nodes of a job, before a run, like `unisono doctor`.

    Args:
        config: a config whose requirements are checked, too.
        options: the options of the command line.

    Raises:
        UnisonoError: if the config or an option is refused.
    """
    path, words, text = (None, (), None) if config is None else _named(config)
    _refuse_hosts_without_file(options, text)
    front = Front(FrontRequest("doctor", path, words, _given(options)), config=text)
    try:
        while front.next_message() is not None:
            continue
    finally:
        front.stop()
    last = front.last
    if last is not None and last["kind"] == "stopped":
        raise KeyboardInterrupt
    if last is None or last["kind"] != "report":
        raise shown(front.error())
    return Report(tuple(findings_of(last)), int(last["exit_code"]))


class Diagnosis(Verdict):
    """The verdict on a failed run, and other findings from its logs.

    Attributes:
        chain: the first cause and its consequences.
        missing: the information that a more precise answer needs.
        hypotheses: possible causes if no line proves one, most likely first.
        questions: questions whose answers distinguish the hypotheses.
        ruled_out: causes that would leave a line in a complete log, but did not.
        earlier_runs: earlier runs in the same logs.
    """

    chain: tuple[Evidence, ...] = ()
    missing: tuple[str, ...] = ()
    hypotheses: tuple[dict[str, Any], ...] = ()
    questions: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    earlier_runs: tuple[str, ...] = ()


def diagnose(*paths: str | PathLike[str]) -> Diagnosis:
    """Finds the cause of a failed run of any tool in its logs, like `unisono diagnose`.

    Secrets are redacted.

    Args:
        paths: logs, directories of logs, or one run directory.

    Raises:
        UsageError: if no log can be read.
    """
    if not paths:
        raise TypeError("diagnose() needs a path")
    diagnosis = diagnose_paths([str(Path(path)) for path in paths], on_refused=_log.warning)
    body = {name: value for name, value in diagnosis.to_json().items() if name != "schema"}
    return Diagnosis.model_validate_json(json.dumps(body))


def _named(config: RunConfig | str | PathLike[str]) -> tuple[str | None, tuple[str, ...], str | None]:
    """The config's path and what is laid over it, and the text of a file for it where there is none
    with these values.
    """
    if not isinstance(config, RunConfig):
        config = Config.from_file(config)
    elif not isinstance(config, Config):
        config = Config.of(config)
    if config.source is None:
        return None, (), config.to_yaml()
    path, words = config.source
    return str(path), words, None


def _words(overrides: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    if isinstance(overrides, str):
        raise TypeError("overrides are a mapping or a list of texts, not one text")
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={json.dumps(value, default=_plain)}" for key, value in overrides.items())
    return tuple(overrides)


def _plain(value: object) -> object:
    """A path, or a section of the schema, as YAML would have it."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", by_alias=True) if dump is not None else str(value)


def _given(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options for a request of the front.

    Raises:
        TypeError: for a name that is not an option.
    """
    known = {*TrainOptions.__annotations__, *DoctorOptions.__annotations__}
    if wrong := sorted({*options} - known):
        raise TypeError(f"{wrong[0]!r} is not an option; the options are {', '.join(sorted(known))}")
    given = {name: value for name, value in options.items() if value is not None}
    if "nodes" in given:
        given["nodes"] = str(given["nodes"])
    if "token_file" in given:
        given["token_file"] = str(given["token_file"])
        if given["token_file"] == "-":  # noqa: S105 - the front's stdin is the connection to this program
            raise UsageError.of(
                "token_file is stdin",
                where="token_file='-'",
                fix="name a file with mode 0600, or set UNISONO_TOKEN",
            )
    return given


def _refuse_hosts_without_file(options: Mapping[str, Any], text: str | None) -> None:
    if options.get("hosts") and text is not None:
        raise UsageError.of(
            "hosts needs a config file",
            where=f"hosts={options['hosts']!r}",
            why="the other nodes read the same file; this config is in memory only, or its file has changed",
            fix="write config.to_yaml() to a file that all hosts see, and pass Config.from_file",
        )
