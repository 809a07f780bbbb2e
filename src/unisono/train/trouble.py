"""What is done about a loss or a gradient that is not a number: skip and say it; three in twenty steps end the run, and so does an end without any update."""

from unisono.causes import Evidence, Verdict
from unisono.model.load import odd_parameters
from unisono.train.batches import StepBatches
from unisono.train.run import Run
from unisono.train.step import StepOutcome

LIMIT = 3
WINDOW = 20


def note_skipped_step(run: Run, batches: StepBatches, outcome: StepOutcome) -> None:
    """Says which rows were in the batch that gave no number; the weights are as they were."""
    run.state.skipped = [step for step in run.state.skipped if step > batches.step - WINDOW] + [batches.step]
    what = "loss" if outcome.loss != outcome.loss or abs(outcome.loss) == float("inf") else "gradient"
    if _is_model(run, outcome.odd_ranks):
        run.report.send(
            "warning", code="nan_step", step=batches.step, rows=[], fix=_model_fix(run),
            text=f"step {batches.step} was skipped: its {what} is not a number, before any update: this is the model as it was loaded, not a row",
        )  # fmt: skip
        return
    rows = run.data.row_ids(batches.sequences)
    shown = ", ".join(rows[:16]) + (f" and {len(rows) - 16} more" if len(rows) > 16 else "")
    run.report.send(
        "warning", code="nan_step", step=batches.step, rows=rows, fix="look at these rows; a smaller optim.lr may help",
        text=f"step {batches.step} was skipped: its {what} is not a number{_whose(run, outcome)}; rows {shown}",
    )  # fmt: skip


def _whose(run: Run, outcome: StepOutcome) -> str:
    """Which of several ranks had the rows that gave no number, where the loss tells."""
    if run.group.world_size == 1 or not outcome.odd_ranks:
        return ""
    return " on " + ", ".join(run.plan.ranks[rank].label for rank in outcome.odd_ranks)


def made_no_update(run: Run) -> bool:
    """Whether steps were done, and all of them were skipped. There are at most LIMIT of them then, so none has left the window."""
    return run.state.step > 0 and len(run.state.skipped) == run.state.step


def too_many_skipped(run: Run, batches: StepBatches, outcome: StepOutcome) -> Verdict | None:
    """The verdict that ends the run, or None while it may go on."""
    is_last = run.state.step == run.plan.total_steps
    if len(run.state.skipped) < LIMIT and not (is_last and made_no_update(run)):
        return None
    if _is_model(run, outcome.odd_ranks):
        return model_verdict(run)
    where = run.where
    # A gradient can overflow where every loss is a number; nobody is blamed for it then.
    culprits = outcome.odd_ranks if run.group.world_size > 1 else [0]
    steps = ", ".join(map(str, run.state.skipped))
    among = f"{len(run.state.skipped)} of the last {WINDOW} steps" if run.state.step > LIMIT else "every step"
    return Verdict(
        cause="nan_loss", when="during", ranks=tuple(culprits),
        hosts=tuple(dict.fromkeys(run.plan.ranks[rank].host for rank in culprits)), phase="train", step=batches.step,
        summary=f"loss or gradient was not a number in {among} ({steps}){_whose(run, outcome)}",
        evidence=(
            Evidence(where=where, text=f"steps {steps} were skipped; the weights are those of before step {run.state.skipped[0]} and of the sound steps since"),
            Evidence(where=where, text=f"rows of step {batches.step}: {', '.join(run.data.row_ids(batches.sequences)[:8])}"),
        ),
        fix=(
            f"start again with a smaller learning rate, for example optim.lr={run.plan.config.optim.lr / 4:g}",
            "look at the rows that the warnings name (unisono data preview)",
            "if model.dtype is float16, use bfloat16 or float32",
        ),
    )  # fmt: skip


def _is_model(run: Run, odd_ranks: list[int]) -> bool:
    """Whether the model itself gives NaN: no update was made yet, and it is so on all ranks, which hold the same weights.

    The learning rate has had no effect then, and other rows would give NaN, too. Where some ranks only have NaN, their rows or devices differ.
    """
    return made_no_update(run) and len(odd_ranks) in (0, run.group.world_size)


def model_verdict(run: Run) -> Verdict:
    """The verdict on a run whose steps gave NaN or infinity before any update was made."""
    steps = ", ".join(map(str, run.state.skipped))
    model = run.plan.config.model.path
    odd = odd_parameters(run.forward.loaded.model)
    if odd:
        found = f"{odd[0]} has NaN or infinity in it" + (
            f", and so have {len(odd) - 1} more tensors" if len(odd) > 1 else ""
        )
    else:
        found = (
            f"no weight is NaN or infinite, so the numbers overflow while {run.plan.dtype} is computed with"
        )
    return Verdict(
        cause="nan_loss", when="during", ranks=(), hosts=(), phase="train", step=run.state.step,
        summary=f"the model {model} gives a loss or gradient that is not a number before any update (steps {steps}): nothing was trained",
        evidence=(
            Evidence(where=run.where, text=found),
            Evidence(where=run.where, text="no update was made, so neither the learning rate nor a row is the cause; all ranks hold the same weights"),
        ),
        fix=(_model_fix(run),),
    )  # fmt: skip


def _model_fix(run: Run) -> str:
    model = run.plan.config.model
    if run.plan.dtype == "float32":
        return f"take other weights than those of {model.path}, or download them again"
    return f"set model.dtype to float32 (it is {run.plan.dtype} here); if that does not help, take other weights than those of {model.path}"
