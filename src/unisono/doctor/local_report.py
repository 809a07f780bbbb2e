"""This node's report for all checks, and agreement's rules on it as findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.agree.agreement import Agreement
from unisono.agree.display import name_node
from unisono.agree.reports import Check as RuleCheck
from unisono.agree.reports import NodeReport
from unisono.causes import Verdict
from unisono.config import LoadedConfig
from unisono.config.load import build_config
from unisono.doctor.check import Check, DoctorRequest, Finding, Surroundings
from unisono.facts import Environment, read_environment, read_machine
from unisono.facts.storage import probe_storage
from unisono.launch.node_report import make_node_report
from unisono.launch.planning import LocalNode, look_around
from unisono.launch.train_request import load_asked
from unisono.rendezvous.party import ChannelFacts

STORAGE_S = 10.0
"""Time limit of a disk; shorter than that of a start, to keep doctor fast."""

NO_FILES = {"note": "not checked: no CONFIG was given"}


@dataclass(frozen=True)
class LocalRun:
    """The config to check, and this node's resources for it.

    Attributes:
        loaded: the given config with absolute paths; without CONFIG the defaults, with output below `runs`.
        given: whether a config was given.
    """

    loaded: LoadedConfig
    given: bool
    here: LocalNode


def read_local_run(request: DoctorRequest, environment: Environment) -> LocalRun:
    """The config, the machine, and this node's part of the job.

    Raises:
        ConfigError: with every problem of the config.
        UsageError: if the options contradict each other or the machine.
    """
    given = request.config_path is not None
    loaded = read_config(request)
    machine = read_machine(request.probes.devices)
    return LocalRun(loaded, given, look_around(request.training, loaded, machine, environment))


def read_config(request: DoctorRequest) -> LoadedConfig:
    """The given config with absolute paths, or the defaults, with output below `runs`.

    Raises:
        ConfigError: with every problem of the config.
    """
    return load_asked(request.training) if request.config_path is not None else _default_config()


def read_surroundings(request: DoctorRequest, asked: LocalRun | None = None) -> Surroundings:
    """Reads the input of all checks.

    Raises:
        UnisonoError: as `read_local_run`.
    """
    asked = asked or read_local_run(request, read_environment())
    report = make_node_report(
        loaded=asked.loaded,
        here=asked.here,
        standing=ChannelFacts("127.0.0.1", {}, 0.0, []),
        files=NO_FILES,
        output=probe_storage(Path(asked.loaded.config.output_dir), limit_s=STORAGE_S),
        probes=request.probes,
    )
    return Surroundings(request, asked.here, report, asked.loaded if asked.given else None)


def _default_config() -> LoadedConfig:
    raw = {
        "model": {"path": "builtin:tiny"},
        "data": {"train": "-"},
        "output_dir": str(Path.cwd() / "runs"),
    }
    return build_config(raw, lines={}, name="(no config)")


def agreement_findings(
    agreement: Agreement, report: NodeReport, checks: Mapping[str, Check]
) -> list[Finding]:
    """The findings on this node, without its name, since there is only one node.

    Args:
        agreement: result of the rules on this node's report alone.
        report: its report.
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


def _finding(check: Check, judged: RuleCheck, verdict: Verdict | None, me: str) -> Finding:
    lines: Sequence[str] = verdict.fix if verdict is not None else [judged.fix] if judged.fix else []
    return Finding(
        check.id, judged.status, (_plain(judged.text, me),), tuple(_plain(line, me) for line in lines)
    )


def _plain(text: str, me: str) -> str:
    """`node 0 (a): 1 file` as `1 file`."""
    text = text.replace(f" on {me}: ", ": ").removeprefix(f"on {me}: ")
    for said in (f"{me}: ", f" on {me}"):
        text = text.replace(said, "")
    return text.replace(f"of {me}", "here").replace(me, "this machine").strip()
