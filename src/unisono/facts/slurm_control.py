"""Asks Slurm's own commands, with a limit; and reads the fields of what scontrol says."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

_LIMIT_S = 20.0
_STAMP = re.compile(r" \[[^\[\]]*@[^\[\]]*\]$")
"""Who gave a reason, and when."""


@dataclass(frozen=True)
class Answer:
    """What a command of Slurm's said.

    Attributes:
        code: its exit code; None: there is no such command here, or it did not answer in time.
        out: what it printed.
        err: what it complained of; or why there is no answer.
    """

    code: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        """Whether it did what it was asked for."""
        return self.code == 0

    @property
    def words(self) -> str:
        """Slurm's own words on what went wrong, without the name of the command."""
        lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in self.err.splitlines()]
        return "; ".join(line for line in lines if line)


def has_slurm(command: str = "sbatch") -> bool:
    """Whether a command of Slurm's is installed here."""
    return shutil.which(command) is not None


def ask(
    command: str,
    *words: str,
    limit_s: float = _LIMIT_S,
    environment: dict[str, str] | None = None,
    umask: int = -1,
) -> Answer:
    """Runs a command of Slurm's.

    Args:
        command: its name, looked for in PATH.
        words: its arguments.
        limit_s: seconds after which it is ended.
        environment: all of it; None: this process's.
        umask: under which it runs, and what it starts; -1: this process's.
    """
    path = shutil.which(command)
    if path is None:
        return Answer(None, "", f"{command} is not installed here")
    try:
        done = subprocess.run(
            [path, *words], capture_output=True, text=True, errors="replace", check=False, timeout=limit_s, env=environment,
            stdin=subprocess.DEVNULL, umask=umask,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{command} did not answer in {limit_s:.0f} s")
    except OSError as error:
        return Answer(None, "", f"{command}: {error.strerror or error}")
    return Answer(done.returncode, done.stdout, done.stderr)


def fields_of(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show … -o`: `Name=value`; a value goes on to the next name."""
    found = re.findall(r"(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=(.*?)(?= [A-Za-z][A-Za-z0-9_/:]*=|$)", line.strip())
    return {name: value.strip() for name, value in found}


def submitting_environment() -> dict[str, str]:
    """This process's variables for sbatch, which keeps them for the job; without those of a step that it may be typed in."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }


@dataclass(frozen=True)
class NodeState:
    """A node as the controller has it.

    Attributes:
        name: of the node.
        state: `IDLE`, `MIXED+DRAIN`, `DOWN*`.
        reason: why an administrator or the controller has taken it out; empty: nobody has.
        address: NodeAddr.
    """

    name: str
    state: str
    reason: str = ""
    address: str = ""

    @property
    def usable(self) -> bool:
        """Whether new jobs are put on it, now or when it is free."""
        flags = set(re.split(r"[+]", self.state.strip("*~#!%$@^-").upper()))
        return not flags & {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "FUTURE", "UNKNOWN", "NOT_RESPONDING", "MAINT"} and "*" not in self.state  # fmt: skip

    @property
    def told(self) -> str:
        """Its state in words."""
        return f"{self.name} is {self.state}" + (f": {self.reason}" if self.reason else "")


def node_states(nodelist: str, *, limit_s: float = 5.0) -> list[NodeState]:
    """The nodes of a list as Slurm writes it; empty if the controller does not say in time."""
    answer = ask("scontrol", "show", "node", "-o", nodelist, limit_s=limit_s)
    found = []
    for line in answer.out.splitlines() if answer.ok else ():
        fields = fields_of(line)
        if "NodeName" in fields:
            reason = (
                "" if fields.get("Reason") in (None, "none", "(null)") else _STAMP.sub("", fields["Reason"])
            )
            found.append(
                NodeState(fields["NodeName"], fields.get("State", "?"), reason, fields.get("NodeAddr", ""))
            )
    return found
