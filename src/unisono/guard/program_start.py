"""State of one start of `unisono run` on this node: its place in the job, its directory with its records, and the program."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.reports import NodeReport
from unisono.causes import Verdict
from unisono.events import Show, notify
from unisono.facts import Environment, Machine, Probes
from unisono.files import write_json
from unisono.guard.border_directory import ProgramDir, border, program_outcome
from unisono.guard.local_program import LocalProgram, Program
from unisono.guard.program_end import SignalQueue
from unisono.guard.program_meeting import make_report
from unisono.guard.program_ranks import ProgramRanks
from unisono.guard.program_request import RunRequest, RunShape, build_environment
from unisono.integrations.border import ENDS_WITH_FRONT, Guard
from unisono.plan import NodePlace
from unisono.rendezvous.party import ChannelFacts
from unisono.rundir.lock import RunLock
from unisono.rundir.records import RunResult, set_verdict, write_result

Diagnose = Callable[[Path], Verdict | None]
"""Finds the cause in a log; None if it finds none."""


@dataclass
class ProgramStart:
    """One start on this node.

    Attributes:
        request: the command's options.
        shape: of the job.
        run: the directory.
        lock: of the directory; the head holds it.
        machine: this one.
        environment: of this process.
        variables: the program's.
        show: gets notes, warnings, the verdict and the result.
        diagnose: finds the cause in the program's output.
        probes: of this machine.
        run_id: the head's, once it is known.
        began: when the command began, in monotonic seconds.
        reports: of all nodes, once they agree.
        agreement: their comparison.
        pid: of the program, once it is started.
    """

    request: RunRequest
    shape: RunShape
    run: ProgramDir
    lock: RunLock
    machine: Machine
    environment: Environment
    variables: Mapping[str, str]
    show: Show
    diagnose: Diagnose
    probes: Probes
    run_id: str
    began: float
    reports: Sequence[NodeReport] = ()
    agreement: Agreement = field(default_factory=Agreement)
    pid: int = 0

    @property
    def log(self) -> Path:
        """The program's output on this node."""
        return self.run.log(self.machine.host, 0)

    def report(self, channel: ChannelFacts, show: Show) -> NodeReport:
        """This node's report to the meeting."""
        return make_report(
            self.request,
            self.shape,
            channel,
            machine=self.machine,
            environment=self.environment,
            probes=self.probes,
            output_dir=self.run.root,
            show=show,
        )

    @contextlib.contextmanager
    def local_program(self, store: tuple[str, int] | None) -> Iterator[LocalProgram]:
        """The started program with its border; nothing of it remains afterwards."""
        request, topology = self.request, self.shape.topology
        with border() as folder, SignalQueue() as signals:
            guard = Guard(
                folder,
                self.run_id,
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
                    ENDS_WITH_FRONT: True,
                },
            )
            found = build_environment(
                request, self.shape, self.variables, guard_file=guard.write(), store=store
            )
            for note in found.notes:
                notify(self.show, note)
            with Program(
                request.words,
                environment=found.environment,
                log=self.log,
                folder=folder,
                owns_stdout=request.json,
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

    def diagnose_output(self) -> Verdict | None:
        """The cause in the program's output on this node."""
        notify(self.show, "reading what the program printed")
        return self.diagnose(self.log)

    def set_log_aside(self, number: int) -> None:
        """The next start of the program gets a log of its own, so that this one's errors are not found there."""
        with contextlib.suppress(OSError):
            self.log.rename(f"{self.log}.{number}")

    def keep(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        """Keeps and writes the nodes' reports and their comparison."""
        self.reports, self.agreement = reports, agreement
        self.write_agreement(Agreement())

    def write_agreement(self, more: Agreement) -> None:
        """Writes agreement.json: what nodes and ranks reported, and what came of it."""
        body = {
            "schema": 1,
            "nodes": [report.to_json() for report in self.reports],
            **self.agreement.merged(more).to_json(),
        }
        with contextlib.suppress(OSError):
            write_json(self.run.agreement, body, mode=0o600)

    def write_plan(self, nodes: Sequence[NodePlace]) -> None:
        """Writes what is about to be started, for later readers of the directory."""
        body = {
            "schema": 1,
            "run_id": self.run_id,
            "command": list(self.request.words),
            "kind": self.shape.command.kind,
            "nodes": [node.model_dump(mode="json") for node in nodes],
            "origins": self.shape.topology.origins,
        }
        with contextlib.suppress(OSError):
            write_json(self.run.plan, body, mode=0o600)

    def finish(
        self, exit_code: int, verdict: Verdict | None, *, stopped: str = "", writes: bool
    ) -> dict[str, Any]:
        """Writes and shows the result."""
        result = RunResult(
            run_id=self.run_id,
            outcome=program_outcome(exit_code, verdict, stopped=stopped),
            exit_code=exit_code,
            output_dir=str(self.run.root),
            verdict=verdict.to_json() if verdict else None,
            wall_time_s=time.monotonic() - self.began,
        )
        if writes:
            with contextlib.suppress(OSError):  # a full disk is in the verdict, if it is the cause
                set_verdict(self.run, verdict)
                write_result(self.run, result)
        self.show({"kind": "result", "time": time.time(), **result.to_json()})
        return result.to_json()
