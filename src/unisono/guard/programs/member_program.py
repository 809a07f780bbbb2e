"""A guarded program on a node other than the head: starts as the head says, sends news to the head,
and carries out its requests.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.base.causes import Verdict, find_cause
from unisono.base.messages import Show
from unisono.guard.control.connection import Left
from unisono.guard.programs.local_program import LocalProgram
from unisono.guard.programs.program_end import exit_code_of_program
from unisono.guard.programs.program_start import ProgramStart, is_head_directory
from unisono.guard.rendezvous.meeting_sides import MemberSide, join_meeting
from unisono.guard.rendezvous.party import Party
from unisono.guard.rundir.lock import recorded_holder
from unisono.guard.rundir.records import RunResult
from unisono.guard.supervise.decision import NodeLoss
from unisono.guard.supervise.lost_head import writing_for_head
from unisono.guard.supervise.node_messages import (
    Diagnosed,
    DiagnosisRequested,
    HeadRequest,
    JobEnded,
    RankEnded,
    RanksRegistered,
    Start,
    decode_request,
)
from unisono.guard.supervise.postmortem import name_loss
from unisono.guard.supervise.rank_monitor import MonitorReports
from unisono.guard.supervise.supervision import LastWord, NodeSupervision

_POLL_S = 0.1
_ENDING_S = 30.0


def run_as_member(start: ProgramStart, party: Party) -> RunResult:
    """Runs the program together with the head and the other nodes; gives the result."""
    with join_meeting(party, start.report, tries_collective=False) as member_side:
        request = decode_request(member_side.wait_for("start"))
        assert isinstance(request, Start)
        result, number = _one_start(start, member_side, request), 1
        while isinstance(result, Start):
            start.set_log_aside(number)
            result, number = _one_start(start, member_side, result), number + 1
        return result


def _one_start(start: ProgramStart, member_side: MemberSide, request: Start) -> RunResult | Start:
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
class MemberProgram(NodeSupervision):
    """This node's front, from the start of the program to the head's final message.

    Attributes:
        show: gets notes, warnings and the verdict.
        diagnose: finds the cause in the program's output here.
        verdict: that all nodes show; this node's own if the head is lost.
        stopped: the signal that stopped the job; empty: none.
        loss: the end of the connection, if it came before the head's final message.
        new_start: the head's message, if it starts the program once more.
    """

    link: MemberSide
    local: LocalProgram
    node_rank: int
    show: Show
    diagnose: Callable[[], Verdict | None]
    verdict: Verdict | None = None
    stopped: str = ""
    loss: NodeLoss | None = None
    new_start: Start | None = None
    _code: int | None = None
    _shown: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Runs until the head has sent its final message, or is lost."""
        self.reports = MonitorReports(self.local.ranks, self.node_rank, self.send)
        attempt, word = 0, None
        try:
            while word is None:
                for news in self.local.new_messages(_POLL_S, also=[self.link.fileno()]):
                    if isinstance(news, RanksRegistered) and news.attempt != attempt:
                        attempt = news.attempt
                        self.reports.close()  # views of the previous ranks do not apply to the new ones
                        self.reports = MonitorReports(self.local.ranks, self.node_rank, self.send)
                    if isinstance(news, RankEnded):
                        self.reports.send_views()
                    self.send(news)
                self.reports.send()
                word = self.receive_from_head()
            self._take_last_word(word)
        finally:
            self.reports.close()

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

    def carry_out(self, request: HeadRequest) -> None:
        """Carries out a request for the program."""
        if isinstance(request, DiagnosisRequested):
            self.send(Diagnosed(self.diagnose()))
        else:
            self.local.handle(request)

    def show_verdict(self, verdict: Verdict) -> None:
        """Shows a verdict of the head once; it is this node's, too."""
        self.verdict = verdict
        if verdict.summary not in self._shown:
            self._shown.add(verdict.summary)
            super().show_verdict(verdict)

    def _take_last_word(self, word: LastWord | Left) -> None:
        match word:
            case JobEnded():
                self._code = word.exit_code
                self.stopped = str((word.result or {}).get("signal") or "")
                for verdict in word.verdicts:
                    self.show_verdict(verdict)
            case Start():
                self.new_start = word
            case Left():
                self._take_loss(word)
            case _:
                pass
        self._end_program()

    def _take_loss(self, event: Left) -> None:
        """Without the head, nothing is known of the other nodes, and they wait for this one."""
        self.loss = NodeLoss.at_node(event, node_rank=self.node_rank, host=self.link.party.host)
        verdict = name_loss(self.loss, head=str(self.link.welcome.get("head_host", "")))
        entry = find_cause(verdict.cause)
        self._code = entry.exit_code if entry is not None else 4
        self.show_verdict(verdict)

    def _end_program(self) -> None:
        if self.local.program is not None and not self.local.has_ended:
            self.local.program.end()
            self.local.program.poll(_ENDING_S)
