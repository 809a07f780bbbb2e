"""The training loop: what happens in a run, in order; and below it one optimizer step: the micro
batches of a global batch, clip, update.

    loss = Σ over the units of the global batch of their loss / their number

A unit is a loss token, a pair, or a rated answer (see `objectives.objective`). Each micro batch
contributes its sum divided by the global number, so gradients add up to those of the global batch
for any number of micro batches and ranks.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from unisono.base.causes import Verdict
from unisono.base.messages import EvalMessage, StepMessage, message_of
from unisono.guard.rundir.records import best_key
from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.batches.source import Micro, MicroBatch, SourceFailed, SourceStopped, StepBatches
from unisono.trainer.model.forward import Rows
from unisono.trainer.objectives.user_objective import OwnPart
from unisono.trainer.plan.families import family_of
from unisono.trainer.plan.schedule import factor_at
from unisono.trainer.training.evaluation import (
    evaluate_rows,
    exact_match_share,
    first_sum,
    metric_figures,
    show_samples,
)
from unisono.trainer.training.front_io import EXIT_CODES, TrainingEnd, outcome_of
from unisono.trainer.training.lost_directory import notices_loss, save_beside
from unisono.trainer.training.optim import clipping_factor, total_norm
from unisono.trainer.training.router_step import (
    RouterStep,
    router_figures,
    step_tokens,
    warn_of_starved_experts,
)
from unisono.trainer.training.run import Run, embedding_noise
from unisono.trainer.training.saving import (
    averaged,
    finish_saving,
    require_checkpoint,
    save_checkpoint,
    wait_for_copies,
)
from unisono.trainer.training.sharding import own_part
from unisono.trainer.training.step_sums import StepSums, encode_step
from unisono.trainer.training.training_checks import (
    StepOutcome,
    is_out_of_memory,
    lasting_trouble,
    made_no_update,
    model_verdict,
    note_skipped_step,
    out_of_memory,
    peak_bytes,
    report_weights_digest,
    too_many_skipped,
)


def train(run: Run) -> TrainingEnd:
    """Trains from the state's step to the plan's last, or until a stop request.

    All ranks must call it.

    All ranks take the same decisions: these depend on the state, which comes from sums over the
    ranks, and on the agreed stop request.
    """
    try:
        ending = _train(run)
    except SourceFailed as error:  # between two steps, on all ranks
        save_checkpoint(run)
        finish_saving(run)
        verdict = error.verdict.model_copy(update={"step": run.state.step + (not run.state.evaluation_due)})
        ending = TrainingEnd("stalled", 4, verdict)
    if ending.verdict is None and run.group.any(notices_loss(run)):
        return save_beside(run)
    if ending.outcome != "completed" and ending.verdict is None:
        require_checkpoint(run)
    return ending


def _train(run: Run) -> TrainingEnd:
    if run.state.step == 0 and not any(name.endswith("_before") for name in run.state.eval):
        _measure_before(run)
    while _has_work(run):
        # An evaluation that is already due was cut short by a stop before the resume.
        verdict = None if run.state.evaluation_due else _advance(run)
        if verdict is not None:
            finish_saving(run)  # a save started before is still good
            return TrainingEnd("stalled", 4, verdict)
        if run.state.evaluation_due:
            _evaluate(run)
        if run.stopping is not None and _has_work(run):  # after the last step the result comes first
            if run.stopping != "directory_lost":
                save_checkpoint(run)
                finish_saving(run)
            return TrainingEnd(run.stopping, EXIT_CODES[run.stopping])
        if _is_due(run.plan.checkpoint_every, run.state.step) or _is_rehearsed(run) or not _has_work(run):
            save_checkpoint(run)
    finish_saving(run)
    if made_no_update(run):  # stopped early, or resumed after its last step
        return TrainingEnd("stalled", 4, model_verdict(run))
    if _stops_early(run):
        _report_early_stop(run)
    return TrainingEnd()


def train_again(run: Run) -> TrainingEnd:
    """Repeats the steps up to the plan's `last_step`, without evaluations or saves, so that losses
    can be compared.

    All ranks must call it.
    """
    assert run.plan.last_step is not None
    while run.state.step < run.plan.last_step and run.stopping is None:
        _advance(run)
    if run.stopping is not None:
        return TrainingEnd(run.stopping, EXIT_CODES[run.stopping])
    return TrainingEnd("replayed")


def _has_work(run: Run) -> bool:
    """Whether a step or an evaluation is left.

    It depends on the state alone, so it is the same after resuming.
    """
    return run.state.evaluation_due or (run.state.step < run.plan.total_steps and not _stops_early(run))


def _stops_early(run: Run) -> bool:
    """Whether eval_loss has not improved for the `eval.stop_after` latest evaluations."""
    patience = run.plan.config.eval.stop_after
    return patience is not None and run.state.evals_since_best >= patience


def _advance(run: Run) -> Verdict | None:
    """Does the next optimizer step; gives a verdict if the run must end."""
    run.beats.begin_step(run.state.step + 1)
    run.beats.enter("data")
    if notices_loss(run):
        run.stop.outcome = "directory_lost"
    for hook in run.hooks:
        hook.step_begins(run.state.step + 1)
    began = time.perf_counter(), time.process_time()
    try:
        batches = run.source.step(run.state.step + 1)
    except SourceStopped as stop:  # before anything of the step was done
        run.agreed_stop = outcome_of(stop.flags)
        return None
    run.beats.note_batch(batches.sequences)
    try:
        outcome = optimizer_step(run, batches, began=began)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        family = family_of(run.plan.model)
        shape = family.step_shape(len(batches.sequences), batches.tokens, batches.rounds)
        raise out_of_memory(run, error, shape=shape, phase="train") from error
    run.state.step = batches.step
    run.state.tokens += batches.tokens
    run.state.loss_tokens += batches.counts.loss_tokens
    last = run.state.step == run.plan.total_steps
    evaluates = run.evaluation is not None or bool(run.plan.config.diffusion.prompts)
    run.state.evaluation_due = evaluates and (last or _is_due(run.plan.eval_every, run.state.step))
    if not outcome.is_sound:
        note_skipped_step(run, batches, outcome)
    warn_of_starved_experts(run, outcome.routers)
    _log_step(run, outcome, batches)
    report_weights_digest(run)
    _report_moved_generators(run)
    _report_graphs(run)
    judge = lasting_trouble if outcome.is_sound else too_many_skipped
    return judge(run, batches, outcome)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _is_rehearsed(run: Run) -> bool:
    """Whether the front reads the checkpoint of this step back, so that a save that fails is known
    before hours of training.
    """
    return run.state.step == run.plan.rehearsed_step


def _measure_before(run: Run) -> None:
    """Measures the figures before step 1, to compare with those at the end."""
    figures = _figures(run)
    if figures is not None:
        run.state.eval |= {f"{name}_before": value for name, value in figures.items()}
    share = exact_match_share(run)
    if share is not None:
        run.state.eval["exact_match_before"] = share
    if figures is not None:
        run.report.send(message_of(EvalMessage, {"step": 0, **_named(figures), "exact_match": share}))
    show_samples(run, step=0)


def _evaluate(run: Run) -> None:
    """Measures loss and metrics on the evaluation rows, and saves the state if it is the best."""
    if run.evaluation is None:  # there is nothing to measure, only pictures to draw
        run.state.evaluation_due = False
        with averaged(run):
            show_samples(run, step=run.state.step)
        return
    with averaged(run):
        figures = _figures(run)
    if figures is None:  # a stop request cut it short; evaluation_due stays set, and is saved
        return
    state = run.state
    state.evaluation_due = False
    state.eval |= figures
    line = {"step": state.step, **_named(figures)}
    key, sign = best_key(run.plan.config.best_metric)
    value = float(line.get(key, math.nan))
    if math.isfinite(value) and (state.best_loss is None or sign * value < sign * state.best_loss):
        state.best_loss, state.best_step, state.evals_since_best = value, state.step, 0
    else:
        state.evals_since_best += 1
    if run.snapshots is not None:
        run.snapshots.publish(run, line)
    _keep_line(run, line)
    run.report.send(message_of(EvalMessage, {**line, "best": state.best_step == state.step}))
    if run.tracker is not None:
        run.tracker.scalars(state.step, {f"eval/{name}": value for name, value in figures.items()})
    with averaged(run):
        show_samples(run, step=state.step)
    if run.plan.config.checkpoint.best and state.best_step == state.step:
        save_checkpoint(run)


def _figures(run: Run) -> dict[str, float] | None:
    """All figures of an evaluation; None if there are none, or after a stop request."""
    figures = evaluate_rows(run)
    if figures is None:
        return None
    of_answers = metric_figures(run)
    return None if of_answers is None else figures | of_answers


def _named(figures: dict[str, float]) -> dict[str, float]:
    """The figures of an evaluation as they are named beside those of a step."""
    return {f"eval_{name}": value for name, value in figures.items()}


def _report_early_stop(run: Run) -> None:
    state = run.state
    name, _ = best_key(run.plan.config.best_metric)
    run.report.warning(
        "early_stop",
        f"{name} has not improved in {state.evals_since_best} evaluations; "
        + (
            f"the best, {state.best_loss:.4f}, was at step {state.best_step}"
            if state.best_loss is not None
            else "none was finite"
        ),
    )


def _log_step(run: Run, outcome: StepOutcome, batches: StepBatches) -> None:
    run.beats.enter("log")
    state = run.state
    state.loss = outcome.loss
    line = {
        "step": state.step,
        "epoch": state.step / run.plan.steps_per_epoch,
        "loss": outcome.loss,
        **outcome.metrics,
        "lr": outcome.lr,
        "grad_norm": outcome.grad_norm,
        "tokens": state.tokens,
        "loss_tokens": state.loss_tokens,
        "tokens_per_second": batches.tokens / outcome.step_time_s,
        "step_time_s": outcome.step_time_s,
        "data_time_s": outcome.data_time_s,
        "comm_time_s": outcome.comm_time_s,
        "cpu_time_s": outcome.cpu_time_s,
        "memory_bytes": peak_bytes(run.device),
        **batches.figures,
    }
    if run.snapshots is not None:  # first: a step that was shown must not be lost
        run.snapshots.publish(run, line, step_time_s=outcome.step_time_s)
    _keep_line(run, line)
    run.report.send(message_of(StepMessage, line))
    if run.tracker is not None:
        names = ("loss", *outcome.metrics, "lr", "grad_norm", "tokens_per_second")
        run.tracker.scalars(state.step, {f"train/{name}": float(line[name]) for name in names})


def _keep_line(run: Run, line: dict[str, float]) -> None:
    """Writes a line of metrics.jsonl on rank 0.

    If the storage does not respond, the run ends here: a step that was shown must be on disk.
    """
    if run.metrics is not None:
        assert run.storage is not None
        with run.storage.ends_if_stuck("writing metrics.jsonl", run.files.metrics, only_files=True):
            run.metrics.append(line)


def _report_moved_generators(run: Run) -> None:
    for name in run.generator_watch.moved():
        run.report.warning(
            "global_random_state",
            f"some code drew from {name} during step {run.state.step}: unisono does not use it, and cannot"
            " resume it exactly",
            fix="give that code its own generator",
        )


def _report_graphs(run: Run) -> None:
    graphs = run.forward.graphs
    if graphs is not None and graphs.why:
        run.forward.graphs = None
        run.report.warning(
            "cuda_graphs",
            f"steps are computed without CUDA graphs, which is slower for a small model: {graphs.why}",
        )


def optimizer_step(run: Run, batches: StepBatches, *, began: tuple[float, float]) -> StepOutcome:
    """Does one step; updates nothing if the loss or the gradient is NaN or infinite.

    All ranks must call it.

    Args:
        run: the run.
        batches: of the step.
        began: when its source was asked for them: by time.perf_counter, and time.process_time.
    """
    section = run.plan.config.optim
    factor = factor_at(run.plan, batches.step)
    run.optimizers.set_factor(factor)
    run.gradient_sync.begin()
    known = _known_first(run, batches)
    total, sums, origin, data_time = _add_up(run, batches, known=known)
    for hook in run.hooks:
        hook.gradients_computed(batches.step)
    numbers = encode_step(
        total,
        sums,
        origin,
        stop=run.stop.outcome,
        rank=run.group.rank,
        world_size=run.group.world_size,
    )
    summed = run.gradient_sync.finish(numbers)
    norm = _norm(run)
    # The only wait for the device after the backward: these figures decide whether the update is
    # made, and whether it is the last.
    run.gradient_sync.wait_for_own_part()
    step = StepSums.decode(run.group.figures(summed), world_size=run.group.world_size)
    norm_value = float(norm)
    figures, routers = (
        step.metrics[: 2 * len(run.objective.metrics)],
        step.metrics[2 * len(run.objective.metrics) :],
    )
    comm_time = run.gradient_sync.wait_and_time()
    run.agreed_stop = step.stop
    run.beats.enter("update")
    if math.isfinite(step.loss) and math.isfinite(norm_value):
        wait_for_copies(run)
        run.optimizers.step(clipping_factor(norm, section.max_grad_norm))
    run.optimizers.zero_grad()
    return StepOutcome(
        loss=step.loss,
        grad_norm=norm_value,
        lr=section.lr * factor,
        data_time_s=data_time,
        step_time_s=time.perf_counter() - began[0],
        cpu_time_s=time.process_time() - began[1],
        comm_time_s=comm_time,
        odd_ranks=step.odd_ranks,
        origin_of_nan=step.origin_of_nan,
        metrics=run.objective.figures(figures, known=known) | router_figures(run, routers),
        routers=routers,
    )


def _micros(run: Run, batches: StepBatches) -> list[tuple[MicroBatch, bool]]:
    """The micro batches of this rank, each with whether its loss counts."""
    micros = [(micro, True) for micro in batches.micros]
    if run.gradient_sync.needs_equal_rounds:
        # Every forward is collective, so a rank without rows runs one whose loss does not count.
        micros += [(run.source.shortest(), False) for _ in range(batches.rounds - len(micros))]
    return micros


def _known_first(run: Run, batches: StepBatches) -> float:
    """What the objective needs of the whole global batch before its loss, a mean over units;
    without gradient and dropout.
    """
    if not run.objective.first_sides:
        return 0.0

    def micros() -> Iterator[tuple[Micro, bool]]:
        for group, counts in _micros(run, batches):
            run.beats.enter("compute")
            yield group.load(run.objective.first_sides), counts

    own = first_sum(run, micros())
    summed = torch.tensor([own], dtype=torch.float64, device=run.device)
    run.group.sum(summed)  # all ranks participate
    return run.group.figures(summed)[0] / batches.counts.units


def _add_up(
    run: Run, batches: StepBatches, *, known: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Runs forward and backward on this rank's micro batches.

    Gives the sums of their losses, of metrics and routers, the origin of NaN (see
    `OwnPart.origin_of_nan`), and seconds spent on data.
    """
    micros = _micros(run, batches)
    routers = RouterStep(run, tokens=step_tokens(run, batches), group=run.group)
    routers.count_first(batches, micros, partial(_load, run))
    forwards_all = run.gradient_sync.needs_equal_rounds or routers.has_loss
    objective = run.objective
    total, origin = torch.zeros((), device=run.device), torch.zeros((), device=run.device)
    sums = torch.zeros(2 * len(objective.metrics), device=run.device)
    data_time = 0.0
    for number, (group, is_counted) in enumerate(micros, start=1):
        run.beats.begin_micro(group.sequences)
        before = time.perf_counter()
        micro = _load(run, group)
        data_time += time.perf_counter() - before
        run.beats.enter("compute")
        for hook in run.hooks:
            hook.forward_begins(batches.step, micro if is_counted else None, is_first=number == 1)
        seed_torch(run.plan.config.seed, "dropout", group.places[0])
        run.generator_watch.torch_was_seeded()
        if number == len(micros):
            run.gradient_sync.before_last_backward()
        if is_counted and micro.rows.pictures is not None:
            run.gradient_sync.note_pictures()
        if len(micro.rows.labels) or forwards_all:
            part = objective.loss(run.forward, micro, counts=batches.counts, known=known)
            loss = routers.added_to(part.loss, is_counted=is_counted)
            for hook in run.hooks:
                loss = hook.loss_computed(batches.step, loss)
            if is_counted:
                sums += part.sums
            else:
                loss = loss * 0.0
            if loss.requires_grad:  # not of text, if only what reads pictures is trained
                loss.backward()
            total += loss.detach()
            if isinstance(part, OwnPart):
                origin = torch.maximum(origin, part.origin_of_nan())
    return total, torch.cat([sums, routers.finish()]), origin, data_time


def _load(run: Run, group: MicroBatch) -> Micro:
    """The units of a micro batch."""
    micro = group.load(run.objective.sides)
    return replace(micro, rows=_with_noise(run, micro.rows, group))


def _with_noise(run: Run, rows: Rows, group: MicroBatch) -> Rows:
    """The rows with noise for their embeddings, if the config asks for it."""
    alpha = run.plan.config.model.embedding_noise
    if not alpha:
        return rows
    noise = embedding_noise(
        alpha,
        seed=run.plan.config.seed,
        places=group.places,
        tokens=_tokens_of(rows, group.units),
        lengths=rows.lengths,
        hidden_size=run.forward.loaded.base.get_input_embeddings().weight.shape[1],
        device=run.device,
    )
    return replace(rows, noise=noise)


def _tokens_of(rows: Rows, units: list[int]) -> list[int]:
    """Tokens of each sequence in these rows, which may lack a side of each unit."""
    sides = len(rows.lengths) // sum(units)
    ends = np.cumsum([0, *units]) * sides
    return [sum(rows.lengths[first:end]) for first, end in pairwise(ends.tolist())]


def _norm(run: Run) -> torch.Tensor:
    """The norm of the gradient. All ranks must call it."""
    gradients = [p.grad for p in run.forward.loaded.trainable.values() if p.grad is not None]
    norm = total_norm([own_part(gradient) for gradient in gradients])
    if run.plan.mesh.norm_axes:
        squared = norm.square().to(run.device)
        run.group.sum(squared)
        norm = squared.sqrt()
    return norm
