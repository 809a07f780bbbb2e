"""How a run ends on a node that is not the head: with the head's last word, without a head, or refused before it started."""

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unisono.causes import Verdict, find_cause
from unisono.errors import Disagreed
from unisono.events import Message, Show
from unisono.files import make_private_dir
from unisono.launch.member_supervisor import LostHead
from unisono.launch.outcome import NOTHING_DONE, Ending, result_of
from unisono.launch.run_records import read_progress, writing_for_head
from unisono.rundir import RunDir
from unisono.rundir.lock import Holder
from unisono.rundir.records import RunResult, set_verdict, write_result
from unisono.supervise.bounded_io import RunsDisk
from unisono.supervise.interrupts import exit_code_of
from unisono.text import plain


@dataclass
class HeadlessEnd:
    """This node after it lost the connection to a head that sent no last message.

    Attributes:
        run: this node's directory.
        last: what is known.
        heads: the head, as its lock named it while it lived; None where its directory is not seen here.
        shared: whether the directory is the head's.
        show: receives the messages.
        disk: of the directory.
        began: when this front began, in monotonic seconds.
    """

    run: RunDir
    last: LostHead
    heads: Holder | None
    shared: bool
    show: Show
    disk: RunsDisk
    began: float

    def end(self, *, stop: signal.Signals | None) -> dict[str, Any]:
        """Reports the lost head, writes verdict and result where this node may, and returns the result.

        Args:
            stop: the signal that asked the job to stop. In that case a head that exits first is the normal end.
        """
        verdict = self.last.verdict
        known = find_cause(verdict.cause)
        fields = {**NOTHING_DONE, "step": self.last.step}
        if self.shared:
            fields = self.disk.write("how far the run is", partial(read_progress, self.run)) or fields
        if stop is None:
            self.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
            ending = Ending(known.exit_code if known else 4, fields, verdict)
        else:
            text = f"{verdict.summary}; the run was stopped, and its checkpoints are in its output_dir"
            self.show({"kind": "note", "time": time.time(), "text": text})
            ending = Ending(exit_code_of(stop), fields)
        result = result_of(
            ending,
            run_id=self.last.plan.run_id,
            output_dir=str(self.run.root),
            restarts=[],
            seconds=time.monotonic() - self.began,
        )
        self.disk.write("how the run ended", partial(self._write, ending, result))
        return result if self.shared else {**result, "held_by": f"node 0 ({plain(self.last.head)})"}

    def _write(self, ending: Ending, result: dict[str, Any]) -> None:
        """The head writes its own files as long as it lives; after its death this node does."""
        verdicts = [ending.verdict] if ending.verdict is not None else []
        if not self.shared:
            _write_end(self.run, verdicts, result)
            return
        with writing_for_head(self.run.lock, self.heads, self.last.loss) as is_ours:
            if is_ours:
                _write_end(self.run, verdicts, result)


def _write_end(run: RunDir, verdicts: Sequence[Verdict], result: dict[str, Any]) -> None:
    for verdict in verdicts:
        set_verdict(run, verdict)
    write_result(run, RunResult.from_json(result))


def _cited_from(verdict: Verdict, *, head: str) -> Verdict:
    """The verdict as it is kept on another disk than the head's: the files that it cites are there, and not here."""
    folder = RunDir(Path()).evidence.name + "/"
    evidence = [
        one.model_copy(update={"where": f"{one.where}, on node 0 ({plain(head)})"})
        if one.where.startswith(folder)
        else one
        for one in verdict.evidence
    ]
    return verdict.model_copy(update={"evidence": tuple(evidence)})


def keep_end(
    run: RunDir, message: Message, *, head: str, shared: bool, show: Show, disk: RunsDisk
) -> dict[str, Any]:
    """Keeps how the run ended, where the head's directory is not seen here. A verdict on the ranks has been shown already."""
    result = {**dict(message.get("result") or {}), "exit_code": int(message.get("exit_code", 1))}
    verdicts = [_cited_from(Verdict.from_json(value), head=head) for value in message.get("verdicts") or []]
    problems = message.get("problems") or []
    if problems:
        show({"kind": "refused", "time": time.time(), "problems": problems})
    if not shared:
        disk.write("how the run ended", partial(_write_end, run, verdicts, result))
    return result if shared else {**result, "held_by": f"node 0 ({plain(head)})"}


def keep_refusal(run: RunDir, error: Disagreed) -> None:
    """Copies of verdict.json and result.json for a node that does not see the head's; a run of this node's own stays as it is."""
    if error.verdict is None or run.plan.exists():
        return
    with contextlib.suppress(OSError):  # a disk that is full or read-only may be what the verdict is about
        make_private_dir(run.root)
        set_verdict(run, error.verdict)
        verdict = error.verdict.to_json()
        write_result(
            run,
            RunResult(
                outcome="disagreed", exit_code=error.exit_code, output_dir=str(run.root), verdict=verdict
            ),
        )
