"""What is left: only consequences are visible, or nothing at all."""

from unisono.diagnose.finding import Finding
from unisono.diagnose.rules.view import View, first_of_each, ranks_of

_RECORD = "next time set TORCH_NCCL_TRACE_BUFFER_SIZE=20000 (TORCH_FR_BUFFER_SIZE since torch 2.9), TORCH_NCCL_DUMP_ON_TIMEOUT=1 and NCCL_DEBUG=INFO on all ranks: the flight recorder's dumps of every rank name who did not come"  # fmt: skip


def find_unclear(view: View) -> list[Finding]:
    """An answer that names no cause and says what is missing."""
    victims = [*view.consequences, *(trace.event for trace in view.facts.tracebacks if view.is_victim(trace))]
    if victims:
        seen = ranks_of(victims)
        whose = f"only what ranks {', '.join(map(str, seen[:8]))} suffered" if seen else "only consequences"
        world = view.facts.world_size
        others = [str(rank) for rank in range(min(world or 0, 64)) if rank not in seen]
        logs = f"the logs of ranks {', '.join(others[:16])}" if others else "the logs of all other ranks, from their beginning"  # fmt: skip
        return [Finding("undetermined", f"{whose} is visible; the log of whoever failed first is missing", first_of_each(victims), confidence=0.3, missing=(logs, _RECORD, "dmesg of every rank's host"))]  # fmt: skip
    ends = view.failing_exits or list(view.facts.exits)
    if ends:
        return [Finding("undetermined", "processes ended, and no line says why", tuple(one.event for one in ends[:4]), confidence=0.3, missing=("the logs of all ranks", "dmesg of their hosts"))]  # fmt: skip
    errors = [event for event in view.facts.events if event.kind in ("error", "death")]
    if errors:
        return [Finding("undetermined", "something failed, and the line that says what is not here", tuple(errors[:4]), confidence=0.3, missing=("the log from its beginning", "the logs of all ranks"))]  # fmt: skip
    lines = sum(source.lines for source in view.facts.sources.values())
    last = [source.tail[-1] for source in view.facts.sources.values() if source.tail]
    if not lines or not last:
        return [Finding("undetermined", "there is nothing in the logs", (), confidence=1.0, missing=("the logs of the run",))]  # fmt: skip
    where = f" at step {view.facts.step}" + (f" of {view.facts.steps}" if view.facts.steps else "") if view.facts.step is not None else ""  # fmt: skip
    return [Finding("undetermined", f"the logs show neither a failure nor an end: they stop{where}", tuple(last[:4]), confidence=0.5, missing=("what comes after the last line, if the run is over", "the logs of the other ranks", "the launcher's own output, and dmesg"), step=view.facts.step)]  # fmt: skip
