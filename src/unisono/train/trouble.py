"""What is done about a loss or a gradient that is not a number: skip and say it; three in twenty steps end the run."""

from unisono.causes import Evidence, Verdict
from unisono.train.batches import StepBatches
from unisono.train.run import Run
from unisono.train.step import StepOutcome

LIMIT = 3
WINDOW = 20


def note_skipped_step(run: Run, batches: StepBatches, outcome: StepOutcome) -> None:
    """Says which rows were in the batch that gave no number; the weights are as they were."""
    run.state.skipped = [step for step in run.state.skipped if step > batches.step - WINDOW] + [batches.step]
    what = "loss" if outcome.loss != outcome.loss or abs(outcome.loss) == float("inf") else "gradient"
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


def too_many_skipped(run: Run, batches: StepBatches, outcome: StepOutcome) -> Verdict | None:
    """The verdict that ends the run, or None while it may go on."""
    if len(run.state.skipped) < LIMIT:
        return None
    where = run.where
    # A gradient can overflow where every loss is a number; nobody is blamed for it then.
    culprits = outcome.odd_ranks if run.group.world_size > 1 else [0]
    steps = ", ".join(map(str, run.state.skipped))
    return Verdict(
        cause="nan_loss", when="during", ranks=tuple(culprits),
        hosts=tuple(dict.fromkeys(run.plan.ranks[rank].host for rank in culprits)), phase="train", step=batches.step,
        summary=f"loss or gradient was not a number in {LIMIT} of the last {WINDOW} steps ({steps}){_whose(run, outcome)}",
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
