"""The end of a run whose directory was removed, renamed or replaced: the last step is saved in a
new directory beside it.
"""

import contextlib
import os
from pathlib import Path

import torch

from unisono.base.causes import Verdict
from unisono.base.files import make_private_dir
from unisono.trainer.training.front_io import EXIT_CODES, TrainingEnd
from unisono.trainer.training.run import Run
from unisono.trainer.training.saving import finish_saving, open_store, save_checkpoint

_FIX = "end a run first (Ctrl-C), then remove or rename its directory"


def notices_loss(run: Run) -> bool:
    """Whether this rank sees that its directory is gone."""
    return run.directory_check is not None and run.directory_check.is_lost()


def save_beside(run: Run) -> TrainingEnd:
    """Saves the current step where the directory is not lost, and beside it where it is.

    All ranks must call it.
    """
    lost = _lost_nodes(run)
    what = _describe(run, lost)
    run.begun_step = None
    finish_saving(run)  # one in flight fails, and is not tried again
    if lost[_directory_of(run, run.place.node_rank)]:
        _move_beside(run)
    save_checkpoint(run)
    finish_saving(run)
    step = run.state.step
    fixes, saved = [_FIX], f"step {step} is lost: it could not be saved in {run.files.root}"
    if run.saved_step == step:
        again = f"to continue, run the same command with output_dir={run.files.root}"
        fixes = [again if lost[0] else "to continue, run the same command again", _FIX]
        saved = f"step {step} was saved in {run.files.root}"
    return _ending(run, f"{what} after step {step}, while the run was active; {saved}", lost, fixes)


def result_beside(run: Run) -> TrainingEnd:
    """Has rank 0 write the result beside a directory that was lost after the last step."""
    lost = [node.node_rank == 0 for node in run.plan.nodes]
    what = _describe(run, lost)
    _move_beside(run)
    text = f"{what} after the last step, while the run was active; the result was written to {run.files.root}"
    return _ending(run, text, lost, [_FIX])


def _move_beside(run: Run) -> None:
    """From here on this rank writes into the new directory.

    The save that follows reports if it cannot be made.
    """
    run.files, run.directory_check = run.files.rescued(run.plan.run_id), None
    run.saved_step = None
    if run.metrics is not None:
        with contextlib.suppress(OSError):
            make_private_dir(run.files.root)
        run.store = open_store(run.files)
        run.metrics.move_to(run.files.metrics)
        run.report.send({"kind": "moved", "path": str(run.files.root)})


def _ending(run: Run, summary: str, lost: list[bool], fixes: list[str]) -> TrainingEnd:
    verdict = Verdict(
        cause="output_removed",
        when="during",
        severity="fatal",
        summary=summary,
        hosts=tuple(node.host for node, is_lost in zip(run.plan.nodes, lost, strict=True) if is_lost),
        phase="save",
        step=run.state.step,
        fix=tuple(fixes),
    )
    return TrainingEnd("unfit", EXIT_CODES["directory_lost"], verdict)


def _directory_of(run: Run, node_rank: int) -> int:
    """The position of the node whose directory this node's ranks use."""
    position = next(i for i, node in enumerate(run.plan.nodes) if node.node_rank == node_rank)
    return 0 if run.plan.nodes[position].shares_output else position


def _lost_nodes(run: Run) -> list[bool]:
    """Whether the directory of each node is gone. All ranks must call it."""
    seen = torch.zeros(len(run.plan.nodes), device=run.device)
    if notices_loss(run):
        seen[_directory_of(run, run.place.node_rank)] = 1
    run.group.sum(seen)
    return [figure > 0 for figure in run.group.figures(seen)]


def _describe(run: Run, lost: list[bool]) -> str:
    """What happened to the directory."""
    hosts = [node.host for node, is_lost in zip(run.plan.nodes, lost, strict=True) if is_lost]
    root = run.files.root
    if not lost[0] or run.metrics is None:
        return f"on {', '.join(hosts)}: {root} was removed, renamed or replaced"
    file = run.metrics.link
    if file.name.endswith(" (deleted)"):
        return f"{root} was removed"
    now_at = file.parent
    if now_at != Path(os.path.realpath(root)):
        return f"{root} was renamed to {now_at}"
    return f"{run.files.lock} was removed or replaced"
