"""`unisono run`, whole: what is asked, agreement with the other nodes, the program under watch, and how it ended."""

import contextlib
import os
import re
import secrets
import socket
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
from unisono.events import Show, say
from unisono.facts import Environment, Machine, Probes, read_environment, read_machine, take_token
from unisono.facts.environment import all_variables
from unisono.facts.nvidia import KernelLine, read_kernel_log
from unisono.files import write_json
from unisono.guard.border_directory import FolderWatch, border, is_heads, outcome_of, run_dir
from unisono.guard.command import read_command
from unisono.guard.local_program import LocalProgram, Program, refuse_missing
from unisono.guard.member_program import MemberProgram
from unisono.guard.program_end import (
    ProgramEnd,
    exit_code_of_program,
    exit_code_of_verdict,
    for_program,
    name_program_death,
)
from unisono.guard.program_meeting import find_shape, find_token, make_report, remote_run, with_our_programs
from unisono.guard.program_ranks import ProgramDir, ProgramRanks
from unisono.guard.program_request import RunRequest, RunShape, refuse_launcher, surroundings_of
from unisono.guard.program_signals import Signals, Stopping
from unisono.guard.program_supervisor import ProgramSupervisor
from unisono.integrations.border import Guard
from unisono.launch.run_records import writing_for_head
from unisono.plan import NodePlace
from unisono.plan.placement import usable_accelerators
from unisono.plan.topology import Accelerators
from unisono.rendezvous.head_address import refusals_reported
from unisono.rendezvous.head_side import hold_meeting
from unisono.rendezvous.meeting import Meeting
from unisono.rendezvous.meeting_end import end_message
from unisono.rendezvous.member_side import attend_meeting
from unisono.rendezvous.party import ChannelFacts, MakeReport, Party
from unisono.rendezvous.ssh import SshFronts, start_others
from unisono.rundir.lock import RunLock, recorded_holder
from unisono.rundir.records import RunResult, set_verdict, write_result
from unisono.supervise.evidence import keep_evidence
from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of

Diagnose = Callable[[Path], Verdict | None]
"""Names the cause from a log; None where it finds none."""

_DIAGNOSIS_S = 120.0
_ALL_DEVICES = ("llamafactory", "accelerate", "deepspeed")


@dataclass
class GuardedRun:
    """One start of `unisono run` on this node.

    Attributes:
        asked: the command.
        show: sees notes, warnings, the verdict and the result.
        diagnose: names the cause from what the program has printed.
        probes: of this machine.
    """

    asked: RunRequest
    show: Show
    diagnose: Diagnose
    probes: Probes = field(default_factory=Probes)
    began: float = field(default_factory=time.monotonic)
    reports: Sequence[NodeReport] = ()
    agreement: Agreement = field(default_factory=Agreement)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self) -> dict[str, Any]:
        """From the command line to the end; gives the object of result.json.

        Raises:
            UnisonoError: if nothing was started, for a reason of this node alone.
        """
        refuse_launcher(self.asked)
        token = take_token()
        environment = read_environment()
        machine = read_machine(self.probes.devices)
        whole = with_our_programs(self.asked, all_variables())
        shape = self._shape(machine, environment, whole)
        secret = find_token(self.asked, shape.topology, environment, token)
        party = Party(
            topology=shape.topology,
            token=secret.secret if secret is not None else b"",
            host=machine.host,
            show=self.show,
            join_timeout_s=self.asked.join_timeout_s,
            network=self.probes.network,
            command="unisono run",
        )
        with refusals_reported(party):
            refuse_missing(self.asked.words[0], whole.get("PATH"))
            run, lock = run_dir(
                self.asked.output_dir,
                is_head=shape.topology.is_head,
                host=machine.host,
                port=shape.topology.head_port if shape.topology.nodes > 1 else 0,
            )
        for text in (*_described(shape), *shape.notes, f"log and result: {run.root}"):
            say(self.show, text)
        start = _Start(self, shape, run, lock, machine, environment, whole)
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

    def _shape(self, machine: Machine, environment: Environment, whole: Mapping[str, str]) -> RunShape:
        command = read_command(self.asked.words)
        visible = self.asked.devices if self.asked.devices is not None else environment.visible_devices
        accelerators = usable_accelerators(machine, wish="auto", visible=visible)
        automatic = command.kind in _ALL_DEVICES or any(
            one.text in ("gpu", "auto") for one in (command.said("nproc_per_node"),) if one
        )
        return find_shape(
            self.asked,
            command,
            environment,
            whole,
            accelerators if automatic else Accelerators(0),
            self.probes.network,
        )

    def finish(
        self, run: ProgramDir, exit_code: int, verdict: Verdict | None, *, stopped: str = "", writes: bool
    ) -> dict[str, Any]:
        """Writes how it ended, and tells it."""
        result = RunResult(
            run_id=self.run_id,
            outcome=outcome_of(exit_code, verdict, stopped=stopped),
            exit_code=exit_code,
            output_dir=str(run.root),
            verdict=verdict.to_json() if verdict else None,
            wall_time_s=time.monotonic() - self.began,
        )
        if writes:
            with contextlib.suppress(OSError):  # a full disk is said in the verdict, if it is why
                set_verdict(run, verdict)
                write_result(run, result)
        self.show({"kind": "result", "time": time.time(), **result.to_json()})
        return result.to_json()

    def keep(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        """What nodes have brought, for agreement.json."""
        self.reports, self.agreement = reports, agreement


@dataclass
class _Start:
    whole: GuardedRun
    shape: RunShape
    run: ProgramDir
    lock: RunLock
    machine: Machine
    environment: Environment
    variables: Mapping[str, str]
    pid: int = 0  # of the program, once it is started

    def alone(self) -> dict[str, Any]:
        """On the only node."""
        nodes = [self._place(0, self.machine.host, "127.0.0.1", self.shape.topology.nproc, "")]
        with self._here(None) as here:
            self._write_plan(
                nodes
            )  # a program that cannot be started leaves a directory that the next start may have
            return self._to_the_end(here, nodes, None)

    def together(self, party: Party) -> dict[str, Any]:
        """With the other nodes."""
        if party.topology.is_head:
            return self._as_head(party)
        return self._as_member(party)

    def _as_head(self, party: Party) -> dict[str, Any]:
        uneven = self.whole.asked.uneven

        def start(address: tuple[str, int]) -> SshFronts:
            return start_others(
                remote_run(self.whole.asked, self.run.root),
                party.topology,
                party.token,
                address,
                logs=self.run.log("", 0).parent,
                variables=self.environment.variables,
            )

        with (
            contextlib.ExitStack() as reserved,
            hold_meeting(
                party,
                self._maker(),
                record=self._keep,
                tries_collective=False,
                compare=lambda reports: compare_programs(reports, uneven=uneven),
                start_others=start if party.topology.hosts else None,
            ) as meeting,
        ):
            reports = meeting.reports
            nodes = [self._place(r.node_rank, r.host, r.address, r.nproc, r.nproc_origin) for r in reports]
            self._write_plan(nodes)
            host = meeting.server.address[0]
            store = (host, reserved.enter_context(_reserved_port(host)))
            meeting.broadcast({"kind": "start", "store": list(store), "run_id": self.whole.run_id})
            say(self.whole.show, f"{len(nodes)} nodes agree; starting the program on each")
            with self._here(store) as here:
                return self._to_the_end(here, nodes, meeting)

    def _as_member(self, party: Party) -> dict[str, Any]:
        with attend_meeting(party, self._maker(), tries_collective=False) as attendance:
            message = attendance.wait_for("start")
            self.whole.run_id = str(message["run_id"])
            shared = is_heads(self.run, self.whole.run_id)
            heads = recorded_holder(self.run.lock) if shared else None
            store = (str(message["store"][0]), int(message["store"][1]))
            with self._here(store) as here:
                log = self.run.log(self.machine.host, 0)
                attending = MemberProgram(
                    attendance,
                    here,
                    self.shape.topology.node_rank,
                    self.whole.show,
                    lambda: self.whole.diagnose(log),
                )
                attending.run()
                own = here.program.returncode if here.program is not None else None
                code = attending.exit_code(own)
                with contextlib.ExitStack() as stack:
                    writes = not shared
                    if shared and attending.loss is not None:
                        writes = stack.enter_context(writing_for_head(self.run.lock, heads, attending.loss))
                    return self.whole.finish(
                        self.run, code, attending.verdict, stopped=attending.stopped, writes=writes
                    )

    def _maker(self) -> MakeReport:
        def make(standing: ChannelFacts, show: Show) -> NodeReport:
            return make_report(
                self.whole.asked,
                self.shape,
                standing,
                machine=self.machine,
                environment=self.environment,
                probes=self.whole.probes,
                output_dir=self.run.root,
                show=show,
            )

        return make

    @contextlib.contextmanager
    def _here(self, store: tuple[str, int] | None) -> Iterator[LocalProgram]:
        """The program, started, with its border; nothing of it is left afterwards."""
        asked, topology = self.whole.asked, self.shape.topology
        with border() as folder, Signals() as signals:
            guard = Guard(
                folder,
                self.whole.run_id,
                os.getpid(),
                topology.node_rank,
                topology.nodes,
                self.machine.host,
                store="" if store is None else f"{store[0]}:{store[1]}",
                uneven=asked.uneven,
                options={
                    "debug_comm": asked.debug_comm,
                    "json": asked.json,
                    "join_timeout_s": asked.join_timeout_s,
                },
            )
            found = surroundings_of(asked, self.shape, self.variables, guard_file=guard.write(), store=store)
            for note in found.notes:
                say(self.whole.show, note)
            log = self.run.log(self.machine.host, 0)
            with Program(
                asked.words,
                environment=found.environment,
                log=log,
                folder=folder,
                stdout_is_ours=asked.json,
                reads=not asked.from_stdin,
            ) as program:
                self.pid = program.pid
                ranks = ProgramRanks(
                    folder, self.run, topology.node_rank, self.machine.host, program.keeper_pid
                )
                here = LocalProgram(program, ranks, folder, self.run, signals)
                try:
                    yield here
                finally:
                    here.close()

    def _to_the_end(
        self, here: LocalProgram, nodes: Sequence[NodePlace], meeting: Meeting | None
    ) -> dict[str, Any]:
        watch = FolderWatch(self.run, self.lock, self.whole.show, lambda: self._write_plan(nodes))
        judging = self._judging(here, nodes, meeting)
        judging.beside = watch.look
        try:
            judging.run()
        finally:
            watch.settle()
        return self._head_ends(judging, meeting, writes=not watch.is_lost)

    def _judging(
        self, here: LocalProgram, nodes: Sequence[NodePlace], meeting: Meeting | None
    ) -> ProgramSupervisor:
        restarts = self.shape.job.restarts
        return ProgramSupervisor(
            here,
            nodes,
            self.whole.reports,
            meeting.server if meeting is not None else None,
            self.whole.show,
            uneven=self.whole.asked.uneven,
            restarts=int(restarts.text) if restarts is not None and restarts.text.isdigit() else 0,
            store_host=meeting.server.address[0] if meeting is not None else "",
            join_timeout_s=self.whole.asked.join_timeout_s,
            stopping=Stopping(self.whole.asked.grace_s),
        )

    def _head_ends(
        self, judging: ProgramSupervisor, meeting: Meeting | None, *, writes: bool
    ) -> dict[str, Any]:
        """What ended the program: the watch's verdict, else what its own output says; and tells it to the nodes."""
        verdict = judging.verdict
        bad = judging.gone_wrong
        if verdict is None and bad is not None and judging.asked is None:
            verdict = judging.last_death or self._named(bad, meeting)
            if verdict is not None:
                verdict = for_program(verdict, judging.framework)
                self.whole.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
        elif verdict is not None and writes and (judging.raw or judging.looks):
            cited = keep_evidence(self.run, verdict, table=Path(), raw=judging.raw, looks=judging.looks)
            verdict = verdict.model_copy(update={"evidence": (*verdict.evidence, *cited)})
        stopped = judging.asked.name if judging.asked is not None else ""
        code = (
            exit_code_of_verdict(verdict)
            if verdict is not None
            else exit_code_of_program(judging.programs.get(0, 0))
        )
        if verdict is None and code == 0 and bad is not None:
            code = exit_code_of_program(bad.returncode)
        if writes:
            self._write_agreement(judging.agreements)
        result = self.whole.finish(self.run, code, verdict, stopped=stopped, writes=writes)
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

    def _named(self, end: ProgramEnd, meeting: Meeting | None) -> Verdict | None:
        """What ended the program there: a signal, or what it has printed."""
        is_here = end.node_rank == 0
        kernel = _of_process(self.pid, self.whole.began) if is_here and end.returncode < 0 else []
        return name_program_death(
            end, self.shape.command, diagnosed=self._diagnosed(end.node_rank, meeting), kernel=kernel
        )

    def _diagnosed(self, node_rank: int, meeting: Meeting | None) -> Verdict | None:
        """What the program printed there, read on that node."""
        if node_rank == 0 or meeting is None:
            say(self.whole.show, "reading what the program printed")
            return self.whole.diagnose(self.run.log(self.machine.host, 0))
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
        self.whole.keep(reports, agreement)
        self._write_agreement(Agreement())

    def _write_agreement(self, more: Agreement) -> None:
        body = {
            "schema": 1,
            "nodes": [report.to_json() for report in self.whole.reports],
            **self.whole.agreement.merged(more).to_json(),
        }
        with contextlib.suppress(OSError):
            write_json(self.run.agreement, body, mode=0o600)

    def _write_plan(self, nodes: Sequence[NodePlace]) -> None:
        """What is about to be started, for who reads the directory later."""
        body = {
            "schema": 1,
            "run_id": self.whole.run_id,
            "command": list(self.whole.asked.words),
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
    """What the kernel's log has said of a process since then, in seconds of the monotonic clock; empty where it may not be read."""
    age_s = time.monotonic() - began
    named = re.compile(rf"(\[{pid}\]|\bprocess {pid}\b)", re.IGNORECASE)
    lines = read_kernel_log() or []
    return [line for line in lines if (line.age_s or 0.0) <= age_s and named.search(line.text)]


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """A port for a program that takes MASTER_PORT by itself; our rendezvous binds its own.

    The program binds it long after its start. Until then it is bound here and not listened at: the kernel gives it to nobody who asks for any
    port or connects from one, and nobody else can bind it, but for a server with SO_REUSEADDR at just this number. torch's store is one.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        yield int(sock.getsockname()[1])


def _described(shape: RunShape) -> list[str]:
    """How the command line was understood, where there is something to understand."""
    topology = shape.topology
    if topology.nodes == 1:
        return []
    origins = topology.origins
    return [
        f"{topology.nodes} nodes ({origins.get('nodes', '?')}), this is node {topology.node_rank} ({origins.get('node_rank', '--hosts' if topology.hosts else '?')}), "
        f"head {topology.head_host}{f':{topology.head_port}' if topology.head_port else ''} ({origins.get('head', '?')}), "
        f"{topology.nproc} rank{'' if topology.nproc == 1 else 's'} here ({topology.nproc_origin})"
    ]
