"""What a check of doctor is and judges: its request, a finding, the surroundings, and this node's
report to which agreement's rules apply.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from unisono.base.causes import Verdict
from unisono.base.messages import Show
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import Check as RuleCheck
from unisono.guard.agree.reports import NodeReport, name_node
from unisono.guard.facts import Environment, Machine, Probes, read_environment, read_machine
from unisono.guard.facts.storage import probe_storage
from unisono.guard.rendezvous.party import ChannelFacts
from unisono.guard.rendezvous.remote_fronts import RemoteCommand
from unisono.jobs.runs.node_report import make_node_report
from unisono.jobs.runs.planning import LocalNode, look_around
from unisono.jobs.runs.train_request import TrainRequest, load_requested
from unisono.trainer.config import LoadedConfig, build_config
from unisono.trainer.plan.task_requests import InputDigests


@dataclass(frozen=True)
class DoctorRequest(TrainRequest):
    """Request of one `unisono doctor`: that of the training which it checks, and what only doctor
    does.

    Attributes:
        has_config: whether there is a config; else only the machine is checked.
        trust_code: the file of the user's own objective is read, not executed.
        debug_comm: whether the libraries' logs of the collective of `ladder` are kept.
        ladder: whether a real collective runs, and if it fails, runs again with one setting after
            the other.
        end_orphans: whether orphaned ranks of earlier runs are killed.
        show: receives progress: data preparation, waiting for nodes.
    """

    config_path: Path = Path()
    has_config: bool = False
    trust_code: bool = True
    ladder: bool = False
    end_orphans: bool = False
    show: Show = lambda _message: None

    @property
    def command(self) -> str:
        """The doctor command line, ready to paste."""
        training = super().command
        return training.replace("unisono train .", "unisono doctor").replace(
            "unisono train", "unisono doctor"
        )

    @property
    def remote(self) -> RemoteCommand:
        """This doctor command for a different node."""
        config = (str(self.config_path),) if self.has_config else ()
        return RemoteCommand(("doctor", *config, *self.overrides), self.node_options)

    @property
    def node_options(self) -> dict[str, object]:
        """The options of the same command on a different node, by name, without those of None."""
        return {
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
"""In display order."""


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check of doctor; the reference page has a paragraph for each.

    Attributes:
        id: stable, `AREA.NAME`: `system.shm`.
        title: what is checked, in a few words.
        why: what goes wrong in training if the check fails, one sentence.
        how: how the check works, and what makes it pass, warn, fail or unknown; for the reference
            page.
        causes: ids of the causes that it prevents.
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
    """Result of a check; a check may have several findings, one per problem.

    Attributes:
        status: fail: a run would fail or misbehave; warn: it would run with a drawback; unknown:
            could not be checked.
        evidence: the observed value in one line; further lines are rows of a table.
        fix: what to type, the best first; empty if nothing needs to be done.
        where: the node concerned, in a job of several nodes: `node 1 (b)`; empty: this machine.
    """

    id: str
    status: Status
    evidence: tuple[str, ...]
    fix: tuple[str, ...] = ()
    where: str = ""

    def to_json(self) -> "FindingJson":
        """The JSON object of `--json`; lines are lists."""
        body = FindingJson(id=self.id, status=self.status, evidence=list(self.evidence), fix=list(self.fix))
        return {**body, "where": self.where} if self.where else body


class FindingJson(TypedDict):
    """A finding in the output of `--json`."""

    id: str
    status: Status
    evidence: list[str]
    fix: list[str]
    where: NotRequired[str]


@dataclass(frozen=True)
class Surroundings:
    """Input of all checks; `doctor.check.read_surroundings` reads it once.

    Anything else a check reads goes through `probes`.

    Tests put recorded answers into the request's probes, and variables into the environment.

    Attributes:
        request: config, nodes, devices, ladder and the other options.
        local_node: machine (cores, memory, accelerators), environment, topology, and the devices of
            this node's ranks.
        report: this node's report for agreement: limits, interfaces, versions, settings, output_dir
            …
        loaded: the config, its paths absolute; None without CONFIG.
    """

    request: DoctorRequest
    local_node: LocalNode
    report: NodeReport
    loaded: LoadedConfig | None = None

    @property
    def environment(self) -> Environment:
        """The variables, without secrets."""
        return self.local_node.environment

    @property
    def machine(self) -> Machine:
        """Cores, memory, accelerators as the probe listed them."""
        return self.local_node.machine

    @property
    def probes(self) -> Probes:
        """Devices, network, clock, packages."""
        return self.request.probes


CheckFunction = Callable[[Surroundings], list[Finding]]
"""Makes the findings of a check; areas run concurrently, in threads. An exception is a bug of
unisono.
"""


def findings_of(value: object) -> list[Finding]:
    """Findings of a different machine or process, from doctor's JSON, without invalid ones."""
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


def found(
    check: DoctorCheck, status: Status, *evidence: str, fix: tuple[str, ...] | list[str] = ()
) -> Finding:
    """A finding of a check on this machine."""
    return Finding(check.id, status, evidence, tuple(fix))


STORAGE_S = 10.0
"""Time limit of a disk; shorter than that of a start, to keep doctor fast."""

NO_FILES: InputDigests = {"note": "not checked: no CONFIG was given"}


@dataclass(frozen=True)
class LocalRun:
    """The config to check, and this node's resources for it.

    Attributes:
        loaded: the given config with absolute paths; without CONFIG the defaults, with output below
            `runs`.
        given: whether a config was given.
    """

    loaded: LoadedConfig
    given: bool
    local_node: LocalNode


def read_local_run(request: DoctorRequest, environment: Environment) -> LocalRun:
    """The config, the machine, and this node's part of the job.

    Raises:
        ConfigError: with every problem of the config.
        UsageError: if the options contradict each other or the machine.
    """
    loaded = read_config(request)
    machine = read_machine(request.probes.devices)
    return LocalRun(loaded, request.has_config, look_around(request, loaded, machine, environment))


def read_config(request: DoctorRequest) -> LoadedConfig:
    """The given config with absolute paths, or the defaults, with output below `runs`.

    Raises:
        ConfigError: with every problem of the config.
    """
    return load_requested(request) if request.has_config else _default_config()


def read_surroundings(request: DoctorRequest, local_run: LocalRun | None = None) -> Surroundings:
    """Reads the input of all checks.

    Raises:
        UnisonoError: as `read_local_run`.
    """
    local_run = local_run or read_local_run(request, read_environment())
    report = make_node_report(
        loaded=local_run.loaded,
        local_node=local_run.local_node,
        channel=ChannelFacts("127.0.0.1", {}, 0.0, []),
        files=NO_FILES,
        output=probe_storage(Path(local_run.loaded.config.output_dir), limit_s=STORAGE_S),
        probes=request.probes,
    )
    return Surroundings(request, local_run.local_node, report, local_run.loaded if local_run.given else None)


def _default_config() -> LoadedConfig:
    raw: dict[str, object] = {
        "model": {"path": "builtin:tiny"},
        "data": {"train": "-"},
        "output_dir": str(Path.cwd() / "runs"),
    }
    return build_config(raw, lines={}, name="(no config)")


def agreement_findings(
    agreement: Agreement, report: NodeReport, checks: Mapping[str, DoctorCheck]
) -> list[Finding]:
    """The findings on this node, without its name, since there is only one node.

    Args:
        agreement: result of the rules on this node's report alone.
        checks: doctor's check for each rule id; other rules are left out.
    """
    verdicts = {verdict.summary: verdict for verdict in agreement.verdicts}
    me = name_node(report.node_rank, report.host)
    wrong = {judged.id for judged in agreement.with_status("warn", "fail")}
    return [
        _finding(checks[judged.id], judged, verdicts.get(judged.text), me)
        for judged in agreement.checks
        if judged.id in checks and not (judged.status == "pass" and judged.id in wrong)
    ]


def _finding(check: DoctorCheck, judged: RuleCheck, verdict: Verdict | None, me: str) -> Finding:
    lines: Sequence[str] = verdict.fix if verdict is not None else [judged.fix] if judged.fix else []
    return Finding(
        check.id, judged.status, (_plain(judged.text, me),), tuple(_plain(line, me) for line in lines)
    )


def _plain(text: str, me: str) -> str:
    """`node 0 (a): 1 file` as `1 file`."""
    text = text.replace(f" on {me}: ", ": ").removeprefix(f"on {me}: ")
    for mention in (f"{me}: ", f" on {me}"):
        text = text.replace(mention, "")
    return text.replace(f"of {me}", "here").replace(me, "this machine").strip()
