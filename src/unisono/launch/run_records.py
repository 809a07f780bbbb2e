"""Writes what a start leaves in the run's directory beside the worker's own files."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.reports import NodeReport, RankReport
from unisono.checkpoint.store import CheckpointStore, step_of
from unisono.config import RunConfig
from unisono.errors import UnisonoError
from unisono.events import Message, Show
from unisono.facts import package_versions
from unisono.facts.environment import versions_digest
from unisono.facts.storage import RunsDisk
from unisono.files import make_private_dir, read_object, write_json, write_text
from unisono.launch.curve_drawing import Drawing
from unisono.launch.outcome import NOTHING_DONE
from unisono.launch.train_request import config_yaml
from unisono.plan import RunPlan
from unisono.rundir import RunDir
from unisono.rundir.lock import BEAT_S, Holder, RunLock, locked_if_ended
from unisono.rundir.records import (
    RunResult,
    iterate_metrics,
    outcome_of,
    read_result,
    set_verdict,
    write_result,
)
from unisono.supervise.decision import NodeLoss

_ENDS_S = 3.0
_WATCH_S = 3 * BEAT_S


def write_decision(run: RunDir, plan: RunPlan) -> None:
    """Writes config.yaml, plan.json and environment.json: all that is decided before the ranks start; and agreement.json of one rank."""
    for folder in (run.checkpoints, run.events(0).parent, run.log(plan.host, 0).parent):
        make_private_dir(folder)
    write_text(run.config, config_yaml(plan.config, command=f"unisono train {run.config}"), mode=0o600)
    versions = package_versions()
    digest = versions_digest(versions)
    write_json(run.environment, {"schema": 1, "digest": digest, "packages": versions})
    if plan.world_size == 1:
        write_json(run.agreement, _agreement(plan, versions_digest_=digest))
    write_json(run.plan, plan.to_json(), mode=0o600)


def read_progress(run: RunDir) -> dict[str, Any]:
    """A run's progress, read from its directory; for a node that writes the result in place of a lost head.

    Its keys are those of result.json. A checkpoint is not read through: whoever resumes from it does that.
    """
    known = dict(NOTHING_DONE)
    for line in iterate_metrics(run.metrics):
        known["step"] = line["step"]
        if "eval_loss" in line:
            known["eval"] = {k.removeprefix("eval_"): v for k, v in line.items() if k.startswith("eval_")}
        else:
            known |= {name: line[name] for name in ("tokens", "loss", "tokens_per_second") if name in line}
    saved = CheckpointStore(run.checkpoints, key=b"").list()  # only names are read
    if saved:
        known["checkpoint"] = str(saved[-1])
        known["step"] = max(known["step"], step_of(saved[-1].name))
    return known


@contextlib.contextmanager
def writing_for_head(lock: Path, head: Holder | None, loss: NodeLoss) -> Iterator[bool]:
    """Whether this node may write a lost head's files: the head has ended, and no start has begun since. None can begin meanwhile.

    Args:
        head: as the lock named it while it lived; None where it did not.
        loss: the end of the connection to it.
    """
    if head is None or not loss.lost_head:  # a head that has given this node up lives
        yield False
        return
    # Of a process that ends the kernel closes connections and locks one after the other; one that was only silent may beat.
    limit_s, watch_s = (0.0, _WATCH_S) if loss.is_cut else (_ENDS_S, 0.0)
    with locked_if_ended(lock, head, limit_s=limit_s, watch_s=watch_s) as is_ours:
        yield is_ours


def note_in_plan(run: RunDir, **fields: Any) -> None:
    """Adds to plan.json what the ranks have found out since it was written. One that is gone or damaged is left alone."""
    plan = read_object(run.plan)
    if plan and any(plan.get(name) != value for name, value in fields.items()):
        write_json(run.plan, {**plan, **fields}, mode=0o600)


@dataclass
class Table:
    """The reports of all nodes and ranks, and the results of their comparison.

    Attributes:
        nodes: by node rank.
        ranks: by rank, of the newest start.
        of_ranks: what came of comparing ranks; None before all have reported.
    """

    nodes: Sequence[NodeReport] = ()
    ranks: Sequence[RankReport] = ()
    of_nodes: Agreement | None = None
    of_ranks: Agreement | None = None

    def set_nodes(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        """Takes what the nodes brought to their meeting."""
        self.nodes, self.of_nodes = list(reports), agreement

    def add_ranks(self, reports: Mapping[int, RankReport], agreement: Agreement | None) -> None:
        """Takes what the ranks of a start have brought."""
        self.ranks = [reports[rank] for rank in sorted(reports)]
        self.of_ranks = agreement


def write_agreement(run: RunDir, table: Table) -> None:
    """Writes agreement.json of several ranks."""
    found = Agreement().merged(*(a for a in (table.of_nodes, table.of_ranks) if a is not None))
    outcome = "refused" if not found.agreed else "agreed" if table.of_ranks is not None else "unfinished"
    body = {
        "schema": 1,
        "outcome": outcome,
        "nodes": [report.to_json() for report in table.nodes],
        "ranks": [report.to_json() for report in table.ranks],
        **found.to_json(),
    }
    write_json(run.agreement, body)


def keep_refusal(run: RunDir, config: RunConfig, table: Table, error: UnisonoError, *, command: str) -> None:
    """Keeps why nodes or ranks did not agree: agreement.json, verdict.json, result.json. A finished run's result stays."""
    found = table.of_nodes or Agreement()
    if error.verdict is not None and not found.fatal:
        table.of_nodes = found.merged(Agreement.found("joining", error.verdict))
    if not run.config.exists():
        write_text(run.config, config_yaml(config, command=command), mode=0o600)
    write_agreement(run, table)
    before = read_result(run)
    if before is not None and before.is_completed:
        return
    set_verdict(run, error.verdict)
    verdict = error.verdict.to_json() if error.verdict else None
    write_result(
        run,
        RunResult.model_validate(
            {
                "outcome": outcome_of(error.exit_code),
                "exit_code": error.exit_code,
                "output_dir": str(run.root),
                "verdict": verdict,
            }
        ),
    )


def _agreement(plan: RunPlan, *, versions_digest_: str) -> dict[str, Any]:
    """One node with one rank: its report, without a comparison."""
    report = {
        "node_rank": 0,
        "host": plan.host,
        "nproc_per_node": 1,
        "world_size": 1,
        "device": plan.device.model_dump(mode="json"),
        "config_digest": plan.config_digest,
        "data_digest": plan.data.digest,
        "model_digest": plan.model.digest,
        "environment_digest": versions_digest_,
        "threads": plan.threads,
        "dtype": plan.dtype,
        "resume_step": plan.resume.step if plan.resume else 0,
        "ignored_variables": plan.ignored_variables,
    }
    return {"schema": 1, "nodes": [report], "verdicts": [], "outcome": "agreed"}


def write_plan(run: RunDir, lock: RunLock, plan: RunPlan, table: Table) -> None:
    """Writes all that is decided before a start of the ranks, on the head; agreement.json of several ranks, too."""
    make_private_dir(run.root)
    lock.keep()  # preparing data may take hours, and the directory may have been removed meanwhile
    write_decision(run, plan)
    if plan.world_size > 1:
        write_agreement(run, table)


class Recorder:
    """Passes messages on, and updates the run's directory at a first step, an evaluation, and a measurement of kept steps."""

    def __init__(self, run: RunDir, plan: RunPlan, disk: RunsDisk, show: Show) -> None:
        self.drawing = Drawing(run, title=f"{Path(plan.output_dir).name}: {plan.config.model.path}")
        self._run = run
        self._disk = disk
        self._show = show
        self._stepped = False
        self.on_step: Callable[[], None] = lambda: None

    def show(self, message: Message) -> None:
        """Takes one message of a rank, or of the head itself."""
        if message["kind"] == "step":
            self.on_step()
        if message["kind"] == "step" and not self._stepped:
            self._stepped = True
            self._disk.later(self._forget_earlier_end)
        if message["kind"] == "eval":
            self.drawing.again()
        self._note_kept(message)
        self._show(message)

    def _note_kept(self, message: Message) -> None:
        """How many steps a death may cost is measured by the ranks, and belongs to the plan."""
        match message["kind"]:
            case "ready":
                facts, name = message.get("facts"), "kept_every"
            case "kept":
                facts, name = message, "every"
            case _:
                return
        if isinstance(facts, dict) and name in facts and "rank" not in message:
            self._disk.later(partial(note_in_plan, self._run, kept_every=facts[name]))

    def _forget_earlier_end(self) -> None:
        """The result and verdict of an earlier start are history from the first step on."""
        self._run.result.unlink(missing_ok=True)
        set_verdict(self._run, None)
