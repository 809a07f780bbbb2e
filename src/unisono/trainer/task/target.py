"""Finds what RUN|MODEL on a command line means: a run's final weights, one of its checkpoints, a
model, an adapter.

Without torch.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from unisono.base.errors import IntegrityError, ModelError, Problem, UsageError
from unisono.base.events import Reporter
from unisono.base.files import read_json, read_object
from unisono.base.text import why_unreadable
from unisono.base.user_key import user_key
from unisono.guard.facts import read_environment
from unisono.guard.rundir import MODEL_MANIFEST, RunDir, or_nearest_run, runs_beside
from unisono.trainer.checkpoint.store import CheckpointStore, IntactCheckpoint
from unisono.trainer.checkpoint.verify import check_model, listed_files, read_digest
from unisono.trainer.config.heads import EMBED, SequenceHead
from unisono.trainer.config.sections import Thinking
from unisono.trainer.families import files_of
from unisono.trainer.families.text.input_files import adapter_settings, check_adapter
from unisono.trainer.model.directory import (
    adapter_head,
    is_classifier,
    locate_model,
    read_model_config,
    stored_head,
)
from unisono.trainer.model.files import check_directory
from unisono.trainer.model.sentence_files import is_embedding_model
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import RequestedModel
from unisono.trainer.task.input_digests import Digested, DigestProgress, digest_files

Source = Literal["model", "adapter", "checkpoint"]


@dataclass(frozen=True)
class Target:
    """Weights that can be loaded.

    Attributes:
        name: RUN|MODEL as given on the command line.
        source: the kind of the directory `weights`.
        weights: the directory of a model, an adapter, or a checkpoint.
        base: the base model of an adapter or checkpoint; for a model the same as `weights`.
        plan: of the run, if it is one.
        description: one line for the user.
        notes: warnings for the user.
        template: `lf:NAME`, a template of LLaMA-Factory, instead of the one that it was trained
            with.
        thinking: as data.thinking, for such a template.
        default_system: as data.system, for such a template.
        merged: the directories of adapters that are merged into the base model before this one is
            put on it.
        step: of a checkpoint.
    """

    name: str
    source: Source
    weights: Path
    base: Path
    plan: RunPlan | None
    description: str
    notes: tuple[str, ...] = ()
    template: str | None = None
    thinking: Thinking = None
    default_system: str | None = None
    merged: tuple[Path, ...] = ()
    step: int | None = None

    @property
    def embeds(self) -> bool:
        """Whether it is an embedding model, which writes no answers."""
        if self.plan is not None:
            return self.plan.config.objective == EMBED
        return is_embedding_model(self.weights)

    @property
    def head(self) -> SequenceHead | None:
        """The head of a reward model or classifier, which writes no answers; None for a language
        model.
        """
        if self.plan is not None:
            return self.plan.head
        if self.source == "adapter":
            has_head = adapter_settings(self.weights).get("task_type") == "SEQ_CLS"
            return adapter_head(self.weights) if has_head else None
        settings = read_model_config(self.weights)
        return stored_head(settings) if is_classifier(settings) else None


def requested_target(request: RequestedModel) -> Target:
    """Finds what a task's request names.

    Raises:
        UnisonoError: as `find_target`; UsageError if one of several adapters is not finished.
    """
    base, names = request.base, request.merged
    target = replace(
        find_target(request.target, step=request.step, base=base),
        template=request.template,
        thinking=request.thinking,
        default_system=request.default_system,
    )
    if not names:
        return target
    _refuse_checkpoint(target)
    return replace(
        target,
        merged=tuple(_refuse_checkpoint(find_target(name, base=base)).weights for name in names),
        description=f"{target.description}, with {', '.join(names)} merged",
    )


def _refuse_checkpoint(target: Target) -> Target:
    """The target, which must be an adapter, since it is one of several.

    Raises:
        UsageError: if it is a checkpoint of an unfinished run.
    """
    if target.source != "adapter":
        raise UsageError.of(
            f"{target.name} is not a finished adapter",
            where=str(target.weights),
            why="several adapters are merged into the model, one after the other",
            fix=f"write it with `unisono export {target.name} OUT`, and name OUT",
        )
    return target


def find_target(name: str, *, step: int | None = None, base: str | None = None) -> Target:
    """Finds a run or model.

    Args:
        name: a run's directory, a model's or adapter's directory, a hub id, or `builtin:NAME`.
        step: for a run: use this checkpoint instead of the result.
        base: the base model of an adapter, instead of the one that the adapter or its run names.

    Raises:
        UsageError: if it does not exist, or has no weights yet.
        ModelError: if a model or adapter lacks files.
        IntegrityError: if none of a run's checkpoints is intact; or if files of its list are
            missing or damaged.
    """
    directory = Path(name).expanduser()
    if not name.strip():
        raise UsageError.of(
            "no run or model is given",
            where="RUN|MODEL",
            fix="pass a run's directory, a model's directory, or a hub id",
        )
    try:
        target = _find(name, directory, step)
        return target if base is None else _on_base(target, base)
    except UsageError:  # a file that cannot be read may be one that was damaged since it was written
        for place in (directory, RunDir(directory).adapter, RunDir(directory).model):
            checked = check_model(place)
            if not checked.intact:
                raise checked.refusal(restore="copy the directory again, or export it again") from None
        raise


def _on_base(target: Target, base: str) -> Target:
    """The target with its adapter on a different base model."""
    if target.source == "model":
        raise UsageError.of(
            f"{target.name} is not an adapter",
            where=str(target.weights),
            why=f"it has all weights, so it cannot be put on {base}",
            fix="use it as the model, without an adapter",
        )
    return replace(target, base=locate_model(base), description=f"the adapter of {target.name} on {base}")


def _find(name: str, directory: Path, step: int | None) -> Target:
    if _is_run(directory):
        return _of_run(name, RunDir(directory.resolve()), step)
    _refuse_missing_run(name, directory)
    if step is not None:
        raise UsageError.of(
            f"{name} is not a run, so it has no step {step}",
            where="--step",
            fix="pass the directory of a run, or omit --step",
        )
    if directory.is_dir():
        check_directory(directory.resolve())
        _refuse_other_places(name, directory.resolve())
    try:
        path = locate_model(name)
    except ModelError as error:  # its problems may refer to config keys
        problems = (
            (
                replace(p, where="RUN|MODEL", fix=or_nearest_run(directory, p.fix))
                if p.where.startswith("model.")
                else p
            )
            for p in error.problems
        )
        raise ModelError(*problems) from error
    if (path / "adapter_config.json").is_file():
        return _of_adapter(name, path)
    return Target(name, "model", path, path, None, f"the model {name}")


def verify_target(target: Target, report: Reporter) -> None:
    """Reports the target's notes, and verifies its files against the list that was written with
    them.

    Files read here are cached by the kernel when they are loaded; digests of large files are cached
    on disk, so that the next start does not read them twice.

    Raises:
        IntegrityError: with each damaged file, and its tensors.
    """
    for note in target.notes:
        report.warning("target", note)
    own = [] if target.source == "checkpoint" else [target.weights]
    places = list(dict.fromkeys([target.base, *target.merged, *own]))
    digests = digest_files(
        [file for place in places for file in listed_files(place)],
        cache=read_environment().cache_dir / "digests.json",
        on_progress=DigestProgress(report, "verify").report,
    )
    for place in places:
        checked = check_model(place, read=partial(_digest_of, digests))
        if not checked.intact:
            raise checked.refusal(restore=_restore(target, place))
        for finding in checked.findings:
            report.warning("target", f"{place / finding.file}: {finding.what}")
        if not checked.listed and place == target.weights and target.plan is not None:
            report.warning(
                "target",
                f"{place} is not verified: it has no {MODEL_MANIFEST}",
            )


def _digest_of(digests: dict[Path, Digested | OSError], file: Path) -> tuple[int, str]:
    value = digests.get(file)
    if isinstance(value, OSError):
        raise value
    return (value.bytes, value.digest) if value is not None else read_digest(file)


def _restore(target: Target, place: Path) -> str:
    if target.plan is not None and place == target.weights:
        return (
            f"`unisono export {target.name} OUT --step N` writes the weights of a checkpoint (`unisono"
            f" checkpoint ls {target.name}`), or copy the directory again"
        )
    return "copy the directory again, or export it again"


def _refuse_missing_run(name: str, directory: Path) -> None:
    """Refuses a name in a directory of runs before the hub is asked for it: a misspelled run is no
    model there.
    """
    if directory.exists() or "/" not in name or name.startswith("builtin:"):
        return
    runs = runs_beside(directory)
    if not runs and directory.parent != Path("runs"):
        return
    raise UsageError.of(
        f"there is no directory {name}",
        where="RUN|MODEL",
        why=(
            f"{directory.parent} has {len(runs)} run{'' if len(runs) == 1 else 's'}, and none of this name"
            if directory.parent.is_dir()
            else f"{directory.parent} does not exist"
        ),
        fix=(
            or_nearest_run(directory, f"see the list: `unisono runs {directory.parent}`")
            if directory.parent.is_dir()
            else "pass the output_dir of a run, or a model's directory or hub id"
        ),
    )


def _is_run(directory: Path) -> bool:
    run = RunDir(directory)
    return directory.is_dir() and (run.plan.is_file() or (run.config.is_file() and run.checkpoints.is_dir()))


def _refuse_other_places(name: str, directory: Path) -> None:
    """Refuses a part of a run, or an unknown directory, with a better hint than `no
    config.json`.
    """
    if _is_run(directory.parent.parent) and directory.parent.name == "checkpoints":
        number = directory.name.removeprefix("step-").lstrip("0") or "0"
        raise UsageError.of(
            f"{name} is a checkpoint",
            where=str(directory),
            why="it has the trained weights only, without the base model",
            fix=f"use its run: {directory.parent.parent} --step {number}",
        )
    if not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UsageError.of(
            f"{name} is neither a run nor a model",
            where=str(directory),
            why="it has no plan.json, config.json or adapter_config.json",
            fix=(
                "pass a run's directory (output_dir of its config), or a model's with config.json, weights"
                " and tokenizer"
            ),
        )


def _of_run(name: str, run: RunDir, step: int | None) -> Target:
    plan = _read_plan(name, run)
    base = Path(plan.model.directory)
    if not base.is_dir():  # the run was moved, or the built-in model is in a different environment now
        base = files_of(plan.config).find_base(plan.config)
    store = CheckpointStore(run.checkpoints, key=user_key(read_environment().settings_dir))
    if step is not None:
        return _at_checkpoint(name, plan, base, _at_step(store, plan, step), ())
    final = run.adapter if plan.config.adapter is not None else run.model
    outcome = _outcome(run)
    if final.is_dir() and outcome == "completed":
        return _at_result(name, plan, base, final)
    damaged: list[str] = []
    newest = store.newest_intact(
        lambda path, damage: damaged.append(f"{path.name} is skipped: {damage}") if damage.is_fatal else None,
        run_id=plan.run_id,
        trust=True,
    )
    if newest is not None:
        unfinished = (
            f"the run is not finished ({outcome or 'no result yet'}): this is its checkpoint of step"
            f" {newest.step}"
        )
        return _at_checkpoint(name, plan, base, newest, (unfinished, *damaged))
    if final.is_dir():
        return _at_result(name, plan, base, final)
    if damaged:
        raise IntegrityError.of(
            f"no checkpoint of {name} is intact",
            where=str(run.checkpoints),
            why="; ".join(damaged[:4]),
            fix="see `unisono checkpoint verify`; restart the run with --fresh",
        )
    raise UsageError.of(
        f"{name} has no weights yet",
        where=str(run.root),
        why="it ended before its first checkpoint, or has just started",
        fix=f"resume it with `unisono train {run.config}`",
    )


def _read_plan(name: str, run: RunDir) -> RunPlan:
    try:
        return RunPlan.model_validate(read_json(run.plan))
    except FileNotFoundError:
        raise UsageError.of(
            f"{name} has no weights yet",
            where=str(run.root),
            why="there is no plan.json: it ended before the plan was written",
            fix=f"start it with `unisono train {run.config}`",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError.of(
            f"the plan of {name} cannot be read",
            where=str(run.plan),
            why=why_unreadable(error),
            fix="restore the file, or use the adapter or model directory in the run instead",
        ) from error


def _outcome(run: RunDir) -> str | None:
    outcome = read_object(run.result).get("outcome")
    return str(outcome) if outcome else None


def _at_step(store: CheckpointStore, plan: RunPlan, step: int) -> IntactCheckpoint:
    path = store.path(step)
    if not path.is_dir():
        steps = ", ".join(entry.name.removeprefix("step-").lstrip("0") or "0" for entry in store.list())
        raise UsageError.of(
            f"the run has no checkpoint of step {step}",
            where=str(store.root),
            fix=f"it has checkpoints of step {steps}" if steps else "it has none; omit --step for the result",
        )
    return store.require(path, run_id=plan.run_id, trust=True)


def _at_result(name: str, plan: RunPlan, base: Path, final: Path) -> Target:
    if plan.config.adapter is not None:
        files_of(plan.config).check_adapter(final)
        return Target(
            name,
            "adapter",
            final,
            base,
            plan,
            f"the run {name}, finished: {plan.config.model.path} + adapter",
        )
    return Target(
        name,
        "model",
        final,
        final,
        plan,
        f"the run {name}, finished: all weights of {plan.config.model.path}",
    )


def _at_checkpoint(
    name: str, plan: RunPlan, base: Path, saved: IntactCheckpoint, notes: tuple[str, ...]
) -> Target:
    foreign = (
        ("the checkpoint is signed by a different key; only its weights are read",)
        if saved.is_foreign
        else ()
    )
    what = "adapter" if plan.config.adapter is not None else "all weights"
    text = f"the run {name} at step {saved.step}: {what} of {plan.config.model.path}"
    return Target(name, "checkpoint", saved.path, base, plan, text, (*notes, *foreign), step=saved.step)


def _of_adapter(name: str, directory: Path) -> Target:
    check_adapter(directory)
    base = adapter_settings(directory).get("base_model_name_or_path")
    where = f"base_model_name_or_path in {directory / 'adapter_config.json'}"
    if not isinstance(base, str) or not base:
        raise ModelError.of(
            f"{name} does not specify its base model",
            where=where,
            fix="set it to the directory or hub id of the base model",
        )
    try:
        located = locate_model(base)
    except ModelError as error:
        raise ModelError(
            *(
                Problem(p.what, where, p.why, "set it to the present directory or hub id of the base model")
                for p in error.problems
            )
        ) from error
    return Target(name, "adapter", directory, located, None, f"the adapter {name} on {base}")
