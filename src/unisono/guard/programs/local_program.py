"""This node's part of a guarded program: the program, its ranks, and the facts of its processes for
agreements.

The head treats its own node like the others: news are the messages that a node sends, and requests
are those that it sends to nodes.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from unisono.base.errors import UsageError
from unisono.base.files import open_plain
from unisono.base.messages import Message
from unisono.base.text import one_line
from unisono.guard.facts.processes import processes_below, variables_of
from unisono.guard.integrations import border
from unisono.guard.integrations.border import VARIABLE
from unisono.guard.programs.program_end import SignalQueue
from unisono.guard.programs.program_ranks import ProgramRanks
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.node_messages import (
    End,
    FactsAnswered,
    FactsReported,
    HeadRequest,
    NodeNews,
    ProgramEnded,
    RankSaid,
    SignalReceived,
    Stop,
    TimelineLines,
)
from unisono.guard.supervise.timeline import Timeline

_SUBREAPER = Path(__file__).with_name("subreaper.py")
_STARTING_S = 60.0  # for a small process on a loaded machine
_CLOSING_S = 25.0  # more than the subreaper needs
_SIGKILL = -int(signal.SIGKILL)


class Program:
    """The program and its subreaper. As a context manager it leaves nothing behind.

    Attributes:
        returncode: None until it has ended and all its output has been passed on; negative: the
            signal that ended it.
        program_exit: the return code of the program itself, as soon as it has ended; its
            descendants may still run.
        is_subreaper_lost: whether the subreaper ended first, e.g. by SIGKILL; the kernel then ends
            the program too.
        left: how many processes outlived the program, and were ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None,
        owns_stdout: bool = False,
        has_stdin: bool = True,
    ) -> None:
        """Starts the program.

        Args:
            environment: all of it.
            log: gets the program's output, as the front's own streams do.
            folder: of the border; the subreaper removes it at the end.
            owns_stdout: with `--json`: the program's stdout goes to stderr.
            has_stdin: whether the program inherits our stdin; otherwise its stdin is empty.

        Raises:
            UsageError: if the program does not exist or cannot be started.
        """
        self.pid = 0
        self.returncode: int | None = None
        self.program_exit: int | None = None
        self.is_subreaper_lost = False
        self._mark = environment.get(VARIABLE, "")
        self.left = 0
        self._rest = b""
        self._failed = ""
        self._signals: list[int] = []
        settings = {
            "command": list(command),
            "environment": dict(environment),
            "log": str(log),
            "folder": str(folder or ""),
            "json": owns_stdout,
        }
        self._subreaper, self._report = _start(settings, environment, has_stdin=has_stdin)
        limit = time.monotonic() + _STARTING_S
        while not (self.pid or self._failed) and time.monotonic() < limit:
            self.poll(0.2)
        if not self.pid:
            self.close()
            raise _cannot_start(
                f"{one_line(command[0], limit=200)} cannot be started:"
                f" {self._failed or 'its subreaper does not answer'}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def subreaper_pid(self) -> int:
        """The process whose descendants are the program and its processes."""
        return self._subreaper.pid

    def fileno(self) -> int:
        """The file descriptor that is readable when `poll` has news."""
        return self._report

    def poll(self, timeout_s: float) -> int | None:
        """Reads the subreaper's lines, after waiting for the first; gives the return code once the
        program has ended.
        """
        if self.returncode is None and select.select([self._report], [], [], timeout_s)[0]:
            data = os.read(self._report, 1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take_line(line.decode("utf-8", "replace"))
            # The subreaper was killed, and the program with it.
            if not data and self.returncode is None:
                self.returncode, self.is_subreaper_lost = _SIGKILL, True
        return self.returncode

    def signal(self, number: signal.Signals) -> None:
        """Sends the program a signal, like a terminal or `kill`."""
        self._write_line(f"signal {int(number)}")

    def end_leftovers(self) -> None:
        """Ends processes that outlived the program, through the subreaper or in its place."""
        if self.is_subreaper_lost:
            self._end_marked()
        else:
            self._write_line("seen")

    def end(self) -> None:
        """Ends the program and its descendants at once; `poll` gives the return code then."""
        self._write_line("end")

    def close(self) -> None:
        """Like `end`, and waits until nothing is left, in bounded time."""
        if self._subreaper.stdin is not None:
            with contextlib.suppress(OSError):
                self._subreaper.stdin.close()
        try:
            self._subreaper.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            # A process that waits in the kernel ends as soon as its storage answers.
            self._subreaper.kill()
        if self.is_subreaper_lost:
            self._end_marked()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def _end_marked(self) -> None:
        """In place of a lost subreaper: ends all processes that the program has started.

        Nobody adopts these; the variable of the border is in their environments.
        """
        limit = time.monotonic() + _CLOSING_S
        while self._mark and time.monotonic() < limit:
            below = [
                pid
                for pid, _ in processes_below(1)
                if variables_of(pid, [VARIABLE]).get(VARIABLE) == self._mark
            ]
            if not below:
                break
            for pid in below:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _take_line(self, line: str) -> None:
        word, _, argument = line.partition(" ")
        match word:
            case "started":
                self.pid = int(argument)
            case "gone":
                self.program_exit = int(argument)
            case "left":
                self.left = int(argument)
            case "ended":
                self.returncode = int(argument)
            case "failed":
                self._failed = argument.partition(" ")[2]
                self.returncode = 127
            case _:
                pass

    def _write_line(self, line: str) -> None:
        assert self._subreaper.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._subreaper.stdin.write(line.encode() + b"\n")
            self._subreaper.stdin.flush()


def refuse_missing_program(word: str, path: str | None) -> None:
    """Refuses a program that does not exist or cannot be started, before anything is made.

    Args:
        word: the first of the command line.

    Raises:
        UsageError: if there is no such program.
    """
    program = shutil.which(word, path=path)
    if program is None:
        file, name = Path(word), one_line(word, limit=200)
        if os.sep not in word or not file.exists():
            raise _cannot_start(f"program not found: {name}")
        if file.is_dir():
            raise _cannot_start(f"{name} is a directory, not a program")
        raise _cannot_start(
            f"{name} is not executable",
            f"chmod +x {name}, or start it with its interpreter: unisono run -- python {name}",
        )
    first = _first_line(Path(program))
    interpreter = first[2:].split()[:1] if first.startswith(b"#!") else []
    if interpreter and not Path(os.fsdecode(interpreter[0])).exists():
        named = one_line(os.fsdecode(interpreter[0]), limit=200)
        raise _cannot_start(
            f"{one_line(program, limit=200)} cannot be started: its first line names the interpreter {named},"
            " which does not exist",
            "fix that line, or start it with an interpreter that exists: unisono run -- python SCRIPT",
        )


def _first_line(path: Path) -> bytes:
    try:
        with open_plain(path) as file:
            return file.readline(512)
    except OSError:  # a program need not be readable
        return b""


def _cannot_start(
    what: str, fix: str = "pass the program as you would type it: unisono run -- torchrun train.py"
) -> UsageError:
    return UsageError.of(what, where="the words after --", fix=fix)


def _start(
    settings: dict[str, object], environment: Mapping[str, str], *, has_stdin: bool
) -> tuple["subprocess.Popen[bytes]", int]:
    """The subreaper, and the read end of the pipe on which it reports."""
    read_end, write_end = os.pipe()
    # Not in a file: an environment may hold secrets.
    settings_fd = os.memfd_create("unisono-run", os.MFD_CLOEXEC)
    stdin = os.dup(0) if has_stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.write(settings_fd, json.dumps({**settings, "report": write_end, "stdin": stdin}).encode())
        os.lseek(settings_fd, 0, os.SEEK_SET)
        subreaper = subprocess.Popen(
            [sys.executable, "-I", str(_SUBREAPER), str(settings_fd)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            pass_fds=(settings_fd, write_end, stdin),
            start_new_session=True,
        )
    except BaseException:  # raised again
        os.close(read_end)
        raise
    finally:
        for fd in (settings_fd, write_end, stdin):
            os.close(fd)
    return subreaper, read_end


JOB_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop the program on all nodes. Others, e.g. SIGUSR1, go to the program on one
node.
"""


@dataclass
class LocalProgram:
    """The program on this node, with its ranks and signals.

    Attributes:
        program: None if it was started by hand, and only its launchers are compared.
        folder: of the border.
        run: the run's directory; None: nothing is written.
        signals: that the front got.
        sends_time: whether the head needs a copy of this node's timeline.
    """

    program: Program | None
    ranks: ProgramRanks
    folder: Path
    run: RunDir | None
    signals: SignalQueue
    sends_time: bool = False
    _end_reported: bool = False
    _is_orphaned: bool = False
    _facts: dict[str, border.ReportedFacts] = field(default_factory=dict)
    _events: dict[int, IO[str]] = field(default_factory=dict)
    _timeline: Timeline | None = None

    def new_messages(self, timeout_s: float, *, also: Sequence[int] = ()) -> list[NodeNews]:
        """News of this node, after waiting for the first, or for one of `also` to become
        readable.
        """
        fds = [self.program.fileno()] if self.program is not None and self.program.returncode is None else []
        select.select([*fds, *self.ranks.fds(), self.signals.fileno(), *also], [], [], timeout_s)
        messages: list[NodeNews] = [*self._passed_on(), *self._orphaned()]
        messages += self.ranks.new_messages()
        if self._timeline is None and self.run is not None and self.ranks.beats:
            self._start_timeline(self.run)
        for message in messages:
            if isinstance(message, RankSaid):
                self._keep(message.rank, message.message)
        messages += [FactsReported(_key_of(one), one) for one in self._new_facts()]
        messages += self._time_news()
        if self.program is not None and not self._end_reported and self.program.poll(0) is not None:
            messages += self.ranks.new_messages(at_once=True)
            if self._timeline is not None:
                self._timeline.close()
            messages += self._time_news()
            returncode = self.program.returncode
            assert returncode is not None
            lost = self.program.is_subreaper_lost
            messages.append(ProgramEnded(returncode, self.program.left, self.ranks.oom_killed, lost))
            self._end_reported = True
        return messages

    def _start_timeline(self, run: RunDir) -> Timeline:
        node_rank = self.ranks.node_rank
        self._timeline = Timeline(run, node_rank, lambda: self.ranks.beats, is_sent=self.sends_time)
        return self._timeline.start()

    def _time_news(self) -> list[TimelineLines]:
        news = self._timeline.take_news() if self._timeline is not None else None
        return [] if news is None else [news]

    def keep_time(self, node_rank: int, news: TimelineLines, ranks: Collection[int]) -> None:
        """Keeps where the time of another node's ranks went."""
        if self.run is not None:
            (self._timeline or self._start_timeline(self.run)).take(node_rank, news, ranks)

    def mark_time(self, ranks: Sequence[int], text: str, cause: str) -> None:
        """Writes a suspicion to the timeline; an empty text ends it."""
        if self._timeline is not None:
            self._timeline.warn(ranks, text, cause)

    def handle(self, request: HeadRequest) -> None:
        """Carries out a request of the head."""
        match request:
            case FactsAnswered():
                facts = self._facts.pop(request.key, None)
                if facts is not None:
                    border.answer_facts(self.folder, facts, request.answer)
            case Stop() if self.program is not None:
                self.program.signal(signal.Signals[request.signal])
            case End() if self.program is not None:
                self.program.end()
            case _:
                pass

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended, and that has been reported."""
        return self._end_reported or self.program is None

    def close(self) -> None:
        """Ends remaining processes, and closes files."""
        if self.program is not None:
            self.program.close()
        if self._timeline is not None:
            self._timeline.close()
        self.ranks.close()
        for file in self._events.values():
            with contextlib.suppress(OSError):
                file.close()

    def _orphaned(self) -> list[NodeNews]:
        """Ends of ranks before the program's own end.

        Later ones mean nothing: the subreaper ends remaining processes.
        """
        if self.program is None or self._is_orphaned:
            return []
        self.program.poll(0)
        if self.program.program_exit is None and not self.program.is_subreaper_lost:
            return []
        messages = self.ranks.new_messages(at_once=True)
        self._is_orphaned = self.ranks.is_orphaned = True
        self.program.end_leftovers()
        return messages

    def _passed_on(self) -> list[SignalReceived]:
        """Passes the front's signals on to the program."""
        messages = []
        for number in self.signals.take():
            if self.program is not None:
                self.program.signal(number)
            messages.append(SignalReceived(number.name))
        return messages

    def _new_facts(self) -> list[border.ReportedFacts]:
        facts = []
        for one in border.reported_facts(self.folder):
            if self._facts.get(_key_of(one)) != one:
                self._facts[_key_of(one)] = one
                facts.append(one)
        return facts

    def _keep(self, rank: int, message: Message) -> None:
        """Writes a line to the rank's file of events, if the disk allows."""
        if self.run is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if rank not in self._events:
                path = self.run.events(rank)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._events[rank] = path.open("a", encoding="utf-8")
            self._events[rank].write(json.dumps({"time": time.time(), **message}, ensure_ascii=False) + "\n")
            self._events[rank].flush()


def _key_of(facts: border.ReportedFacts) -> str:
    return f"{facts.pid}-{facts.name}"
