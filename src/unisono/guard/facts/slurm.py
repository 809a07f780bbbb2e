"""Slurm: variables of a step, node lists, time limits, and the answers of its commands."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmStep:
    """One `srun` of a job, seen from one of its tasks.

    Attributes:
        restart: how often the job was requeued before.
        tasks: of this step, over all nodes.
        node: this node's number within the step, from 0.
        nodelist: the step's nodes as Slurm writes them: `gpu[01-04,7]`.
    """

    job: str
    step: str
    restart: int
    nodes: int
    tasks: int
    node: int
    nodelist: str

    @property
    def name(self) -> str:
        """JOB.STEP, as sacct and scancel know it."""
        return f"{self.job}.{self.step}"


def read_slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The step, or None outside of one: a batch script and the shell of salloc are in a job, and in
    no step.
    """
    numbers = {
        name: _natural_number(env.get(f"SLURM_{name}", ""))
        for name in ("STEP_NUM_NODES", "STEP_NUM_TASKS", "NODEID", "PROCID")
    }
    job, step, nodelist = (env.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "STEP_NODELIST"))
    if not (job.isdigit() and step.isdigit() and nodelist) or None in numbers.values():
        return None
    nodes, tasks, node = (numbers[name] or 0 for name in ("STEP_NUM_NODES", "STEP_NUM_TASKS", "NODEID"))
    if not 0 <= node < nodes:
        return None
    return SlurmStep(
        job, step, _natural_number(env.get("SLURM_RESTART_COUNT", "")) or 0, nodes, tasks, node, nodelist
    )


def hosts_of(nodelist: str) -> list[str]:
    """Host names of a Slurm node list, in order; empty if invalid.

    `a,b` or `gpu[01-03,07]-ib` or `rack[1-2]node[1-4]`.
    """
    names: list[str] = []
    for word in _split_list(nodelist):
        expanded = _expand_brackets(word)
        if not expanded:
            return []
        names += expanded
    return names


def seconds_of(limit: str) -> float | None:
    """A time limit as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; None
    if it is none, or there is none.
    """
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,6}))?(?::(\d{1,6}))?", limit.strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None or match[4] is not None:
        return days * 86_400.0 + first * 3_600 + second * 60 + third
    return first * 60.0 + second


_MAX_NODES = 100_000


def _split_list(text: str) -> list[str]:
    """At commas that are outside of brackets; empty where brackets do not match."""
    word = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    return re.findall(word, text) if re.fullmatch(rf"{word}(?:,{word})*", text) else []


def _expand_brackets(word: str) -> list[str]:
    match = re.search(r"\[([^\[\]]*)\]", word)
    if match is None:
        return [] if "[" in word or "]" in word else [word]
    before, after = word[: match.start()], word[match.end() :]
    middle: list[str] = []
    for part in match[1].split(","):
        span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if span is None:
            return []
        low, high = int(span[1]), int(span[2] or span[1])
        if high < low or high - low > _MAX_NODES:
            return []
        middle += [f"{number:0{len(span[1])}d}" for number in range(low, high + 1)]
    endings = _expand_brackets(after) if after else [""]
    return [before + number + end for number in middle for end in endings]


def _natural_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


_LIMIT_S = 20.0
_STAMP = re.compile(r" \[[^\[\]]*@[^\[\]]*\]$")
"""The author and time of a reason."""


@dataclass(frozen=True)
class SlurmAnswer:
    """Result of a Slurm command.

    Attributes:
        code: exit code; None: the command is missing, or did not finish in time.
        err: standard error; or why there is no result.
    """

    code: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""
        return self.code == 0

    @property
    def words(self) -> str:
        """Slurm's error messages, without the name of the command."""
        lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in self.err.splitlines()]
        return "; ".join(line for line in lines if line)


def has_slurm() -> bool:
    """Whether Slurm's commands are installed here."""
    return shutil.which("sbatch") is not None


def run_slurm(
    command: str,
    *words: str,
    limit_s: float = _LIMIT_S,
    environment: dict[str, str] | None = None,
    umask: int = -1,
) -> SlurmAnswer:
    """Runs a Slurm command.

    Args:
        command: its name, looked for in PATH.
        limit_s: seconds after which it is ended.
        environment: all of it; None: this process's.
        umask: under which it runs, and what it starts; -1: this process's.
    """
    path = shutil.which(command)
    if path is None:
        return SlurmAnswer(None, "", f"{command} is not installed here")
    try:
        done = subprocess.run(
            [path, *words],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=limit_s,
            env=environment,
            stdin=subprocess.DEVNULL,
            umask=umask,
        )
    except subprocess.TimeoutExpired:
        return SlurmAnswer(None, "", f"{command} did not answer in {limit_s:.0f} s")
    except OSError as error:
        return SlurmAnswer(None, "", f"{command}: {error.strerror or error}")
    return SlurmAnswer(done.returncode, done.stdout, done.stderr)


def fields_of(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show … -o`: `Name=value`; a value extends to the next
    name.
    """
    pairs = re.findall(r"(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=(.*?)(?= [A-Za-z][A-Za-z0-9_/:]*=|$)", line.strip())
    return {name: value.strip() for name, value in pairs}


def submitting_environment() -> dict[str, str]:
    """This process's variables for sbatch, which keeps them for the job; without those of a step
    that it may be typed in.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }


@dataclass(frozen=True)
class NodeState:
    """A node as the controller has it.

    Attributes:
        state: `IDLE`, `MIXED+DRAIN`, `DOWN*`.
        reason: why an administrator or the controller has taken it out; empty: nobody has.
    """

    name: str
    state: str
    reason: str = ""
    address: str = ""

    @property
    def usable(self) -> bool:
        """Whether new jobs are put on it, now or when it is free."""
        flags = set(re.split(r"[+]", self.state.strip("*~#!%$@^-").upper()))
        return (
            not flags
            & {
                "DOWN",
                "DRAIN",
                "DRAINED",
                "DRAINING",
                "FAIL",
                "FAILING",
                "ERROR",
                "FUTURE",
                "UNKNOWN",
                "NOT_RESPONDING",
                "MAINT",
            }
            and "*" not in self.state
        )

    @property
    def description(self) -> str:
        """Its state in words."""
        return f"{self.name} is {self.state}" + (f": {self.reason}" if self.reason else "")


def node_states(nodelist: str, *, limit_s: float = 5.0) -> list[NodeState]:
    """The nodes of a list as Slurm writes it; empty if the controller does not say in time."""
    answer = run_slurm("scontrol", "show", "node", "-o", nodelist, limit_s=limit_s)
    states = []
    for line in answer.out.splitlines() if answer.ok else ():
        fields = fields_of(line)
        if "NodeName" in fields:
            reason = (
                "" if fields.get("Reason") in (None, "none", "(null)") else _STAMP.sub("", fields["Reason"])
            )
            states.append(
                NodeState(fields["NodeName"], fields.get("State", "?"), reason, fields.get("NodeAddr", ""))
            )
    return states
