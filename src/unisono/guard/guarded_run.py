"""One run of `unisono run` on this node, a table of contents: the request, the job, the directory, the program with the other nodes, the result."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import Disagreed
from unisono.events import Show, notify
from unisono.facts import Probes, read_environment, read_machine, take_token
from unisono.facts.environment import all_variables
from unisono.guard.border_directory import ProgramDir, run_dir
from unisono.guard.head_program import HeadProgram
from unisono.guard.local_program import refuse_missing_program
from unisono.guard.member_program import run_as_member
from unisono.guard.program_meeting import describe_shape, find_shape, find_token, program_environment
from unisono.guard.program_request import RunRequest, RunShape, refuse_launcher
from unisono.guard.program_start import Diagnose, ProgramStart
from unisono.rendezvous.head_address import refusals_reported
from unisono.rendezvous.party import Party
from unisono.rundir.lock import RunLock
from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of


@dataclass
class GuardedRun:
    """One run on this node.

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
    _began: float = field(default_factory=time.monotonic)

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
                    self.show({"kind": "verdict", "time": time.time(), **error.verdict.to_json()})
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


def _run_program(start: ProgramStart, party: Party) -> dict[str, Any]:
    """Runs the program on this node, alone, as the head, or as the head says."""
    if party.topology.nodes == 1:
        return HeadProgram(start).alone()
    if party.topology.is_head:
        return HeadProgram(start).together(party)
    return run_as_member(start, party)
