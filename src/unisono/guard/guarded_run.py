"""One start of `unisono run`: the request, agreement with the other nodes, the supervised program, and how it ended."""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.compare import compare_programs
from unisono.agree.reports import NodeReport
from unisono.causes import Verdict
from unisono.control.events import Left, NodeMessage
from unisono.errors import Disagreed
from unisono.events import Message, Show, say
from unisono.facts import Environment, Machine, Probes, read_environment, read_machine, take_token
from unisono.facts.environment import all_variables
from unisono.facts.nvidia import KernelLine, read_kernel_log
from unisono.files import write_json
from unisono.guard.border_directory import FolderWatch, border, is_head_directory, outcome_of, run_dir
from unisono.guard.command import read_command
from unisono.guard.local_program import LocalProgram, Program, refuse_missing_program
from unisono.guard.member_program import MemberProgram, NewStart
from unisono.guard.program_end import (
    ProgramEnd,
    exit_code_of_program,
    exit_code_of_verdict,
    for_program,
    name_program_death,
)
from unisono.guard.program_meeting import find_shape, find_token, make_report, program_environment, remote_run
from unisono.guard.program_port import PORT_TRIES, ReservedPort, may_be_taken
from unisono.guard.program_ranks import ProgramDir, ProgramRanks
from unisono.guard.program_request import RunRequest, RunShape, build_environment, refuse_launcher
from unisono.guard.program_signals import SignalQueue, StopDeadline
from unisono.guard.program_supervisor import ProgramSupervisor
from unisono.integrations.border import Guard
from unisono.launch.run_records import writing_for_head
from unisono.plan import NodePlace
from unisono.plan.placement import usable_accelerators
from unisono.plan.topology import Accelerators
from unisono.rendezvous.head_address import refusals_reported
from unisono.rendezvous.head_side import hold_meeting
from unisono.rendezvous.meeting import Meeting
from unisono.rendezvous.meeting_rules import end_message
from unisono.rendezvous.member_side import Attendance, attend_meeting
from unisono.rendezvous.party import ChannelFacts, MakeReport, Party
from unisono.rendezvous.remote_fronts import SshFronts, start_others
from unisono.rundir.lock import RunLock, recorded_holder
from unisono.rundir.records import RunResult, set_verdict, write_result
from unisono.supervise.evidence import keep_evidence
from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of

Diagnose = Callable[[Path], Verdict | None]
"""Finds the cause in a log; None if it finds none."""

_DIAGNOSIS_S = 120.0
_ALL_DEVICES = ("llamafactory", "accelerate", "deepspeed")


@dataclass
class GuardedRun:
    """One start of `unisono run` on this node.

    Attributes:
        request: the command's options.
        show: gets notes, warnings, the verdict and the result.
        diagnose: finds the cause in the program's output.
        probes: of this machine.
    """

    request: RunRequest
    show: Show
    diagnose: Diagnose
    probes: Probes = field(default_factory=Probes)
    began: float = field(default_factory=time.monotonic)
    reports: Sequence[NodeReport] = ()
    agreement: Agreement = field(default_factory=Agreement)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self) -> dict[str, Any]:
        """Runs the program; gives the object of result.json.

        Raises:
            UnisonoError: if nothing was started because of this node.
        """
        refuse_launcher(self.request)
        token = take_token()
        environment = read_environment()
        machine = read_machine(self.probes.devices)
        variables = program_environment(self.request, all_variables())
        shape = self._shape(machine, environment, variables)
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
            refuse_missing_program(self.request.words[0], variables.get("PATH"))
            run, lock = run_dir(
                self.request.output_dir,
                is_head=shape.topology.is_head,
                host=machine.host,
                port=shape.topology.head_port if shape.topology.nodes > 1 else 0,
            )
        for text in (*_describe(shape), *shape.notes, f"log and result: {run.root}"):
            say(self.show, text)
        start = _ProgramStart(self, shape, run, lock, machine, environment, variables)
        with lock, Interrupts() as interrupts:
            try:
                if shape.topology.nodes == 1:
                    return start.alone()
                return start.together(party)
            except Stopped as stopped:
                interrupts.collect()
                code = exit_code_of(stopped.number)
                say(self.show, f"{stopped.number.name} before the program was started")
                return self.finish(run, code, None, stopped=stopped.number.name, writes=True)
            except Disagreed as error:
                if error.verdict is None:
                    raise
                if not error.said:
                    self.show({"kind": "verdict", "time": time.time(), **error.verdict.to_json()})
                return self.finish(run, error.exit_code, error.verdict, writes=True)

    def _shape(self, machine: Machine, environment: Environment, variables: Mapping[str, str]) -> RunShape:
        command = read_command(self.request.words)
        visible = self.request.devices if self.request.devices is not None else environment.visible_devices
        accelerators = usable_accelerators(machine, wish="auto", visible=visible)
        automatic = command.kind in _ALL_DEVICES or any(
            one.text in ("gpu", "auto") for one in (command.option("nproc_per_node"),) if one
        )
        return find_shape(
            self.request,
            command,
            environment,
            variables,
            accelerators if automatic else Accelerators(0),
            self.probes.network,
        )

    def finish(
        self, run: ProgramDir, exit_code: int, verdict: Verdict | None, *, stopped: str = "", writes: bool
    ) -> dict[str, Any]:
        """Writes and shows the result."""
        result = RunResult(
            run_id=self.run_id,
            outcome=outcome_of(exit_code, verdict, stopped=stopped),
            exit_code=exit_code,
            output_dir=str(run.root),
            verdict=verdict.to_json() if verdict else None,
            wall_time_s=time.monotonic() - self.began,
        )
        if writes:
            with contextlib.suppress(OSError):  # a full disk is in the verdict, if it is the cause
                set_verdict(run, verdict)
                write_result(run, result)
        self.show({"kind": "result", "time": time.time(), **result.to_json()})
        return result.to_json()

    def keep(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        """Keeps the nodes' reports and their comparison, for agreement.json."""
        self.reports, self.agreement = reports, agreement


@dataclass
class _ProgramStart:
    guarded: GuardedRun
    shape: RunShape
    run: ProgramDir
    lock: RunLock
    machine: Machine
    environment: Environment
    variables: Mapping[str, str]
    pid: int = 0  # of the program, once started
    writes_nothing: bool = False  # the directory is lost

    def alone(self) -> dict[str, Any]:
        """Runs the program on the only node."""
        nodes = [self._place(0, self.machine.host, "127.0.0.1", self.shape.topology.nproc, "")]
        with self._local_program(None) as local:
            # Only now: a program that cannot be started leaves a directory that the next start may use.
            self._write_plan(nodes)
            supervisor = self._supervised(local, nodes, None)
            return self._finish_as_head(supervisor, self._judged(supervisor, None), None)

    def together(self, party: Party) -> dict[str, Any]:
        """Runs the program together with the other nodes."""
        if party.topology.is_head:
            return self._as_head(party)
        return self._as_member(party)

    def _as_head(self, party: Party) -> dict[str, Any]:
        uneven = self.guarded.request.uneven

        def start(address: tuple[str, int]) -> SshFronts:
            return start_others(
                remote_run(self.guarded.request, self.run.root),
                party.topology,
                party.token,
                address,
                logs=self.run.log("", 0).parent,
                variables=self.environment.variables,
            )

        with hold_meeting(
            party,
            self._maker(),
            record=self._keep,
            tries_collective=False,
            compare=lambda reports: compare_programs(reports, uneven=uneven),
            start_others=start if party.topology.hosts else None,
        ) as meeting:
            reports = meeting.reports
            nodes = [self._place(r.node_rank, r.host, r.address, r.nproc, r.nproc_origin) for r in reports]
            self._write_plan(nodes)
            number = 1
            while (result := self._try_port(nodes, meeting, is_last=number == PORT_TRIES)) is None:
                self._set_log_aside(number)
                number += 1
            return result

    def _try_port(
        self, nodes: Sequence[NodePlace], meeting: Meeting, *, is_last: bool
    ) -> dict[str, Any] | None:
        """Runs the program on all nodes; None if its port was taken before it had done anything, and a different one may be tried."""
        host = meeting.server.address[0]
        with ReservedPort(host) as port:
            meeting.broadcast({"kind": "start", "store": [host, port.number], "run_id": self.guarded.run_id})
            say(self.guarded.show, f"{len(nodes)} nodes agree; starting the program on each")
            with self._local_program((host, port.number)) as local:
                supervisor = self._supervised(local, nodes, meeting, may_try_again=not is_last)
                verdict = self._judged(supervisor, meeting)
                tries = not is_last and supervisor.stop_signal is None and not self.writes_nothing
                if tries and may_be_taken(verdict, supervisor.framework) and port.is_taken():
                    text = f"port {port.number} on node 0, MASTER_PORT of the program, was taken by a different process; trying a different port"
                    meeting.note(text, everywhere=True)
                    return None
                return self._finish_as_head(supervisor, verdict, meeting)

    def _as_member(self, party: Party) -> dict[str, Any]:
        with attend_meeting(party, self._maker(), tries_collective=False) as attendance:
            found, number = self._one_start(attendance, attendance.wait_for("start")), 1
            while isinstance(found, NewStart):
                self._set_log_aside(number)
                found, number = self._one_start(attendance, found.message), number + 1
            return found

    def _one_start(self, attendance: Attendance, message: Message) -> dict[str, Any] | NewStart:
        """Runs the program as the head says: its result, or the head's next start."""
        self.guarded.run_id = str(message["run_id"])
        shared = is_head_directory(self.run, self.guarded.run_id)
        heads = recorded_holder(self.run.lock) if shared else None
        store = (str(message["store"][0]), int(message["store"][1]))
        with self._local_program(store) as local:
            log = self.run.log(self.machine.host, 0)
            member = MemberProgram(
                attendance,
                local,
                self.shape.topology.node_rank,
                self.guarded.show,
                lambda: self.guarded.diagnose(log),
            )
            member.run()
            if member.new_start is not None:
                return member.new_start
            own = local.program.returncode if local.program is not None else None
            code = member.exit_code(own)
            with contextlib.ExitStack() as stack:
                writes = not shared
                if shared and member.loss is not None:
                    writes = stack.enter_context(writing_for_head(self.run.lock, heads, member.loss))
                return self.guarded.finish(
                    self.run, code, member.verdict, stopped=member.stopped, writes=writes
                )

    def _set_log_aside(self, number: int) -> None:
        """The next start of the program gets a log of its own, so that this one's errors are not found there."""
        log = self.run.log(self.machine.host, 0)
        with contextlib.suppress(OSError):
            log.rename(f"{log}.{number}")

    def _maker(self) -> MakeReport:
        def make(standing: ChannelFacts, show: Show) -> NodeReport:
            return make_report(
                self.guarded.request,
                self.shape,
                standing,
                machine=self.machine,
                environment=self.environment,
                probes=self.guarded.probes,
                output_dir=self.run.root,
                show=show,
            )

        return make

    @contextlib.contextmanager
    def _local_program(self, store: tuple[str, int] | None) -> Iterator[LocalProgram]:
        """The started program with its border; nothing of it remains afterwards."""
        request, topology = self.guarded.request, self.shape.topology
        with border() as folder, SignalQueue() as signals:
            guard = Guard(
                folder,
                self.guarded.run_id,
                os.getpid(),
                topology.node_rank,
                topology.nodes,
                self.machine.host,
                store="" if store is None else f"{store[0]}:{store[1]}",
                uneven=request.uneven,
                options={
                    "debug_comm": request.debug_comm,
                    "json": request.json,
                    "join_timeout_s": request.join_timeout_s,
                },
            )
            found = build_environment(
                request, self.shape, self.variables, guard_file=guard.write(), store=store
            )
            for note in found.notes:
                say(self.guarded.show, note)
            log = self.run.log(self.machine.host, 0)
            with Program(
                request.words,
                environment=found.environment,
                log=log,
                folder=folder,
                stdout_is_ours=request.json,
                has_stdin=not request.from_stdin,
            ) as program:
                self.pid = program.pid
                ranks = ProgramRanks(
                    folder, self.run, topology.node_rank, self.machine.host, program.subreaper_pid
                )
                local = LocalProgram(program, ranks, folder, self.run, signals)
                try:
                    yield local
                finally:
                    local.close()

    def _supervised(
        self,
        local: LocalProgram,
        nodes: Sequence[NodePlace],
        meeting: Meeting | None,
        *,
        may_try_again: bool = False,
    ) -> ProgramSupervisor:
        """The supervisor, once the program has ended on every node."""
        watch = FolderWatch(self.run, self.lock, self.guarded.show, lambda: self._write_plan(nodes))
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
        restarts = self.shape.job.restarts
        return ProgramSupervisor(
            local,
            nodes,
            self.guarded.reports,
            meeting.server if meeting is not None else None,
            self.guarded.show,
            uneven=self.guarded.request.uneven,
            restarts=int(restarts.text) if restarts is not None and restarts.text.isdigit() else 0,
            store_host=meeting.server.address[0] if meeting is not None else "",
            join_timeout_s=self.guarded.request.join_timeout_s,
            stopping=StopDeadline(self.guarded.request.grace_s),
        )

    def _judged(self, supervisor: ProgramSupervisor, meeting: Meeting | None) -> Verdict | None:
        """The supervisor's verdict, else the cause in the program's output."""
        bad = supervisor.gone_wrong
        if supervisor.verdict is not None or bad is None or supervisor.stop_signal is not None:
            return supervisor.verdict
        verdict = supervisor.last_death or self._name(bad, meeting)
        return for_program(verdict, supervisor.framework) if verdict is not None else None

    def _finish_as_head(
        self, supervisor: ProgramSupervisor, verdict: Verdict | None, meeting: Meeting | None
    ) -> dict[str, Any]:
        """Shows the verdict, writes the result and sends it to the nodes."""
        bad, writes = supervisor.gone_wrong, not self.writes_nothing
        if verdict is not None and not supervisor.has_shown(verdict):
            self.guarded.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
        cites = verdict is supervisor.verdict and writes and (supervisor.raw or supervisor.looks)
        if verdict is not None and cites:
            cited = keep_evidence(self.run, verdict, table=Path(), raw=supervisor.raw, looks=supervisor.looks)
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
            self._write_agreement(supervisor.agreements)
        result = self.guarded.finish(self.run, code, verdict, stopped=stopped, writes=writes)
        if meeting is not None:
            word = end_message([verdict] if verdict is not None else [], exit_code=code)
            meeting.end(
                {
                    **word,
                    "result": {
                        "outcome": result["outcome"],
                        "has_verdict": verdict is not None,
                        "signal": stopped,
                    },
                }
            )
        return result

    def _name(self, end: ProgramEnd, meeting: Meeting | None) -> Verdict | None:
        """The verdict on the program's end: from a signal, or from its output."""
        is_local = end.node_rank == 0
        kernel = _of_process(self.pid, self.guarded.began) if is_local and end.returncode < 0 else []
        return name_program_death(
            end, self.shape.command, diagnosed=self._diagnosed(end.node_rank, meeting), kernel=kernel
        )

    def _diagnosed(self, node_rank: int, meeting: Meeting | None) -> Verdict | None:
        """The cause in the program's output, read on that node."""
        if node_rank == 0 or meeting is None:
            say(self.guarded.show, "reading what the program printed")
            return self.guarded.diagnose(self.run.log(self.machine.host, 0))
        meeting.server.send(node_rank, {"kind": "diagnose"})
        limit = time.monotonic() + _DIAGNOSIS_S
        while time.monotonic() < limit and node_rank in meeting.server.here():
            for event in meeting.server.receive(0.2):
                if isinstance(event, Left) and event.node_rank == node_rank:
                    return None
                if (
                    isinstance(event, NodeMessage)
                    and event.node_rank == node_rank
                    and event.message.get("kind") == "diagnosed"
                ):
                    value = event.message.get("verdict")
                    return Verdict.from_json(value) if value else None
        return None

    def _keep(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        self.guarded.keep(reports, agreement)
        self._write_agreement(Agreement())

    def _write_agreement(self, more: Agreement) -> None:
        body = {
            "schema": 1,
            "nodes": [report.to_json() for report in self.guarded.reports],
            **self.guarded.agreement.merged(more).to_json(),
        }
        with contextlib.suppress(OSError):
            write_json(self.run.agreement, body, mode=0o600)

    def _write_plan(self, nodes: Sequence[NodePlace]) -> None:
        """Writes what is about to be started, for later readers of the directory."""
        body = {
            "schema": 1,
            "run_id": self.guarded.run_id,
            "command": list(self.guarded.request.words),
            "kind": self.shape.command.kind,
            "nodes": [node.model_dump(mode="json") for node in nodes],
            "origins": self.shape.topology.origins,
        }
        with contextlib.suppress(OSError):
            write_json(self.run.plan, body, mode=0o600)

    @staticmethod
    def _place(node_rank: int, host: str, address: str, nproc: int, origin: str) -> NodePlace:
        return NodePlace(node_rank=node_rank, host=host, address=address, nproc=nproc, nproc_origin=origin)


def _of_process(pid: int, began: float) -> list[KernelLine]:
    """Lines of the kernel's log about a process since `began`, in monotonic seconds; empty if the log may not be read."""
    age_s = time.monotonic() - began
    named = re.compile(rf"(\[{pid}\]|\bprocess {pid}\b)", re.IGNORECASE)
    lines = read_kernel_log() or []
    return [line for line in lines if (line.age_s or 0.0) <= age_s and named.search(line.text)]


def _describe(shape: RunShape) -> list[str]:
    """How the command line was read; empty for one node."""
    topology = shape.topology
    if topology.nodes == 1:
        return []
    origins = topology.origins
    return [
        f"{topology.nodes} nodes ({origins.get('nodes', '?')}), this is node {topology.node_rank} ({origins.get('node_rank', '--hosts' if topology.hosts else '?')}), "
        f"head {topology.head_host}{f':{topology.head_port}' if topology.head_port else ''} ({origins.get('head', '?')}), "
        f"{topology.nproc} rank{'' if topology.nproc == 1 else 's'} here ({topology.nproc_origin})"
    ]
