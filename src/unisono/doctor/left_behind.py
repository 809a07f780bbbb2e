"""What earlier runs have left running on this machine."""

from collections.abc import Sequence

from unisono.doctor.check import Check, Finding, Surroundings, found
from unisono.facts.orphans import Orphan, end_orphan, find_orphans
from unisono.units import show_seconds

ORPHANS = Check(
    "system.orphans", "processes of earlier runs",
    "a rank that outlived its run holds its device's memory, its port and its cores, and the next run fails for no reason of its own",
    "Processes with a rank's command line, or under `unisono run`, whose front is gone; each with its run's id, its pid and its age. Warns."
    " Nothing is ended unless `--end-orphans` asks for it, and then only processes of one's own.",
    ("stale_process",),
)  # fmt: skip
_SHOWN = 20


def orphans(facts: Surroundings) -> list[Finding]:
    """Finds them, and ends them where that was asked for."""
    left = find_orphans()
    ended = {orphan: end_orphan(orphan) for orphan in left} if facts.request.end_orphans else {}
    return [judge_orphans(left, ended)]


def judge_orphans(left: Sequence[Orphan], ended: dict[Orphan, bool]) -> Finding:
    """Pure. `ended`: for those that were to be ended, whether they are gone."""
    if not left:
        return found(ORPHANS, "pass", "none")
    rows = [f"{_row(orphan)}{'; ended' if ended.get(orphan) else ''}" for orphan in left[:_SHOWN]]
    living = [orphan for orphan in left if not ended.get(orphan)]
    if not living:
        return found(ORPHANS, "pass", f"{len(left)} ended", *rows)
    text = f"{len(living)} without {'its' if len(living) == 1 else 'their'} front"
    mine = [orphan for orphan in living if orphan.mine and orphan.state != "D"]
    fix = []
    if mine:
        fix = [
            "`unisono doctor --end-orphans`",
            f"or `kill -9 {' '.join(str(orphan.pid) for orphan in mine[:_SHOWN])}`",
        ]
    if any(orphan.state == "D" for orphan in living):
        fix.append("what waits in the kernel (state D) ends when its storage answers, or with the machine")
    if any(not orphan.mine for orphan in living):
        fix.append("what belongs to another user is theirs to end")
    return found(ORPHANS, "warn", text, *rows, fix=fix)


def _row(orphan: Orphan) -> str:
    run = f"run {orphan.run_id}" if orphan.run_id else f"run unknown ({orphan.plan})"
    whose = "" if orphan.mine else ", another user's"
    return f"{run}: process {orphan.pid}, {show_seconds(orphan.age_s)} old, state {orphan.state}{whose}"
