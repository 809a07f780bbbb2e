"""A run from plan to result."""

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.store import step_of
from unisono.events import Reporter
from unisono.facts import read_environment
from unisono.plan import RunPlan
from unisono.rundir.metrics import best_evaluated
from unisono.storage_errors import reason, remedy, words
from unisono.train import faults
from unisono.train.evaluate import asks_for_exact_match, exact_match_share
from unisono.train.finish import write_result
from unisono.train.longest import try_longest
from unisono.train.loop import train, train_again
from unisono.train.meeting import find_place
from unisono.train.other_rank import OtherRankReporter
from unisono.train.run import Run
from unisono.train.saving import restore
from unisono.train.setup import ready_facts, set_up
from unisono.train.snapshot import Snapshots
from unisono.train.stop import EXIT_CODES, StopRequest
from unisono.train.storage_watch import StorageWatch
from unisono.train.turns import by_main
from unisono.watch import Beats


def run_plan(
    plan: RunPlan,
    report: Reporter,
    stop: StopRequest,
    *,
    snapshot_fd: int | None = None,
    beats: Beats | None = None,
) -> dict[str, Any]:
    """Sets up, tries the longest batch, trains, and writes the result; gives the fields of the `result` message.

    Of several ranks each calls it. The process group stays open: `close_group` ends it when the result has been told.
    """
    place = find_place(plan, read_environment())
    if place.rank > 0:
        report = OtherRankReporter(report)
    run = set_up(plan.of_rank(place.rank), place, report, stop, beats or Beats())
    if plan.config.adapter is not None:
        run.snapshots = Snapshots(snapshot_fd)
    with StorageWatch(run.saver, report, run.beats) as run.storage:
        try:
            return _to_the_end(run)
        except Exception:  # raised again, once the save in flight has come to its end
            if run.group.world_size == 1:  # of several, the others would wait for a rank that is lost
                # The failure that ends the run is the one to be told, not a save's own.
                with contextlib.suppress(Exception):
                    run.saver.wait()
            raise
        finally:
            _close(run, run.storage)


def _close(run: Run, storage: StorageWatch) -> None:
    if run.metrics is not None:
        with storage.ends_if_stuck("writing metrics.jsonl", run.files.metrics, only_files=True):
            lost = run.metrics.close()
        if lost is not None:
            run.report.warning(
                "metrics_lost", f"{run.metrics.waiting} lines of metrics.jsonl could not be written: {words(lost)} ({run.files.metrics}); {reason(lost)}",
                fix=remedy(lost, else_="fix the storage"),
            )  # fmt: skip
    if run.board is not None:
        run.board.close()


def _to_the_end(run: Run) -> dict[str, Any]:
    report, stop = run.report, run.stop
    trial = try_longest(run)
    kept_every = (
        run.snapshots.prepare(run, step_time_s=trial.step_time_s) if run.snapshots is not None else None
    )
    report.send("ready", facts=ready_facts(run, peak=trial.peak_bytes, kept_every=kept_every))
    stop.training_begins()
    began, tokens_before = time.perf_counter(), run.state.tokens
    ending = train(run) if run.plan.last_step is None else train_again(run)
    seconds = time.perf_counter() - began
    weights = None
    if ending["outcome"] == "completed":
        run.beats.enter("finish")
        _take_best(run)
        share = exact_match_share(run)
        if share is not None:
            run.state.eval["exact_match"] = share
        elif asks_for_exact_match(run) and run.stopping is not None:  # what is left may take too long
            ending = {**ending, "outcome": run.stopping, "exit_code": EXIT_CODES[run.stopping]}
    if ending["outcome"] == "completed":
        report.phase("finish", "writing the result")
        run.beats.enter("finish")
        weights = _write_result(run)
    faults.at_the_end(run.plan, run.group.rank)
    if not run.group.is_main:
        return {"outcome": ending["outcome"], "exit_code": ending["exit_code"], "step": run.state.step}
    newest = run.files.checkpoint(run.saved_step) if run.saved_step is not None else None
    return {
        **ending,
        "step": run.state.step,
        "tokens": run.state.tokens,
        "loss": run.state.loss,
        "eval": run.state.eval,
        "tokens_per_second": (run.state.tokens - tokens_before) / max(seconds, 1e-9),
        "checkpoint": str(newest) if newest else None,
        "weights": str(weights) if weights else None,
    }


def _write_result(run: Run) -> Path | None:
    assert run.storage is not None
    target = run.files.adapter if run.plan.config.adapter is not None else run.files.model
    with run.storage.ends_if_stuck("writing the result", target):
        return write_result(run)


def _take_best(run: Run) -> None:
    """With `checkpoint.best` the result is the best checkpoint that there is, which may be an earlier one. All ranks must call it."""
    best = run.state.best_step
    if run.plan.config.checkpoint.best is None or best is None or best == run.state.step:
        return
    assert run.storage is not None
    step, loss = _best_there(run)
    if step != best and run.group.is_main:
        text = f"the checkpoint of the best step, {best}, is not there; the result is that of step {step or run.state.step}"
        run.report.warning("best_is_gone", text)
    if step in (0, run.state.step):
        return
    run.report.phase("finish", f"taking the best checkpoint, step {step}")
    state, saved = run.state, run.saved_step
    path = run.files.checkpoint(step)
    with run.storage.ends_if_stuck("reading the best checkpoint", path):
        restore(run, path, trust=True)  # also a stranger's weights may be the result; the rest goes unused
    run.state, run.saved_step = state, saved
    run.state.eval["loss"] = loss


def _look_for_best(run: Run) -> tuple[int, float] | None:
    assert run.store is not None
    there = {step_of(path.name): path for path in run.store.list()}
    while (best := best_evaluated(run.files.metrics, there)) is not None:
        if not any(finding.is_fatal for finding in run.store.verify(there[best[0]])):
            return best
        del there[best[0]]
    return None


def _best_there(run: Run) -> tuple[int, float]:
    """The intact checkpoint of the lowest eval_loss, and that loss; step 0 where there is none. Rank 0 looks, all ranks must call it."""
    best = by_main(
        run, partial(_look_for_best, run), what="looking for the best checkpoint", path=run.files.checkpoints
    )
    found = torch.tensor(best or (0, 0.0), dtype=torch.float64, device=run.device)
    run.group.broadcast(found)
    return int(found[0]), float(found[1])
