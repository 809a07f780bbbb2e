"""The end of a guarded program: signals passed on and their deadline, its exit code, a verdict if a
signal ended it, and fixes that apply to it.
"""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from unisono.base.causes import Evidence, Verdict, find_cause, remedy_for_foreign_program
from unisono.base.causes.signatures import match_line
from unisono.base.text import show_seconds
from unisono.guard.agree.reports import name_node
from unisono.guard.facts.nvidia import KernelLine
from unisono.guard.programs.launcher_facts import Command
from unisono.guard.supervise.interrupts import AGAIN_AFTER_S, install_handlers

_OF_SHELLS = 128
_OF_PYTHON = 256  # sys.exit(-9): Python launchers pass on the return code of subprocess
_HAND_ON = ("accelerate", "deepspeed", "llamafactory")
_MOST_KERNEL_LINES = 3
_FAULTS = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGABRT,
)
_HANDED_ON = (*_FAULTS, signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ)
"""Signals that an exit code may stand for. SIGINT is not among them: programs also exit with its
code by themselves.
"""
_SENDERS = {
    signal.SIGABRT: "the program sends it to itself with abort()",
    signal.SIGSYS: "the kernel sends it for a system call that a filter (seccomp) forbids",
    signal.SIGXCPU: "the kernel sends it at the CPU time limit (`ulimit -t`)",
    signal.SIGXFSZ: "the kernel sends it at the file size limit (`ulimit -f`)",
    signal.SIGPIPE: "the kernel sends it to a program whose output is no longer read",
}
_MORE_CERTAIN = frozenset({"host_oom_killed", "preempted_sigterm", "shm_too_small", "gpu_fell_off"})
"""Causes in the log that explain a kill from outside. The program had recovered from all others."""
_PLAIN = frozenset(
    {
        "port_in_use",
        "cuda_oom",
        "host_oom_killed",
        "disk_full",
        "missing_dependency",
        "gpu_fell_off",
        "ecc_error",
    }
)
"""Causes that an exception states explicitly."""


@dataclass(frozen=True)
class ProgramEnd:
    """The end of the program on one node.

    Attributes:
        returncode: of the program; negative: a signal.
        subreaper_lost: whether the program ended with its subreaper: then its own end is unknown.
        oom_killed: whether the kernel counted an OOM kill meanwhile; None: the count cannot be read
            there.
    """

    node_rank: int
    host: str
    returncode: int
    oom_killed: bool | None = None
    subreaper_lost: bool = False

    @property
    def where(self) -> str:
        """The node, for messages."""
        return name_node(self.node_rank, self.host)


def is_failure(returncode: int | None) -> bool:
    """Whether a program did not end well."""
    return returncode not in (None, 0)


def exit_code_of_program(returncode: int) -> int:
    """The exit code as in a shell: 128 + N after signal N."""
    return _OF_SHELLS - returncode if returncode < 0 else returncode


def exit_code_of_verdict(verdict: Verdict) -> int:
    """The catalogue's exit code; 3 if ranks were refused before their first step."""
    entry = find_cause(verdict.cause)
    if verdict.when == "before" and entry is not None and entry.exit_code == 4:
        return 3
    return entry.exit_code if entry is not None else 5


def signal_of(returncode: int, command: Command) -> signal.Signals | None:
    """The signal that ended the program or a child that it waited for; None if it exited by
    itself.

    A Python script does not turn its child's signal into 128 + N by itself, so such a code is its
    own. Shells and most other launchers do.

    Args:
        returncode: of the program; negative: a signal.
    """
    if returncode < 0:
        try:
            return signal.Signals(-returncode)
        except ValueError:
            return None  # a real-time signal, which has no name
    ways = [_OF_PYTHON - returncode] if command.kind in _HAND_ON else []
    ways += [returncode - _OF_SHELLS] if command.kind != "python" else []
    return next((number for number in _HANDED_ON if number in ways), None)


def name_program_death(
    end: ProgramEnd, command: Command, *, diagnosed: Verdict | None = None, kernel: Sequence[KernelLine] = ()
) -> Verdict | None:
    """The verdict on a program that a signal ended; if it exited by itself, the diagnosis of its
    log.

    Args:
        end: the first bad end of the program.
        kernel: lines of the kernel's log about the program's process.
    """
    number = signal_of(end.returncode, command)
    if number is None:
        return diagnosed
    by_kernel = number is signal.SIGKILL and bool(end.oom_killed)
    if diagnosed is not None and not by_kernel and _explains(diagnosed, number):
        return diagnosed
    direct = end.returncode < 0
    seen = f"killed by {number.name}" if direct else f"exit code {end.returncode}"
    evidence = [Evidence(where=end.where, text=f"{seen}: {_sender(number, end)}")]
    evidence += [
        Evidence(where=f"{end.where}, the kernel's log", text=line.text)
        for line in kernel[-_MOST_KERNEL_LINES:]
    ]
    if not direct:
        evidence.append(
            Evidence(
                where=end.where,
                text=(
                    f"a shell reports a process that signal N ended as {_OF_SHELLS} + N, a Python launcher as"
                    " 256 - N"
                ),
            )
        )
    cause = "host_oom_killed" if by_kernel else "rank_killed"
    what = "the OOM killer" if by_kernel else number.name
    who = "the program" if direct else "a process of the program"
    entry = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        hosts=(end.host,),
        evidence=tuple(evidence),
        fix=entry.remedy if entry else (),
        summary=f"{who} was killed by {what} on {end.where}",
        confidence=1.0 if direct else 0.9,
    )


def for_program(verdict: Verdict, framework: str) -> Verdict:
    """The verdict with fixes that apply to a guarded program.

    Args:
        verdict: as for a run of `train`.
        framework: that the program trains with; empty: unknown, or before its first step.
    """
    reworded = _by_its_words(verdict)
    way = framework if reworded.when != "before" else ""
    return reworded.model_copy(update={"fix": remedy_for_foreign_program(reworded.fix, way)})


def may_be_port_taken(verdict: Verdict | None, framework: str) -> bool:
    """Whether a program may have ended for its port before it has done anything.

    Args:
        framework: that the program trains with; known after its first step.
    """
    return verdict is not None and verdict.cause == "port_in_use" and not framework


def _by_its_words(verdict: Verdict) -> Verdict:
    """The verdict with the cause that the exception states explicitly, instead of an error in code
    or data.
    """
    if verdict.cause != "user_code_error" or not verdict.evidence:
        return verdict
    causes = [signature.cause for signature in match_line(verdict.evidence[0].text)]
    entry = next((find_cause(cause) for cause in causes if cause in _PLAIN), None)
    if entry is None:
        return verdict
    when = "during" if "during" in entry.when else "after"
    return verdict.model_copy(update={"cause": entry.id, "when": when, "fix": entry.remedy})


def _explains(diagnosed: Verdict, number: signal.Signals) -> bool:
    """Whether the diagnosis of the log explains this signal: a fault in native code follows its own
    messages, a kill from outside does not.
    """
    if diagnosed.cause in ("rank_died_first", "rank_killed"):
        return False
    return number in _FAULTS or diagnosed.cause in _MORE_CERTAIN


def _sender(number: signal.Signals, end: ProgramEnd) -> str:
    """The likely sender of the signal."""
    if end.subreaper_lost:
        return (
            "the kernel sent it, because the program's subreaper, a helper process of `unisono run`, was"
            " killed first"
        )
    if number is signal.SIGKILL and end.oom_killed:
        return "the kernel's count of OOM kills (oom_kill in the cgroup) grew meanwhile"
    if number is signal.SIGKILL and end.oom_killed is not None:
        return "no OOM kill was counted meanwhile, so a user, a scheduler or a different program sent it"
    if number in _SENDERS:
        return _SENDERS[number]
    if number in _FAULTS:
        return "the kernel sends it for a fault in the program's native code"
    return "the sender is unknown; it was not sent through this command"


GRACE_S = 40.0
"""Grace period of a program after a signal. torchrun gives its ranks 30 s."""
_AGAIN_S = 5.0

_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SignalQueue:
    """A context that records signals without acting on them.

    Attributes:
        first: the first signal to stop; None as long as there is none.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Self:
        self._before = install_handlers(_PASSED_ON, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # Only the last lines remain then, and an impatient signal must not change the exit
            # code.
            signal.signal(
                number, signal.SIG_IGN if self.first is not None and number in _STOP_SIGNALS else handler
            )
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """The file descriptor that is readable when a signal has come."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        received, self._received = self._received, []
        return received

    def _note(self, number: int, _frame: FrameType | None) -> None:
        one = signal.Signals(number)
        self._received.append(one)
        if self.first is None and one in _STOP_SIGNALS:
            self.first = one
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")


class StopDeadline:
    """The deadline for the program's end after a signal on any node. It has no clock.

    Attributes:
        end_by: when the program and its descendants are killed, by the clock of `take`; None: no
            signal yet.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Starts without a signal.

        Args:
            grace_s: how long the program has after the first signal.
        """
        self.end_by: float | None = None
        self.late = ""
        self._grace_s = grace_s
        self._times = 0
        self._last: dict[int, float] = {}

    def take(self, number: signal.Signals, node_rank: int, now: float) -> str | None:
        """Takes a signal; gives the message about it, None if it changes nothing.

        Schedulers signal every node and all its processes: as in supervise.interrupts, a second
        signal counts if it comes to the same node at least a second later.

        Args:
            number: the signal.
            node_rank: of the front that got it.
            now: seconds of any monotonic clock.
        """
        if number not in _STOP_SIGNALS or now - self._last.get(node_rank, -AGAIN_AFTER_S) < AGAIN_AFTER_S:
            return None
        is_new = not self._times or node_rank in self._last
        self._last[node_rank] = now
        if not is_new:
            return None
        self._times += 1
        allowed_s = (
            self._grace_s if self._times == 1 else min(self._grace_s, _AGAIN_S) if self._times == 2 else 0.0
        )
        by = now + allowed_s
        self.end_by = by if self.end_by is None else min(self.end_by, by)
        name, patience = "Ctrl-C" if number is signal.SIGINT else number.name, show_seconds(allowed_s)
        self.late = f"the program has not ended {patience} after {name}: killing it and its child processes"
        if self._times == 1:
            again = show_seconds(min(self._grace_s, _AGAIN_S))
            return (
                f"{name} was passed on to the program, which has {patience} (--grace) to end before it is"
                f" killed with its child processes ({name} again: after {again})"
            )
        return (
            f"{name} again: the program and its child processes are killed after {patience}"
            if allowed_s
            else None
        )
