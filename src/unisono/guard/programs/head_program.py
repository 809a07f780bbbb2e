"""A guarded program at the head, or on the only node: the meeting, the program on all nodes under
supervision, and its end.
"""

import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from unisono.base.causes import Verdict
from unisono.base.errors import Disagreed
from unisono.base.messages import Show, VerdictMessage, message_of, notify
from unisono.guard.agree.compare import compare_programs
from unisono.guard.control.connection import Left, NodeMessage
from unisono.guard.facts import Probes, all_variables, read_environment, read_machine, take_token
from unisono.guard.facts.nvidia import KernelLine, read_kernel_log
from unisono.guard.places.ranks import NodePlace
from unisono.guard.programs.local_program import LocalProgram, refuse_missing_program
from unisono.guard.programs.member_program import run_as_member
from unisono.guard.programs.program_end import (
    ProgramEnd,
    StopDeadline,
    exit_code_of_program,
    exit_code_of_verdict,
    for_program,
    may_be_port_taken,
    name_program_death,
)
from unisono.guard.programs.program_meeting import (
    describe_shape,
    find_shape,
    find_token,
    program_environment,
    remote_run,
)
from unisono.guard.programs.program_request import RunRequest, RunShape, refuse_launcher
from unisono.guard.programs.program_start import Diagnose, FolderWatch, ProgramDir, ProgramStart, run_dir
from unisono.guard.programs.program_supervisor import ProgramSupervisor
from unisono.guard.rendezvous.head_address import refusals_reported
from unisono.guard.rendezvous.meeting import Meeting
from unisono.guard.rendezvous.meeting_rules import end_message
from unisono.guard.rendezvous.meeting_sides import hold_meeting
from unisono.guard.rendezvous.party import Party
from unisono.guard.rendezvous.remote_fronts import SshFronts, start_others
from unisono.guard.rundir.lock import RunLock
from unisono.guard.rundir.records import RunResult
from unisono.guard.supervise.evidence import keep_evidence
from unisono.guard.supervise.interrupts import Interrupts, Stopped, exit_code_of
from unisono.guard.supervise.node_messages import Diagnosed, DiagnosisRequested, Start, decode_news, encode

PORT_TRIES = 3
"""Ports that a program gets one after the other, if a different process takes each before it
does.
"""
_DIAGNOSIS_S = 120.0


@dataclass
class HeadProgram:
    """The head's part of a start.

    Attributes:
        writes_nothing: whether the run's directory is lost.
    """

    start: ProgramStart
    writes_nothing: bool = False

    def alone(self) -> RunResult:
        """Runs the program on the only node."""
        nodes = [_place(0, self.start.machine.host, "127.0.0.1", self.start.shape.topology.nproc, "")]
        with self.start.local_program(None) as local:
            # Only now: a program that cannot be started leaves a directory that the next start may
            # use.
            self.start.write_plan(nodes)
            supervisor = self._supervised(local, nodes, None)
            return self._finish(supervisor, self._judged(supervisor, None), None)

    def together(self, party: Party) -> RunResult:
        """Runs the program together with the other nodes."""
        uneven = self.start.request.uneven

        def start(address: tuple[str, int]) -> SshFronts:
            return start_others(
                remote_run(self.start.request, self.start.run.root),
                party.topology,
                party.token,
                address,
                logs=self.start.run.log("", 0).parent,
                variables=self.start.environment.variables,
            )

        with hold_meeting(
            party,
            self.start.report,
            record=self.start.keep,
            tries_collective=False,
            compare=lambda reports: compare_programs(reports, uneven=uneven),
            start_others=start if party.topology.hosts else None,
        ) as meeting:
            reports = meeting.reports
            nodes = [_place(r.node_rank, r.host, r.address, r.nproc, r.nproc_origin) for r in reports]
            self.start.write_plan(nodes)
            number = 1
            while (result := self._try_port(nodes, meeting, is_last=number == PORT_TRIES)) is None:
                self.start.set_log_aside(number)
                number += 1
            return result

    def _try_port(self, nodes: Sequence[NodePlace], meeting: Meeting, *, is_last: bool) -> RunResult | None:
        """Runs the program on all nodes; None if its port was taken before it had done anything,
        and a different one may be tried.
        """
        host = meeting.server.address[0]
        with ReservedPort(host) as port:
            meeting.broadcast(encode(Start((host, port.number), self.start.run_id)))
            notify(self.start.show, f"{len(nodes)} nodes agree; starting the program on each")
            with self.start.local_program((host, port.number)) as local:
                supervisor = self._supervised(local, nodes, meeting, may_try_again=not is_last)
                verdict = self._judged(supervisor, meeting)
                tries = not is_last and supervisor.stop_signal is None and not self.writes_nothing
                if tries and may_be_port_taken(verdict, supervisor.framework) and port.is_taken():
                    text = (
                        f"port {port.number} on node 0, MASTER_PORT of the program, was taken by a different"
                        " process; trying a different port"
                    )
                    meeting.note(text, everywhere=True)
                    return None
                return self._finish(supervisor, verdict, meeting)

    def _supervised(
        self,
        local: LocalProgram,
        nodes: Sequence[NodePlace],
        meeting: Meeting | None,
        *,
        may_try_again: bool = False,
    ) -> ProgramSupervisor:
        """The supervisor, once the program has ended on every node."""
        watch = FolderWatch(
            self.start.run, self.start.lock, self.start.show, lambda: self.start.write_plan(nodes)
        )
        supervisor = self._supervisor(local, nodes, meeting)
        supervisor.each_poll, supervisor.may_try_again = watch.look, may_try_again
        try:
            supervisor.run()
        finally:
            watch.settle()
        self.writes_nothing = watch.is_lost
        return supervisor

    def _supervisor(
        self, local: LocalProgram, nodes: Sequence[NodePlace], meeting: Meeting | None
    ) -> ProgramSupervisor:
        restarts = self.start.shape.job.restarts
        return ProgramSupervisor(
            local,
            nodes,
            self.start.reports,
            meeting.server if meeting is not None else None,
            self.start.show,
            uneven=self.start.request.uneven,
            restarts=int(restarts.text) if restarts is not None and restarts.text.isdigit() else 0,
            store_host=meeting.server.address[0] if meeting is not None else "",
            join_timeout_s=self.start.request.join_timeout_s,
            stopping=StopDeadline(self.start.request.grace_s),
            idle_limit_s=self.start.request.idle_limit_s or None,
        )

    def _judged(self, supervisor: ProgramSupervisor, meeting: Meeting | None) -> Verdict | None:
        """The supervisor's verdict, else the cause in the program's output."""
        bad = supervisor.failure
        if supervisor.verdict is not None or bad is None or supervisor.stop_signal is not None:
            return supervisor.verdict
        verdict = supervisor.last_death or self._name(bad, meeting)
        return for_program(verdict, supervisor.framework) if verdict is not None else None

    def _finish(
        self, supervisor: ProgramSupervisor, verdict: Verdict | None, meeting: Meeting | None
    ) -> RunResult:
        """Shows the verdict, writes the result and sends it to the nodes."""
        bad, writes = supervisor.failure, not self.writes_nothing
        if verdict is not None and not supervisor.has_shown(verdict):
            self.start.show(message_of(VerdictMessage, verdict.to_json()))
        cites = verdict is supervisor.verdict and writes and (supervisor.raw or supervisor.looks)
        if verdict is not None and cites:
            cited = keep_evidence(
                self.start.run, verdict, table=Path(), raw=supervisor.raw, looks=supervisor.looks
            )
            verdict = verdict.model_copy(update={"evidence": (*verdict.evidence, *cited)})
        stopped = supervisor.stop_signal.name if supervisor.stop_signal is not None else ""
        code = (
            exit_code_of_verdict(verdict)
            if verdict is not None
            else exit_code_of_program(supervisor.programs.get(0, 0))
        )
        if verdict is None and code == 0 and bad is not None:
            code = exit_code_of_program(bad.returncode)
        if writes:
            self.start.write_agreement(supervisor.agreements)
        result = self.start.finish(code, verdict, stopped=stopped, writes=writes)
        if meeting is not None:
            outcome = {"outcome": result.outcome, "has_verdict": verdict is not None, "signal": stopped}
            meeting.end(end_message([verdict] if verdict is not None else [], exit_code=code, result=outcome))
        return result

    def _name(self, end: ProgramEnd, meeting: Meeting | None) -> Verdict | None:
        """The verdict on the program's end: from a signal, or from its output."""
        is_local = end.node_rank == 0
        kernel = _of_process(self.start.pid, self.start.began) if is_local and end.returncode < 0 else []
        return name_program_death(
            end, self.start.shape.command, diagnosed=self._diagnosed(end.node_rank, meeting), kernel=kernel
        )

    def _diagnosed(self, node_rank: int, meeting: Meeting | None) -> Verdict | None:
        """The cause in the program's output, read on that node."""
        if node_rank == 0 or meeting is None:
            return self.start.diagnose_output()
        meeting.server.send(node_rank, encode(DiagnosisRequested()))
        limit = time.monotonic() + _DIAGNOSIS_S
        while time.monotonic() < limit and node_rank in meeting.server.connected():
            for event in meeting.server.receive(0.2):
                if isinstance(event, Left) and event.node_rank == node_rank:
                    return None
                if (
                    isinstance(event, NodeMessage)
                    and event.node_rank == node_rank
                    and event.message.get("kind") == Diagnosed.kind
                ):
                    news = decode_news(event.message)
                    return news.verdict if isinstance(news, Diagnosed) else None
        return None


def _place(node_rank: int, host: str, address: str, nproc: int, origin: str) -> NodePlace:
    return NodePlace(node_rank=node_rank, host=host, address=address, nproc=nproc, nproc_origin=origin)


def _of_process(pid: int, began: float) -> list[KernelLine]:
    """Lines of the kernel's log about a process since `began`, in monotonic seconds; empty if the
    log may not be read.
    """
    age_s = time.monotonic() - began
    named = re.compile(rf"(\[{pid}\]|\bprocess {pid}\b)", re.IGNORECASE)
    lines = read_kernel_log() or []
    return [line for line in lines if (line.age_s or 0.0) <= age_s and named.search(line.text)]


# ---- the port of a program that binds MASTER_PORT by itself; our rendezvous binds its own


class ReservedPort:
    """A port that is bound here without listening, until the context ends.

    The program binds the port long after its start. Until then the kernel does not assign it to
    other processes, and only a server with SO_REUSEADDR that requests this very port can bind it,
    as torch's store does.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def is_taken(self) -> bool:
        """Whether a different process listens on it.

        Only once the program has ended: the port is no longer reserved afterwards.
        """
        try:
            self._socket.listen()
        except OSError:  # EADDRINUSE
            return True
        return False


@dataclass
class GuardedRun:
    """One run on this node.

    Attributes:
        show: gets notes, warnings, the verdict and the result.
        diagnose: finds the cause in the program's output.
    """

    request: RunRequest
    show: Show
    diagnose: Diagnose
    probes: Probes = field(default_factory=Probes)
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> RunResult:
        """Runs the program; gives its result.

        Raises:
            UnisonoError: if nothing was started because of this node.
        """
        refuse_launcher(self.request)
        token = take_token()
        environment = read_environment()
        machine = read_machine(self.probes.devices)
        variables = program_environment(self.request, all_variables())
        shape = find_shape(self.request, machine, environment, variables, self.probes.network)
        secret = find_token(self.request, shape.topology, environment, token)
        party = Party(
            topology=shape.topology,
            token=secret.secret if secret is not None else b"",
            host=machine.host,
            show=self.show,
            join_timeout_s=self.request.join_timeout_s,
            network=self.probes.network,
            command="unisono run",
        )
        with refusals_reported(party):
            run, lock = self._claim(shape, machine.host, variables)
        for text in (*describe_shape(shape), *shape.notes, f"log and result: {run.root}"):
            notify(self.show, text)
        start = ProgramStart(
            self.request,
            shape,
            run,
            lock,
            machine,
            environment,
            variables,
            show=self.show,
            diagnose=self.diagnose,
            probes=self.probes,
            run_id=secrets.token_hex(8),
            began=self._began,
        )
        with lock, Interrupts() as interrupts:
            try:
                return _run_program(start, party)
            except Stopped as stopped:
                interrupts.collect()
                code = exit_code_of(stopped.number)
                notify(self.show, f"{stopped.number.name} before the program was started")
                return start.finish(code, None, stopped=stopped.number.name, writes=True)
            except Disagreed as error:
                if error.verdict is None:
                    raise
                if not error.already_shown:
                    self.show(message_of(VerdictMessage, error.verdict.to_json()))
                return start.finish(error.exit_code, error.verdict, writes=True)

    def _claim(self, shape: RunShape, host: str, variables: Mapping[str, str]) -> tuple[ProgramDir, RunLock]:
        """The run's directory with its lock, if there is a program to start."""
        refuse_missing_program(self.request.words[0], variables.get("PATH"))
        topology = shape.topology
        return run_dir(
            self.request.output_dir,
            is_head=topology.is_head,
            host=host,
            port=topology.head_port if topology.nodes > 1 else 0,
        )


def _run_program(start: ProgramStart, party: Party) -> RunResult:
    """Runs the program on this node, alone, as the head, or as the head says."""
    if party.topology.nodes == 1:
        return HeadProgram(start).alone()
    if party.topology.is_head:
        return HeadProgram(start).together(party)
    return run_as_member(start, party)
