"""The checkpoint that a run goes on from: the newest intact one, or a clear word that there is none."""

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
    """The newest intact checkpoint; None only where the run has not saved any.

    Args:
        store: of the run.
        on_damage: is told of every finding in a newer checkpoint, with its path.
        run_id: the run that it must belong to, if that matters.
        trust: take one that is not signed by this user, too.

    Raises:
        IntegrityError: if there are checkpoints and none can be read, with what is wrong with each.
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
    """The checkpoint that a start goes on from, or None; and the reason of the decision, completed.

    Args:
        store: of the run.
        decision: what the start is.
        on_damage: is told of every finding in a newer checkpoint, with its path.
        trust: take one that is not signed by this user, too.

    Raises:
        IntegrityError: if there are checkpoints and none can be read, or none to extend a finished run from.
    """
    if decision.kind == "fresh":
        return None, decision.reason
    found = require_intact(store, on_damage, run_id=decision.run_id, trust=trust)
    if found is not None:
        reason = f"{decision.reason}; from step {found.step}"
        if found.is_foreign:
            reason += ", which is not signed with your key and is trusted all the same (--trust)"
        return ResumePoint(step=found.step, path=str(found.path), trust=found.is_foreign), reason
    if decision.kind == "extend":
        raise IntegrityError.of(
            "the finished run has no checkpoint that it could be extended from",
            where=str(store.root),
            why="they were deleted",
            fix="set another output_dir, or start anew with --fresh, which keeps this run under another name",
        )
    return None, f"{decision.reason}; it ended before its first checkpoint, so it begins at step 1"


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
            fix="if you trust who made them: pass --trust to go on all the same (nothing of them is run as code), or copy "
            f"{KEY_FILE} of that user into your folder of settings (~/.config/unisono); else start anew with --fresh, which keeps "
            "this run under another name",
        )
    many = len(findings) > 1
    return IntegrityError.of(
        f"none of the run's {len(findings)} checkpoints is intact"
        if many
        else "the run's only checkpoint is not intact",
        where=str(root),
        why=why,
        fix="restore one from a copy, or start anew with --fresh, which keeps this run under another name",
    )


def _describe(path: Path, findings: list[Damage]) -> str:
    return f"{path.name}: " + ", ".join(str(finding) for finding in findings if finding.kind != "extra")
