"""A front for a torchrun that was started by hand: it joins the nodes' meeting, answers torchrun,
and exits.

    python -m unisono.guard.programs.torchrun_front

integrations.torchrun_handler starts it, and sends a line of settings on stdin. It prints the path
of the border's guard.json on stdout, and messages like those of `unisono run` on stderr.
"""

import json
import os
import select
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.messages import Message, VerdictMessage, message_of, notify
from unisono.base.text import one_line, plain
from unisono.guard.agree.compare import compare_programs
from unisono.guard.agree.reports import NodeReport
from unisono.guard.facts import Probes, no_gpus, read_environment, read_machine, take_token
from unisono.guard.integrations.border import Guard
from unisono.guard.places.ranks import NodePlace
from unisono.guard.places.topology import Topology
from unisono.guard.programs.launcher_facts import LauncherSettings, read_command
from unisono.guard.programs.local_program import LocalProgram
from unisono.guard.programs.member_program import MemberProgram
from unisono.guard.programs.program_end import SignalQueue
from unisono.guard.programs.program_meeting import make_report
from unisono.guard.programs.program_ranks import ProgramRanks
from unisono.guard.programs.program_request import RunRequest, RunShape
from unisono.guard.programs.program_start import ProgramDir, border
from unisono.guard.programs.program_supervisor import ProgramSupervisor
from unisono.guard.rendezvous.meeting_rules import end_message
from unisono.guard.rendezvous.meeting_sides import hold_meeting, join_meeting
from unisono.guard.rendezvous.party import ChannelFacts, MakeReport, Party, read_token

_ANSWER_READ_S = 60.0  # it polls 50 times a second, on a possibly loaded machine


def main() -> int:
    """Reads the settings and compares the nodes; gives the exit code."""
    settings = json.loads(sys.stdin.readline())
    try:
        return _TorchrunFront.of(settings).run()
    except Disagreed as error:
        if not error.already_shown and error.verdict is not None:
            _show(message_of(VerdictMessage, error.verdict.to_json()))
        return error.exit_code
    except UnisonoError as error:
        for line in error.lines():
            _print(line)
        return error.exit_code


@dataclass
class _TorchrunFront:
    shape: RunShape
    request: RunRequest
    party: Party
    run_id: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "_TorchrunFront":
        token = read_token(None, take_token(), nodes=int(settings["nodes"]))
        assert token is not None, "several nodes have a token"
        words = tuple(str(word) for word in settings["words"])
        nproc = settings["nproc"]
        topology = Topology(
            nodes=int(settings["nodes"]),
            node_rank=int(settings["node_rank"]),
            head_host=str(settings["host"]),
            head_port=int(settings["port"]),
            nproc=int(nproc or 1),
            nproc_declared=nproc is not None,
            nproc_origin="--nproc-per-node" if nproc is not None else "not known",
        )
        host = read_machine(no_gpus).host
        party = Party(
            topology=topology,
            token=token.secret,
            host=host,
            show=_show,
            join_timeout_s=float(settings["wait_s"]),
            command="torchrun --rdzv-backend unisono",
        )
        shape = RunShape(topology, read_command(words), LauncherSettings(), own_rendezvous=False)
        return cls(
            shape, RunRequest(words, uneven=bool(settings["uneven"])), party, f"by-hand-{settings['pid']}"
        )

    def run(self) -> int:
        topology = self.shape.topology
        with border() as folder, SignalQueue() as signals:
            store = f"[{topology.head_host}]" if ":" in topology.head_host else topology.head_host
            guard = Guard(
                folder,
                self.run_id,
                os.getpid(),
                topology.node_rank,
                topology.nodes,
                self.party.host,
                store=f"{store}:0",
                uneven=self.request.uneven,
                options={"join_timeout_s": self.party.join_timeout_s},
            )
            sys.stdout.write(f"{guard.write()}\n")
            sys.stdout.flush()
            ranks = ProgramRanks(
                folder, ProgramDir(Path("/nowhere")), topology.node_rank, self.party.host, os.getpid()
            )
            local = LocalProgram(None, ranks, folder, None, signals)
            code = self._as_head(local) if topology.is_head else self._as_member(local)
            _wait_for_reader(folder)
            return code

    def _as_head(self, local: LocalProgram) -> int:
        with hold_meeting(
            self.party,
            self._maker(),
            tries_collective=False,
            compare=lambda reports: compare_programs(reports, uneven=self.request.uneven),
        ) as meeting:
            nodes = [
                NodePlace(
                    node_rank=r.node_rank,
                    host=r.host,
                    address=r.address,
                    nproc=r.nproc,
                    nproc_origin=r.nproc_origin,
                )
                for r in meeting.reports
            ]
            meeting.broadcast({"kind": "start"})
            supervisor = ProgramSupervisor(
                local,
                nodes,
                meeting.reports,
                meeting.server,
                _show,
                uneven=self.request.uneven,
                only_launchers=True,
                store_host=meeting.server.address[0],
                join_timeout_s=self.party.join_timeout_s,
            )
            supervisor.run()
            code = 0 if supervisor.verdict is None else 3
            meeting.end(
                end_message([supervisor.verdict] if supervisor.verdict else [], exit_code=code, result={})
            )
            if code == 0:
                notify(
                    _show, f"{len(nodes)} nodes agree: {', '.join(str(node.nproc) for node in nodes)} ranks"
                )
            return code

    def _as_member(self, local: LocalProgram) -> int:
        with join_meeting(self.party, self._maker(), tries_collective=False) as member_side:
            member_side.wait_for("start")
            member = MemberProgram(member_side, local, self.shape.topology.node_rank, _show, lambda: None)
            member.run()
            return member.exit_code(None) if member.verdict is not None else 0

    def _maker(self) -> MakeReport:
        machine, environment = read_machine(Probes().devices), read_environment()

        def make(channel: ChannelFacts, _show: object) -> NodeReport:
            return make_report(
                self.request,
                self.shape,
                channel,
                machine=machine,
                environment=environment,
                probes=Probes(),
                output_dir=Path.cwd(),
            )

        return make


def _wait_for_reader(folder: Path) -> None:
    """Waits until torchrun has read its answer and closes our stdin: the answer is removed with the
    border.
    """
    if any(folder.glob("answer-*.json")):
        select.select([sys.stdin], [], [], _ANSWER_READ_S)


def _show(message: Message) -> None:
    """Shows a message on stderr, like `unisono run`."""
    match message["kind"]:
        case "note":
            _print(f"unisono: {one_line(str(message['text']))}")
        case "warning":
            _print(f"unisono: warning: {one_line(str(message['text']))}")
        case "verdict":
            from unisono.base.causes import Verdict

            body = {name: value for name, value in message.items() if name not in ("kind", "time")}
            for line in Verdict.from_json(body).lines():
                _print(line)
        case _:
            pass


def _print(line: str) -> None:
    sys.stderr.write(plain(line) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
