"""The checkpoint that a run resumes from: the newest intact one, or an error that says why there is none."""

from pathlib import Path

from unisono.checkpoint.manifest import KEY_FILE
from unisono.checkpoint.store import CheckpointStore, IntactCheckpoint, OnDamage
from unisono.checkpoint.verify import Damage
from unisono.errors import IntegrityError
from unisono.plan import ResumePoint
from unisono.rundir.start_decision import StartDecision


def require_intact(
    store: CheckpointStore,
    on_damage: OnDamage | None = None,
    *,
    run_id: str | None = None,
    trust: bool = False,
) -> IntactCheckpoint | None:
    """The newest intact checkpoint; None only if the run has not saved any.

    Args:
        store: the run's.
        on_damage: receives every finding in a newer checkpoint, with its path.
        run_id: the run that it must belong to; None: any.
        trust: accept one that is not signed by this user.

    Raises:
        IntegrityError: if there are checkpoints and none is readable, with the findings of each.
    """
    findings: dict[Path, list[Damage]] = {}

    def note(path: Path, damage: Damage) -> None:
        findings.setdefault(path, []).append(damage)
        if on_damage is not None:
            on_damage(path, damage)

    found = store.newest_intact(note, run_id=run_id, trust=trust)
    if found is None and findings:
        raise _none_intact(store.root, findings)
    return found


def resume_point(
    store: CheckpointStore,
    decision: StartDecision,
    on_damage: OnDamage | None = None,
    *,
    trust: bool = False,
) -> tuple[ResumePoint | None, str]:
    """The checkpoint that a start resumes from, or None; and the completed reason of the decision.

    Args:
        store: the run's.
        decision: the kind of start.
        on_damage: receives every finding in a newer checkpoint, with its path.
        trust: accept one that is not signed by this user.

    Raises:
        IntegrityError: if there are checkpoints and none is readable, or none to extend a finished run from.
    """
    if decision.kind == "fresh":
        return None, decision.reason
    found = require_intact(store, on_damage, run_id=decision.run_id, trust=trust)
    if found is not None:
        reason = f"{decision.reason}; from step {found.step}"
        if found.is_foreign:
            reason += ", which is not signed with your key and is trusted (--trust)"
        return ResumePoint(step=found.step, path=str(found.path), trust=found.is_foreign), reason
    if decision.kind == "extend":
        raise IntegrityError.of(
            "the finished run has no checkpoint to extend it from",
            where=str(store.root),
            why="they were deleted",
            fix="set another output_dir, or start again with --fresh, which renames this run",
        )
    return None, f"{decision.reason}; it ended before its first checkpoint, so it starts at step 1"


def _none_intact(root: Path, findings: dict[Path, list[Damage]]) -> IntegrityError:
    why = "; ".join(_describe(path, of_path) for path, of_path in findings.items())
    foreign = [path for path, of_path in findings.items() if not any(f.is_fatal for f in of_path)]
    if foreign:
        which = (
            "the run's checkpoints are"
            if len(foreign) == len(findings)
            else f"{foreign[0].name} is intact, and is"
        )
        return IntegrityError.of(
            f"{which} not signed with your key",
            where=str(root),
            why=why,
            fix="if you trust their author: pass --trust to resume from them (no code in them is executed), or copy "
            f"{KEY_FILE} of that user into your settings directory (~/.config/unisono); otherwise start again with --fresh, which "
            "renames this run",
        )
    many = len(findings) > 1
    return IntegrityError.of(
        f"none of the run's {len(findings)} checkpoints is intact"
        if many
        else "the run's only checkpoint is not intact",
        where=str(root),
        why=why,
        fix="restore one from a copy, or start again with --fresh, which renames this run",
    )


def _describe(path: Path, findings: list[Damage]) -> str:
    return f"{path.name}: " + ", ".join(str(finding) for finding in findings if finding.kind != "extra")
