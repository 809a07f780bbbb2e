"""The head with the other nodes, from their call to the last word: what happens between the meeting
and the ranks.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from unisono.base.causes import Verdict
from unisono.base.errors import Disagreed
from unisono.base.messages import Show
from unisono.base.text import validation_words
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.training import PreparedFacts, compare_prepared
from unisono.guard.facts.storage import RunsDisk, leave_nonce, remove_nonce
from unisono.guard.rendezvous.meeting_rules import end_message
from unisono.guard.rendezvous.party import NONCE_FILE, Party
from unisono.guard.rendezvous.remote_fronts import RemoteCommand, SshFronts, start_others
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import Progress, RunResult
from unisono.guard.supervise.interrupts import Interrupts
from unisono.guard.supervise.node_messages import (
    CheckpointIdentity,
    JobEnded,
    NodePrepared,
    PlanDecided,
    Prepare,
    VerdictReached,
    decode_news,
    encode,
)
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.jobs.remote_checkpoint.rescue import RescuedStep
from unisono.jobs.runs.node_report import report_maker
from unisono.jobs.runs.planning import LocalNode, PreparedInputs, prepared_facts
from unisono.jobs.runs.run_records import AgreementReports, Ending, result_without_run
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import LoadedConfig
from unisono.trainer.plan import RunPlan

if TYPE_CHECKING:
    from unisono.guard.control.channel_ends import HeadServer
    from unisono.guard.rendezvous.meeting import Meeting
    from unisono.guard.rendezvous.party import MakeRestartReport


_PREPARED_S = (
    24 * 3600.0
)  # tokenising may take hours; a node that dies or refuses meanwhile is heard of at once


@dataclass
class HeadNodes:
    """All nodes, agreed.

    Attributes:
        meeting: the others; from the start of the ranks on its server is read by who conducts them.
    """

    meeting: "Meeting"
    table: AgreementReports
    _rounds: int = 0

    def prepare(self, work: Callable[[Show], PreparedInputs]) -> PreparedInputs:
        """Has every node prepare its data and model; gives what came of it here.

        Raises:
            Disagreed: if they are not the same everywhere, or a node refuses.
        """
        self.meeting.broadcast(encode(Prepare()))
        prepared = self.meeting.run_in_background(work)
        answers = self.meeting.gather(NodePrepared.kind, timeout_s=_PREPARED_S, what="the prepared data")
        try:
            facts = {rank: _facts_of(answer) for rank, answer in answers.items()}
        except ValidationError as error:
            raise Disagreed.of("a node's data report cannot be read", why=validation_words(error)) from error
        self.meeting.judge(compare_prepared({0: prepared_facts(prepared), **facts}, self.meeting.reports))
        self.table.of_nodes = self.meeting.agreement
        return prepared

    def bring_back(self, work: Callable[[Show], bool]) -> bool:
        """Fetches the checkpoint to resume from on this node, while the others wait and see its
        progress; returns the result of `work`.

        Raises:
            Disagreed: if a node refuses or is lost meanwhile.
        """
        return self.meeting.run_in_background(work, everywhere=True)

    def hand_over(self, plan: RunPlan) -> "HeadServer":
        """Sends the plan to all nodes, which then start their ranks; returns the connections that
        control them.
        """
        self.meeting.broadcast(encode(PlanDecided(plan.to_json())))
        return self.meeting.server

    def collect(
        self,
        plan: RunPlan,
        attempt: Attempt,
        rescued: RescuedStep,
        *,
        checkpoints: Path,
        interrupts: Interrupts,
    ) -> None:
        """Adds what the ranks of the other nodes, which have ended, have kept in memory."""
        from unisono.jobs.remote_checkpoint.rescue import collect

        with contextlib.suppress(
            OSError
        ):  # the head's disk is full or read-only: the rescue reports what is missing
            collect(
                plan, self.meeting.server, attempt, rescued, checkpoints=checkpoints, interrupts=interrupts
            )

    def can_do_without(self, nodes: Collection[int]) -> bool:
        """Whether enough nodes are left without these, as --nodes MIN:MAX has it.

        Node 0 is always needed.
        """
        left = [rank for rank in self.meeting.roll.hosts if rank not in nodes]
        return 0 in left and len(left) >= self.meeting.party.topology.enough

    def leave_out(self, nodes: Collection[int], verdict: Verdict, *, done: Progress | None = None) -> None:
        """Continues without some nodes, for the cause in the verdict.

        A node that still listens receives it and exits.

        Args:
            nodes: by their numbers.
            done: the run's progress with them; None if they had no ranks and
                were only asked whether they can continue.
        """
        result = None
        if done is not None:
            result = result_without_run(Ending(4, done, verdict), seconds=0.0).to_json()
        word = end_message([verdict], exit_code=3 if result is None else 4, result=result)
        for rank in nodes:
            self.meeting.server.send(rank, encode(word))
            self.meeting.leave_out(
                rank, f"is not admitted again: the job continues without it ({verdict.summary})"
            )

    def agree_again(self, make_report: "MakeRestartReport", checkpoint: "CheckpointIdentity | None") -> None:
        """The short agreement before ranks are started again.

        Where --nodes MIN:MAX allows it, nodes that are not fit are left out.

        Args:
            checkpoint: to resume from; None if there is none.

        Raises:
            Disagreed: with the verdict that all nodes have received.
        """
        agreement = None
        while agreement is None:
            agreement = self._round(make_report, checkpoint)
        known = {verdict.summary for verdict in self.meeting.agreement.verdicts}
        new_verdicts = [verdict for verdict in agreement.verdicts if verdict.summary not in known]
        self.meeting.judge(Agreement(agreement.checks, new_verdicts))
        self.table.of_nodes = self.meeting.agreement

    def _round(
        self, make_report: "MakeRestartReport", checkpoint: "CheckpointIdentity | None"
    ) -> Agreement | None:
        """The outcome of asking all nodes; None if some were dropped and the rest must be asked
        again.
        """
        from unisono.guard.rendezvous.meeting import Objection
        from unisono.guard.rendezvous.meeting_sides import rejoin_at_head

        self._rounds += 1
        try:
            with self.meeting.tentatively():
                return rejoin_at_head(self.meeting, make_report, checkpoint, round_=self._rounds)
        except Objection as objection:
            if not objection.nodes or not self.can_do_without(objection.nodes):
                self.meeting.refuse(objection.verdicts, nodes=objection.nodes)
            self.leave_out(objection.nodes, objection.verdicts[0])
            self.meeting.note(objection.verdicts[0].summary, everywhere=True)
            return None

    def send_verdict(self, verdict: Verdict) -> None:
        """Reports on all nodes what ended the ranks; whether the run restarts is reported later."""
        self.meeting.broadcast(encode(VerdictReached(verdict)))

    def end(self, result: RunResult, ending: Ending) -> None:
        """Sends the last message, how the run ended, once."""
        if self.meeting.is_over:
            return
        verdicts = (
            (ending.verdict,) if ending.verdict else ()
        )  # for the nodes' own files; it has been shown already
        problems = tuple(asdict(problem) for problem in ending.error.problems) if ending.error else ()
        self.meeting.end(JobEnded(ending.exit_code, verdicts, problems, result.to_json()))


@contextlib.contextmanager
def together(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    party: Party,
    *,
    run: RunDir,
    disk: RunsDisk,
    table: AgreementReports,
) -> Iterator[HeadNodes]:
    """Brings all nodes together; an exception that leaves the context is sent to them.

    Raises:
        Disagreed: with the verdict that all nodes have received.
    """
    from unisono.guard.rendezvous.meeting_sides import hold_meeting

    def start(address: tuple[str, int]) -> SshFronts:
        logs = run.log("", 0).parent
        return start_others(
            remote_train(request),
            local_node.topology,
            party.token,
            address,
            logs=logs,
            variables=local_node.environment.variables,
        )

    nonce = disk.need("the mark for the other nodes", partial(leave_nonce, run.root))
    try:
        with hold_meeting(
            party,
            report_maker(request, loaded, local_node),
            welcome={NONCE_FILE: nonce},
            record=table.set_nodes,
            start_others=start if local_node.topology.hosts else None,
        ) as meeting:
            yield HeadNodes(meeting, table)
    finally:
        disk.write("the mark for the other nodes", partial(remove_nonce, run.root, nonce))


def remote_train(request: TrainRequest) -> RemoteCommand:
    """The command that joins this training on another node."""
    return RemoteCommand(
        ("train", str(request.config_path), *request.overrides),
        {
            "--join-timeout": f"{request.join_timeout_s:g}",
            "--nproc": request.nproc,
            "--devices": request.devices,
            "--restarts": request.restarts,
            "--debug-comm": request.debug_comm or None,
            "--trust-code": request.trust_code or None,
        },
        ssh=request.ssh,
    )


def _facts_of(answer: Mapping[str, object]) -> PreparedFacts:
    news = decode_news(answer)
    assert isinstance(news, NodePrepared)  # no node may be left out of the comparison
    return news.facts
