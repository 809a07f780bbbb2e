"""The kind of a start in a directory: a fresh run, a resume, an extension, or an error.

The decision reads files and changes nothing. Only `set_aside` changes something, for `--fresh`.
"""

import math
import os
import re
import secrets
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from unisono.base.errors import UsageError, require_writable
from unisono.base.files import fsync_dir, kind_of, read_object
from unisono.base.text import Duration, one_line, validation_words
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import iterate_metrics, shown_outcome
from unisono.jobs.runs.config_changes import changes_between, judge_key, not_allowed, refusal
from unisono.trainer.config import RunConfig
from unisono.trainer.config.schema import config_digest
from unisono.trainer.config.training_sections import BatchSection

CONFIG_HEADER = "# Written by unisono"
"""The first line of a config.yaml by unisono; a config written by hand is never overwritten."""

_TEMPORARY = re.compile(
    r"\..+\.tmp-[0-9]+-[0-9a-f]+|\.unisono-head-[0-9a-f]+"
)  # of files.whole_file; of a head that was killed


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The kind of a start.

    Attributes:
        kind: fresh: there is nothing to resume; resume: an unfinished run; extend: a finished one
            with a longer duration.
        run_id: the same over all starts of a run.
        reason: one line for the first screen.
        done_steps: steps of the finished run that is extended; 0 otherwise.
        earlier_batch: `global_batch` and `batch_of_ranks` of the plan of the run that continues.
    """

    kind: Literal["fresh", "resume", "extend"]
    run_id: str
    reason: str
    done_steps: int = 0
    earlier_batch: tuple[int, tuple[int, int] | None] | None = None


def decide_start(
    run: RunDir,
    config: RunConfig,
    *,
    resume: bool,
    fresh: bool,
    allow: frozenset[str] = frozenset(),
    origins: Mapping[str, str] | None = None,
) -> StartDecision:
    """Decides from the files in the directory; changes nothing.

    Args:
        config: the requested one, with paths as in config.yaml.
        resume: `--resume`: also start in an empty directory, and extend a finished run.
        fresh: `--fresh`: an existing run will be renamed.
        allow: permitted changes, from `read_allowed`.
        origins: where keys of the config were set, for messages.

    Raises:
        UsageError: if the directory holds a finished or a different run, no run at all, or cannot
            be used.
    """
    if resume and fresh:
        raise UsageError.of(
            "--resume and --fresh exclude each other", where="command line", fix="pass only one of them"
        )
    _check_place(run.root)
    plan = _plan_of(run)
    if plan is None:
        _refuse_foreign_files(run)
    if not fresh:
        _refuse_special_files(run)
    if fresh or plan is None:
        return StartDecision("fresh", _new_run_id(), _why_fresh(run, fresh=fresh and plan is not None))
    decision = _decide_resume(run, plan, config, resume=resume, allow=allow, origins=origins)
    return decision if decision.kind == "fresh" else replace(decision, earlier_batch=_batch_of(plan))


def _batch_of(plan: Mapping[str, object]) -> tuple[int, tuple[int, int] | None] | None:
    size, of_ranks = plan.get("global_batch"), plan.get("batch_of_ranks")
    if not isinstance(size, int):
        return None
    if isinstance(of_ranks, list) and [type(part) for part in of_ranks] == [int, int]:
        return size, (of_ranks[0], of_ranks[1])
    return size, None


def set_aside(run: RunDir) -> Path:
    """Renames the run's directory to OUT.old-N and returns the new path. Nothing is deleted.

    Raises:
        UsageError: if it cannot be renamed.
    """
    target = next_old(run.root)
    try:
        run.root.rename(target)
        RunDir(target).lock.unlink(missing_ok=True)  # of this start, which takes a new lock at the old path
        fsync_dir(target.parent)
    except OSError as error:
        raise UsageError.of(
            f"{run.root} cannot be renamed to {target.name}: {error.strerror}",
            where="output_dir",
            fix="set a different output_dir",
        ) from error
    return target


def next_old(root: Path) -> Path:
    """The first of OUT.old-1, OUT.old-2 … that does not exist."""
    number = 1
    while os.path.lexists(root.with_name(f"{root.name}.old-{number}")):
        number += 1
    return root.with_name(f"{root.name}.old-{number}")


def refuse_if_shrunk(decision: StartDecision, *, done_steps: int, total_steps: int) -> None:
    """Refuses a duration below the completed steps.

    Called once the data is prepared and the steps are known.

    Args:
        done_steps: the step of the checkpoint to resume from, 0 without one.

    Raises:
        UsageError: if the run would lose steps, or an extension adds none.
    """
    done = max(done_steps, decision.done_steps)
    if total_steps < done or (decision.kind == "extend" and total_steps == done):
        raise UsageError.of(
            f"the duration is {total_steps} steps, but {done} are already done",
            where="duration",
            why="a run can be resumed or extended, but not lose steps",
            fix="set a longer duration, or a different output_dir, or pass --fresh",
        )


def _check_place(root: Path) -> None:
    """Checks that the directory can be used or created."""
    try:
        root.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise UsageError.of(
            f"output_dir cannot be used: {getattr(error, 'strerror', None) or error}",
            where=f"output_dir: {root}",
            why="everything that a run makes is below it",
            fix="set output_dir to a different path",
        ) from None
    require_writable(
        root,
        where="output_dir",
        why=f"the run's directory would be {root}",
        fix="set output_dir to a directory that you may write",
    )


def _refuse_special_files(run: RunDir) -> None:
    """Refuses special files in the place of files that a run writes: the ranks would fail in the
    middle of the run.
    """
    written = (
        run.config,
        run.plan,
        run.environment,
        run.agreement,
        run.data,
        run.metrics,
        run.result,
        run.verdict,
        run.curve,
        *run.events(0).parent.glob("rank-*.jsonl"),
        *run.log("", 0).parent.glob("*-rank-*"),
    )
    for path in written:
        mode = path.stat().st_mode if path.exists() else stat.S_IFREG
        if not stat.S_ISREG(mode):
            raise UsageError.of(
                f"{path} is {kind_of(mode)}, not a regular file",
                where="output_dir",
                why="a run writes its own file there",
                fix=(
                    f"restore the file or remove what is in its place (rm -r {shlex.quote(str(path))}), or"
                    " set a different output_dir, or pass --fresh"
                ),
            )


def _refuse_foreign_files(run: RunDir) -> None:
    """Refuses a directory without a plan that has files other than those of an early failed
    start.
    """
    if not run.root.is_dir():
        return
    if run.bringing.exists():  # a partial copy of a killed start is overwritten
        return
    if _has_checkpoints(run):
        raise UsageError.of(
            f"{run.root} holds checkpoints, but no plan that can be read",
            where=str(run.plan),
            why="without it the run of the checkpoints is unknown",
            fix=f"restore {run.plan.name}, or set a different output_dir",
        )
    foreign = [
        name
        for name in sorted(entry.name for entry in run.root.iterdir())
        if not _is_left_by_a_start(run, name)
    ]
    if foreign:
        raise UsageError.of(
            f"{run.root} is not empty, and is not a run of unisono: it holds {_list_some(foreign)}",
            where="output_dir",
            why="nothing there is overwritten or renamed",
            fix="set output_dir to a different directory",
        )


def _is_left_by_a_start(run: RunDir, name: str) -> bool:
    """Whether a start that ended before its plan may have left this."""
    path = run.root / name
    if path in (run.environment, run.agreement, run.data):
        return read_object(path).get("schema") == 1
    if path in (run.result, run.verdict):  # of a disagreement
        return read_object(path).get("outcome", "disagreed") == "disagreed"
    if path == run.config:
        return _starts_with(path, CONFIG_HEADER)
    folders = (
        run.checkpoints,
        run.events(0).parent,
        run.log("", 0).parent,
        run.verdicts,
        run.evidence,
        run.slurm,
    )
    return path == run.lock or (path in folders and path.is_dir()) or _TEMPORARY.fullmatch(name) is not None


def _has_trained(run: RunDir) -> bool:
    """Whether anything could be lost: a step, a checkpoint, final weights."""
    return (
        _has_checkpoints(run)
        or next(iterate_metrics(run.metrics), None) is not None
        or run.adapter.exists()
        or run.model.exists()
        or read_object(run.result).get("outcome") == "completed"
    )


def _has_checkpoints(run: RunDir) -> bool:
    return run.checkpoints.is_dir() and any(run.checkpoints.glob("step-*"))


def _why_fresh(run: RunDir, *, fresh: bool) -> str:
    if fresh:
        return "fresh, as requested: the earlier run is renamed"
    if run.config.exists() or run.data.exists():
        return "fresh: an earlier start ended before its plan was made"
    return "fresh"


def _decide_resume(
    run: RunDir,
    plan: Mapping[str, object],
    config: RunConfig,
    *,
    resume: bool,
    allow: frozenset[str],
    origins: Mapping[str, str] | None,
) -> StartDecision:
    before = _in_form_of(config, _config_of(run, plan), plan)
    if config_digest(before) != config_digest(config):
        if not _has_trained(run):  # so a fix, e.g. a smaller micro batch, can be tried in place
            return StartDecision(
                "fresh", _new_run_id(), "fresh: a start with a different config ended before its first step"
            )
        _refuse_another_run(run, before, config, allow, origins)
    result = read_object(run.result)
    if result.get("outcome") == "completed":
        return _decide_finished(run, plan, before, config, result, resume=resume)
    ended = result.get("outcome")
    reason = "resuming the unfinished run"
    if isinstance(ended, str):
        reason += f" ({one_line(shown_outcome(ended, result.get('verdict')), limit=40)})"
    if before.duration != config.duration:
        reason = (
            f"{reason} with a new duration, {config.duration} instead of {before.duration}, which the learning"
            " rate schedule follows"
        )
    return StartDecision("resume", str(plan["run_id"]), reason)


def _decide_finished(
    run: RunDir,
    plan: Mapping[str, object],
    before: RunConfig,
    config: RunConfig,
    result: Mapping[str, object],
    *,
    resume: bool,
) -> StartDecision:
    done = _int_or_zero(result.get("step"))
    old, new = Duration.parse(before.duration), Duration.parse(config.duration)
    grew = new.unit != old.unit or new.amount > old.amount
    # an extension that ended before its first step left the longer plan and the old result
    unfinished = _int_or_zero(plan.get("total_steps")) > done
    shrank = new.unit == old.unit and new.amount < old.amount
    if resume and (grew or (unfinished and not shrank)):
        return StartDecision(
            "extend",
            str(plan["run_id"]),
            f"extends the finished run here from {done} steps to {config.duration}",
            done,
        )
    longer = "set a longer duration and --resume to extend it"
    raise UsageError.of(
        f"the run in {run.root} is finished: {done} steps, duration {before.duration}",
        where="output_dir",
        why=f"the requested duration is {config.duration}" if resume else "a finished run is not overwritten",
        fix=(
            f"{longer}, or set a different output_dir, or pass --fresh: it renames this one to"
            f" {next_old(run.root).name}"
        ),
    )


def _refuse_another_run(
    run: RunDir,
    before: RunConfig,
    config: RunConfig,
    allow: frozenset[str],
    origins: Mapping[str, str] | None,
) -> None:
    """Refuses settings that make a different run and are not allowed; contents are compared once
    they are known.
    """
    findings = [judge_key(change) for change in changes_between(before, config)]
    refused = not_allowed([finding for finding in findings if finding is not None], allow)
    if refused:
        raise refusal(refused, root=str(run.root), new_name=next_old(run.root).name, origins=origins)


def _plan_of(run: RunDir) -> dict[str, object] | None:
    plan = read_object(run.plan)
    is_ours = (
        plan.get("schema") == 1
        and isinstance(plan.get("run_id"), str)
        and isinstance(plan.get("config"), dict)
    )
    return plan if is_ours else None


def _config_of(run: RunDir, plan: Mapping[str, object]) -> RunConfig:
    try:
        return RunConfig.model_validate(plan["config"])
    except ValidationError as error:
        raise UsageError.of(
            f"the run in {run.root} has a config that this version of unisono cannot read",
            where=str(run.plan),
            why=validation_words(error),
            fix=(
                "resume with the version that started it (environment.json), or set a different output_dir,"
                " or pass --fresh"
            ),
        ) from error


def _in_form_of(config: RunConfig, before: RunConfig, plan: Mapping[str, object]) -> RunConfig:
    """The earlier config with its batch as `per_rank` and `accumulate`, if the new one has it so:
    only these are compared, not the ranks.
    """
    requested, earlier = config.batch.of_ranks, _batch_of(plan)
    if requested is None or earlier is None:
        return before
    size, of_ranks = earlier
    if of_ranks is None and size == math.prod((*requested, _int_or_zero(plan.get("world_size")))):
        of_ranks = requested  # the run was started with this `global`
    if of_ranks is None:
        return before
    # The same product in other factors is the same run: a smaller `per_rank` after running out of
    # memory.
    batch = (
        config.batch
        if math.prod(of_ranks) == math.prod(requested)
        else BatchSection(per_rank=of_ranks[0], accumulate=of_ranks[1])
    )
    return before.model_copy(update={"batch": batch})


def _starts_with(path: Path, text: str) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(text.encode())) == text.encode()
    except OSError:
        return False


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def _list_some(names: list[str]) -> str:
    shown = ", ".join(one_line(name, limit=60) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
