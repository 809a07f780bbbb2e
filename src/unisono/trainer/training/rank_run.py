"""One rank's run, from its plan to the result: set up, train, write the final weights, report."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from unisono.base.errors import (
    Problem,
    UnfitError,
    error_number,
    is_full,
    storage_reason,
    storage_remedy,
    storage_verdict,
    storage_words,
)
from unisono.base.events import Reporter
from unisono.base.files import fsync_dir, fsync_tree
from unisono.base.messages import Message
from unisono.base.text import show_bytes
from unisono.guard.facts import read_environment
from unisono.guard.rundir.records import best_evaluated
from unisono.guard.watch import Beats
from unisono.trainer.checkpoint.store import step_of
from unisono.trainer.checkpoint.verify import write_model_manifest
from unisono.trainer.checkpoint.writer import free_bytes
from unisono.trainer.model.layers import has_kernels, why_no_kernels
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.families import family_of
from unisono.trainer.training.evaluation import exact_match_share, wants_exact_match
from unisono.trainer.training.front_io import EXIT_CODES, StopRequest, StorageWatch, TrainingEnd
from unisono.trainer.training.hooks import RunHook
from unisono.trainer.training.join import find_place
from unisono.trainer.training.loop import train, train_again
from unisono.trainer.training.lost_directory import notices_loss, result_beside
from unisono.trainer.training.memory_snapshots import MemorySnapshots
from unisono.trainer.training.rank0_work import on_rank0
from unisono.trainer.training.result_outputs import write_outputs
from unisono.trainer.training.run import Run
from unisono.trainer.training.saving import averaged, restore
from unisono.trainer.training.setup import set_up
from unisono.trainer.training.training_checks import try_longest_batch
from unisono.trainer.training.weights import write_weights

_SHOWN = 3  # names of layers in a warning


def run_plan(
    plan: RunPlan,
    report: Reporter,
    stop: StopRequest,
    *,
    snapshot_fd: int | None = None,
    beats: Beats | None = None,
    hooks: Sequence[RunHook] = (),
) -> dict[str, object]:
    """Sets up, tries the longest batch, trains, and writes the result; gives the fields of the
    `result` message.

    Every rank calls it. The process group stays open: `close_group` closes it after the result has
    been reported.
    """
    place = find_place(plan, read_environment())
    if place.rank > 0:
        report = OtherRankReporter(report)
    run = set_up(plan.of_rank(place.rank), place, report, stop, beats or Beats(), hooks)
    if plan.config.adapter is not None:
        run.snapshots = MemorySnapshots(snapshot_fd)
    with contextlib.closing(run.source), StorageWatch(run.saver, report, run.beats) as run.storage:
        try:
            return _train_and_finish(run)
        except Exception:  # raised again after the save in flight has ended
            # With several ranks the others would wait for a rank that has failed.
            if run.group.world_size == 1:
                # The failure that ended the run is reported, not one of the save.
                with contextlib.suppress(Exception):
                    run.saver.wait()
            raise
        finally:
            _close(run, run.storage)


def _ready_facts(run: Run, *, peak: int, kept_every: int | None) -> dict[str, object]:
    """Facts that only the worker knows before step 1, for the first screen."""
    loaded, forward = run.forward.loaded, run.forward
    padded = forward.padded if family_of(run.plan.model).decodes_tokens else ""
    return {
        "parameters": loaded.parameters,
        "trainable": loaded.trainable_parameters,
        "parts": loaded.count_parts(),
        "dtype": run.plan.dtype,
        "layout": forward.layout,
        "head": forward.head,
        "why": forward.why,
        "padded": padded,
        "padding": run.source.padding() if padded else None,
        "quick": forward.quick,
        "fast_layers": forward.fast_layers,
        "graphs": forward.graphs is not None,
        "kernels": has_kernels(run.plan.dtype, run.device),
        "no_kernels": why_no_kernels(run.plan.dtype, run.device),
        "peak_bytes": peak,
        "resumed_step": run.state.step,
        "threads": torch.get_num_threads(),
        "kept_every": kept_every,
    }


def _close(run: Run, storage: StorageWatch) -> None:
    if run.metrics is not None:
        with storage.ends_if_stuck("writing metrics.jsonl", run.files.metrics, only_files=True):
            lost = run.metrics.close()
        if lost is not None:
            run.report.warning(
                "metrics_lost",
                f"{run.metrics.waiting} lines of metrics.jsonl could not be written: {storage_words(lost)}"
                f" ({run.files.metrics}); {storage_reason(lost)}",
                fix=storage_remedy(lost, else_="fix the storage"),
            )
    if run.tracker is not None:
        run.tracker.close()
    if run.answer_metrics is not None:
        run.answer_metrics.close()


def _train_and_finish(run: Run) -> dict[str, object]:
    report, stop = run.report, run.stop
    trial = try_longest_batch(run)
    kept_every = (
        run.snapshots.prepare(run, step_time_s=trial.step_time_s) if run.snapshots is not None else None
    )
    report.send({"kind": "ready", "facts": _ready_facts(run, peak=trial.peak_bytes, kept_every=kept_every)})
    stop.training_begins()
    began, tokens_before = time.perf_counter(), run.state.tokens
    ending = train(run) if run.plan.last_step is None else train_again(run)
    seconds = time.perf_counter() - began
    weights, weights_step = None, run.state.step
    if ending.outcome == "completed":
        run.beats.enter("finish")
        weights_step = _take_best(run)
        with averaged(run):
            share = exact_match_share(run)
        if share is not None:
            run.state.eval["exact_match"] = share
        # The rest may take longer than the grace period.
        elif wants_exact_match(run) and run.stopping is not None:
            ending = TrainingEnd(run.stopping, EXIT_CODES[run.stopping])
    if ending.outcome == "completed":
        report.phase("finish", "writing the result")
        run.beats.enter("finish")
        if run.group.is_main and notices_loss(run):  # since its last step
            ending = result_beside(run)
        with averaged(run):
            weights = _write_result(run, weights_step)
    for hook in run.hooks:
        hook.run_ends()
    if not run.group.is_main:
        return {"outcome": ending.outcome, "exit_code": ending.exit_code, "step": run.state.step}
    newest = run.files.checkpoint(run.saved_step) if run.saved_step is not None else None
    return {
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "verdict": ending.verdict.to_json() if ending.verdict else None,
        "step": run.state.step,
        "tokens": run.state.tokens,
        "loss": run.state.loss,
        "eval": run.state.eval,
        "tokens_per_second": (run.state.tokens - tokens_before) / max(seconds, 1e-9),
        "checkpoint": str(newest) if newest else None,
        "weights": str(weights) if weights else None,
    }


def _write_result(run: Run, step: int) -> Path | None:
    assert run.storage is not None
    target = run.files.adapter if run.plan.config.adapter is not None else run.files.model
    with run.storage.ends_if_stuck("writing the result", target):
        if run.group.is_main:
            _report_unchanged_layers(run)
            run.files.result_logits.unlink(missing_ok=True)  # those of an earlier result
        written = write_result(run, step=step)
        if run.plan.config.checkpoint.read_back:
            write_outputs(run)
        return written


def _report_unchanged_layers(run: Run) -> None:
    """Warns of layers whose matrix B is still zero: the model takes their weight without calling
    the layer, or no token has reached them.
    """
    of_layers = {
        name.partition(".lora_B.")[0].removeprefix("base_model.model."): parameter
        for name, parameter in run.forward.loaded.trainable.items()
        if ".lora_B." in name and not isinstance(parameter, DTensor)
    }
    unchanged = [name for name, parameter in of_layers.items() if not parameter.any()]
    if unchanged and len(unchanged) < len(of_layers):
        more = f" and {len(unchanged) - _SHOWN} more" if len(unchanged) > _SHOWN else ""
        run.report.warning(
            "adapter_unchanged",
            f"{len(unchanged)} of {len(of_layers)} adapted layers got no gradient:"
            f" {', '.join(unchanged[:_SHOWN])}{more}",
            fix="set adapter.targets to the other layers, if all rows should have used these",
        )


def _take_best(run: Run) -> int:
    """With `checkpoint.best`: restores the best checkpoint, which may be an earlier one, as the
    result.

    All ranks must call it.

    Gives the step of the weights.
    """
    best = run.state.best_step
    if run.plan.config.checkpoint.best is None or best is None or best == run.state.step:
        return run.state.step
    assert run.storage is not None
    step, line = _find_best(run)
    if step != best and run.group.is_main:
        text = (
            f"the checkpoint of the best step, {best}, is missing; the result comes from step"
            f" {step or run.state.step}"
        )
        run.report.warning("best_is_gone", text)
    if step in (0, run.state.step):
        return run.state.step
    run.report.phase("finish", f"restoring the best checkpoint, step {step}")
    state, saved = run.state, run.saved_step
    path = run.files.checkpoint(step)
    with run.storage.ends_if_stuck("reading the best checkpoint", path):
        # Weights signed by another key may be the result, too; the rest is not used.
        restore(run, path, trust=True)
    run.state, run.saved_step = state, saved
    run.state.eval |= line
    return step


def _find_intact_best(run: Run) -> tuple[int, dict[str, float]] | None:
    metric = run.plan.config.checkpoint.best
    assert run.store is not None
    assert metric is not None
    saved = {step_of(path.name): path for path in run.store.list()}
    while (best := best_evaluated(run.files.metrics, saved, metric=metric)) is not None:
        if not any(finding.is_fatal for finding in run.store.verify(saved[best[0]])):
            return best
        del saved[best[0]]
    return None


def _find_best(run: Run) -> tuple[int, dict[str, float]]:
    """The best step with an intact checkpoint, and on rank 0 the figures of its evaluation; step 0
    if there is none.

    All ranks must call it; rank 0 reads.
    """
    best = on_rank0(
        run,
        partial(_find_intact_best, run),
        what="looking for the best checkpoint",
        path=run.files.checkpoints,
    )
    best_step = torch.tensor(best[0] if best else 0, dtype=torch.int64, device=run.device)
    run.group.broadcast(best_step)
    line = best[1] if best else {}
    figures = {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
    return int(best_step), figures


_RANK_0_KINDS = frozenset({"eval", "sample", "checkpoint"})
_SHARED_WARNINGS = frozenset({"nan_step", "early_stop", "starved_experts"})


class OtherRankReporter(Reporter):
    """The reporter of all ranks but 0: it leaves out what rank 0 reports for all, and reports a
    step by its number only.
    """

    def __init__(self, inner: Reporter) -> None:
        super().__init__(None)
        self._inner = inner

    def send(self, message: Message) -> None:
        """Sends one message, or nothing if rank 0 reports it."""
        if message["kind"] in _RANK_0_KINDS or (
            message["kind"] == "warning" and message.get("code") in _SHARED_WARNINGS
        ):
            return
        if message["kind"] == "step":
            message = {"kind": "step", "step": message["step"]}
        self._inner.send(message)


# ---- The result


def write_result(run: Run, *, step: int) -> Path | None:
    """Writes adapter/ or model/ of the run, the weights of `step`, with tokenizer, chat template
    and a list of the files; gives its path.

    The directory appears complete or not at all. All ranks must call it; rank 0 writes, and the
    others get None.

    Raises:
        UnfitError: if the storage fails; an earlier result stays as it was.
    """
    if not run.group.is_main:
        if run.sharded is not None:
            write_weights(run.forward.loaded, run.plan, Path(), writes=False)
        return None
    target = run.files.adapter if run.plan.config.adapter is not None else run.files.model
    temporary = target.with_name(f".{target.name}.tmp")
    with _refuse_on_storage_error(run, temporary, target):
        if run.directory_check is not None:
            run.directory_check.require(step)
        shutil.rmtree(temporary, ignore_errors=True)
        write_model_manifest(temporary, write_weights(run.forward.loaded, run.plan, temporary, step=step))
        fsync_tree(temporary)
        _put_in_place(temporary, target)
    return target


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.exists():  # the result of an earlier, shorter run that this one has extended
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    fsync_dir(target.parent)


@contextlib.contextmanager
def _refuse_on_storage_error(run: Run, temporary: Path, target: Path) -> Iterator[None]:
    """Refuses with the storage's fault and the checkpoint to resume from: a full disk at the very
    end costs no training.
    """
    try:
        yield
    except Exception as error:  # safetensors has its own for a failed write; others are raised again
        if not isinstance(error, OSError) and error_number(error) is None:
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        why = storage_reason(error)
        if is_full(error):
            with contextlib.suppress(OSError):
                why = (
                    f"the disk is full: {show_bytes(free_bytes(target.parent))} are free without the partial"
                    " result"
                )
        again = f"the same command resumes from the checkpoint of step {run.saved_step}"
        if run.saved_step is None:
            again = "run the same command again"
        problem = Problem(
            f"the result cannot be written to {target}: {storage_words(error)}",
            str(target),
            why,
            f"{storage_remedy(error, else_='fix the storage')}; {again}",
        )
        raise UnfitError(problem, verdict=storage_verdict(error, problem, phase="finish")) from error
