"""A guarded program on a node other than the head: starts as the head says, sends news to the head,
and carries out its requests.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.base.causes import Verdict, find_cause
from unisono.base.events import Message, Show
from unisono.base.text import one_line
from unisono.guard.control.connection import Left, NodeMessage
from unisono.guard.programs.local_program import LocalProgram
from unisono.guard.programs.program_end import exit_code_of_program
from unisono.guard.programs.program_start import ProgramStart, is_head_directory
from unisono.guard.rendezvous.meeting_sides import MemberSide, join_meeting
from unisono.guard.rendezvous.party import Party
from unisono.guard.rundir.lock import recorded_holder
from unisono.guard.supervise.decision import NodeLoss
from unisono.guard.supervise.lost_head import writing_for_head
from unisono.guard.supervise.node_messages import (
    CollectStacks,
    Diagnosed,
    DiagnosisRequested,
    NodeNews,
    RankEnded,
    RanksRegistered,
    Start,
    VerdictReached,
    decode_request,
    encode,
)
from unisono.guard.supervise.postmortem import name_loss, verdicts_in
from unisono.guard.supervise.rank_monitor import MonitorReports

_POLL_S = 0.1
_ENDING_S = 30.0


def run_as_member(start: ProgramStart, party: Party) -> dict[str, Any]:
    """Runs the program together with the head and the other nodes; gives the object of
    result.json.
    """
    with join_meeting(party, start.report, tries_collective=False) as member_side:
        request = decode_request(member_side.wait_for("start"))
        assert isinstance(request, Start)
        result, number = _one_start(start, member_side, request), 1
        while isinstance(result, Start):
            start.set_log_aside(number)
            result, number = _one_start(start, member_side, result), number + 1
        return result


def _one_start(start: ProgramStart, member_side: MemberSide, request: Start) -> dict[str, Any] | Start:
    """Runs the program as the head says: its result, or the head's next start."""
    start.run_id = request.run_id
    shared = is_head_directory(start.run, start.run_id)
    heads = recorded_holder(start.run.lock) if shared else None
    with start.local_program(request.store) as local:
        local.sends_time = not shared
        node_rank = start.shape.topology.node_rank
        member = MemberProgram(member_side, local, node_rank, start.show, start.diagnose_output)
        member.run()
        if member.new_start is not None:
            return member.new_start
        returncode = local.program.returncode if local.program is not None else None
        code = member.exit_code(returncode)
        with contextlib.ExitStack() as stack:
            writes = not shared
            if shared and member.loss is not None:
                writes = stack.enter_context(writing_for_head(start.run.lock, heads, member.loss))
            return start.finish(code, member.verdict, stopped=member.stopped, writes=writes)


@dataclass
class MemberProgram:
    """This node's front, from the start of the program to the head's final message.

    Attributes:
        show: gets notes, warnings and the verdict.
        diagnose: finds the cause in the program's output here.
        verdict: that all nodes show; this node's own if the head is lost.
        stopped: the signal that stopped the job; empty: none.
        loss: the end of the connection, if it came before the head's final message.
        new_start: the head's message, if it starts the program once more.
    """

    member_side: MemberSide
    local: LocalProgram
    node_rank: int
    show: Show
    diagnose: Callable[[], Verdict | None]
    verdict: Verdict | None = None
    stopped: str = ""
    loss: NodeLoss | None = None
    new_start: Start | None = None
    _code: int | None = None
    _over: bool = False
    _shown: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Runs until the head has sent its final message, or is lost."""
        reports = MonitorReports(self.local.ranks, self.node_rank, self._send)
        attempt = 0
        try:
            while not self._over:
                for message in self.local.new_messages(_POLL_S, also=[self.member_side.fileno()]):
                    if isinstance(message, RanksRegistered) and message.attempt != attempt:
                        attempt = message.attempt
                        reports.close()  # views of the previous ranks do not apply to the new ones
                        reports = MonitorReports(self.local.ranks, self.node_rank, self._send)
                    if isinstance(message, RankEnded):
                        reports.send_views()
                    self._send(message)
                reports.send()
                for event in self.member_side.receive(0):
                    self._take(event, reports)
                    if self._over:  # the connection's end after the final message is not a loss
                        break
        finally:
            reports.close()

    def exit_code(self, returncode: int | None) -> int:
        """The exit code: that of the verdict, or the program's.

        Args:
            own: the program's return code here; None: it has not ended.
        """
        if self.verdict is not None or returncode is None:
            return self._code if self._code is not None else 5
        if returncode == 0 and self._code:  # it failed on a different node
            return self._code
        return exit_code_of_program(returncode)

    def _take(self, event: NodeMessage | Left, reports: MonitorReports) -> None:
        if isinstance(event, Left):
            self._take_loss(event)
            return
        message = event.message
        if message.get("kind") in ("note", "warning"):
            text = one_line(str(message.get("text", "")), limit=1_000)
            self.show({**message, "time": time.time(), "text": text})
        elif message.get("kind") == "ended":
            self._ended(message)
        else:
            self._take_request(message, reports)

    def _take_request(self, message: Message, reports: MonitorReports) -> None:
        match decode_request(message):
            case VerdictReached(verdict):
                self._show_verdict(verdict)
            case CollectStacks() as request:
                reports.look(request)
            case DiagnosisRequested():
                self._send(Diagnosed(self.diagnose()))
            case Start() as request:
                self._over, self.new_start = True, request
                self._end_program()
            case None:
                pass  # a newer version sends more
            case request:
                self.local.handle(request)

    def _send(self, news: NodeNews) -> None:
        self.member_side.send(encode(news))

    def _ended(self, message: Message) -> None:
        self._over = True
        self._code = int(message.get("exit_code", 1))
        result = message.get("result") or {}
        self.stopped = str(result.get("signal") or "")
        for verdict in verdicts_in(message):
            self._show_verdict(verdict)
        self._end_program()

    def _show_verdict(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if verdict.summary not in self._shown:
            self._shown.add(verdict.summary)
            self.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})

    def _take_loss(self, event: Left) -> None:
        """Ends the program: without the head, nothing is known of the other nodes, and they wait
        for this one.
        """
        self._over = True
        self.loss = NodeLoss.at_node(event, node_rank=self.node_rank, host=self.member_side.party.host)
        verdict = name_loss(self.loss, head=str(self.member_side.welcome.get("head_host", "")))
        entry = find_cause(verdict.cause)
        self._code = entry.exit_code if entry is not None else 4
        self._show_verdict(verdict)
        self._end_program()

    def _end_program(self) -> None:
        if self.local.program is not None and not self.local.has_ended:
            self.local.program.end()
            self.local.program.poll(_ENDING_S)
