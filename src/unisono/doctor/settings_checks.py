"""Every environment variable in force that decides how ranks find and understand each other: explained, and the wrong ones named."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace

from unisono.agree.display import Member, enumerate_words, show_setting
from unisono.agree.environment_rules import LAUNCH, judge_settings, need_of
from unisono.agree.reports import settings_of
from unisono.agree.rules import NEED_MEANING
from unisono.causes.variable_advice import VALUES
from unisono.causes.variables import KNOWN_TO_LIBRARIES, VARIABLES, find_variable
from unisono.doctor.check import Check, CheckFunction, Finding, Surroundings, found
from unisono.doctor.local_report import agreement_findings

VALUES_CHECK = Check(
    "settings.values",
    "values of the variables in force",
    "an invalid value is read as a different one or ignored, usually without a message",
    "Every variable of the catalogue, and of the families NCCL_, TORCH_NCCL_, GLOO_ and similar, from the environment and from nccl.conf, with what it does and whether"
    " nodes must agree on it. Warns for a value that the variable does not take; fails where no process group can be made with it.",
    ("env_suspicious",),
)
SUSPICIOUS = Check(
    "settings.suspicious",
    "suspicious settings",
    "settings that got a job around a fault once stay in a profile, and cost the next ones their speed or hang them",
    "A table of settings that are obsolete, slow, contradict each other, or are work-arounds for what this machine has not got; and names of NCCL, torch and gloo that nobody"
    " knows, with the nearest known one. Warns; fails where the run could not start.",
    ("env_suspicious", "invalid_device_ordinal", "duplicate_gpu"),
)
MISSPELT = Check(
    "settings.misspelt",
    "misspelt names",
    "a misspelt variable has no effect, and no library reports it",
    "Names that nobody knows and that are almost those of known variables. Warns, with the name that may be meant.",
    ("env_suspicious",),
)
LEFT_OVER = Check(
    "settings.left_over",
    "variables of a former job",
    "RANK, WORLD_SIZE or MASTER_ADDR in a shell make other programs wait for ranks that are never started; unisono ignores them and reports this",
    "Variables that launchers set for the processes of a job, in an environment that no launcher has started. Warns.",
    ("world_mismatch", "env_suspicious"),
)
CATALOGUE: tuple[Check, ...] = (VALUES_CHECK, SUSPICIOUS, MISSPELT, LEFT_OVER)

_SIMILARITY = 0.88  # CUDA_VISIBLE_DEVICE is, CUDA_HOME is not
_OF_FAMILY = re.compile(r"^(NCCL|GLOO|TORCH|CUDA|PYTORCH|OMP)_")
_JOB_VARIABLE = re.compile(r"^(TORCHELASTIC_|PET_|OMPI_COMM_WORLD_|PMI_|MV2_COMM_WORLD_|UNISONO_)")


def check_values(facts: Surroundings) -> list[Finding]:
    """What is in force, and which values are not understood."""
    settings = settings_of(facts.report)
    wrong = [
        finding
        for name, value in settings.items()
        if (finding := _invalid_value(name, value, facts)) is not None
    ]
    if wrong:
        return wrong
    rows = [_explain(name, value, facts.report.variables) for name, value in settings.items()]
    rows += [
        f"{name}: {_unknown_name(name)}" for name in facts.environment.strangers if _OF_FAMILY.match(name)
    ]
    if not rows:
        return [found(VALUES_CHECK, "pass", "none is set: libraries choose by themselves")]
    many = (
        f"{len(rows)} in force, each with a value that it takes"
        if len(rows) > 1
        else "one in force, with a value that it takes"
    )
    return [found(VALUES_CHECK, "pass", many, *rows)]


def _invalid_value(name: str, value: str, facts: Surroundings) -> Finding | None:
    takes = VALUES.get(name)
    if takes is None or not value.strip() or re.fullmatch(takes.pattern, value.strip(), re.IGNORECASE):
        return None
    fatal = takes.fatal and facts.report.device_kind == "cuda"
    text = f"{show_setting(name, value)}: it takes {takes.text}; with this {takes.otherwise}"
    fix = [f"`unset {name}`, or give it one of its values", f"`unisono explain {name}` says what it does"]
    return found(VALUES_CHECK, "fail" if fatal else "warn", text, fix=fix)


def _explain(name: str, value: str, environment: Mapping[str, str]) -> str:
    """`NCCL_P2P_DISABLE=1: …; must be equal everywhere`."""
    known = find_variable(name)
    where = "" if name in environment else " (in nccl.conf)"
    meaning = known.meaning if known is not None else _unknown_name(name)
    return f"{show_setting(name, value)}{where}: {meaning}; it {NEED_MEANING[need_of(name)]}"


def _unknown_name(name: str) -> str:
    return (
        "its library's documentation says what it does"
        if name in KNOWN_TO_LIBRARIES
        else "nobody here knows it"
    )


def check_suspicious(facts: Surroundings) -> list[Finding]:
    """By agreement's own table."""
    report = facts.report
    members = [(Member(report.node_rank, -1, report.host), report)]
    reasons = {} if facts.loaded is None else facts.loaded.config.reasons
    return [
        _with_reason(finding, reasons)
        for finding in agreement_findings(judge_settings(members), report, {"settings": SUSPICIOUS})
    ]


def _with_reason(finding: Finding, reasons: Mapping[str, str]) -> Finding:
    """With what the config says of a setting that has a reason."""
    rows = [
        f"{name} is set on purpose: {why}"
        for name, why in reasons.items()
        if finding.status != "pass" and re.search(rf"\b{re.escape(name)}\b", finding.evidence[0])
    ]
    return replace(finding, evidence=(*finding.evidence, *rows)) if rows else finding


def check_misspelt(facts: Surroundings) -> list[Finding]:
    """Names that are almost those of known variables; what begins as NCCL's, torch's and gloo's is with the suspicious ones."""
    known = [variable.name for variable in VARIABLES]
    wrong = []
    for name in facts.environment.strangers:
        meant = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
        if meant and name not in KNOWN_TO_LIBRARIES and name not in facts.report.variables:
            fix = [
                f'`export {meant[0]}="${name}"; unset {name}`, if that is meant',
                f"`unisono explain {meant[0]}`",
            ]
            wrong.append(
                found(
                    MISSPELT, "warn", f"{name} is set, and nobody knows it: {meant[0]} may be meant", fix=fix
                )
            )
    return wrong or [found(MISSPELT, "pass", "no name that is almost a known one")]


def check_left_over(facts: Surroundings) -> list[Finding]:
    """Variables of a launcher that is not there."""
    if facts.environment.live_launcher is not None:
        return [
            found(
                LEFT_OVER,
                "pass",
                f"{facts.environment.live_launcher} is alive, and its variables are of this job",
            )
        ]
    names = [
        name
        for name in (*facts.here.leftovers, *facts.environment.strangers)
        if name in LAUNCH or _JOB_VARIABLE.match(name)
    ]
    if not names:
        return [found(LEFT_OVER, "pass", "none")]
    named = sorted(set(names))
    text = f"{enumerate_words(named, at_most=12)}: set, and no launcher is at work here"
    return [found(LEFT_OVER, "warn", text, fix=[f"`unset {' '.join(named)}`"])]


CHECKS: tuple[CheckFunction, ...] = (check_values, check_suspicious, check_misspelt, check_left_over)
