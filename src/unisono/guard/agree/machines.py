"""What each node's machine offers: devices, limits of processes, shared memory, cores, memory,
clock.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import median

from unisono.base.causes import Evidence
from unisono.base.text import one_line
from unisono.guard.agree.agreement import (
    NODES,
    Agreement,
    Wording,
    describe_groups,
    evidence_of,
    judge_keys,
    odd_first,
    odd_out,
    partition,
    remedy_for,
    unknown_for,
    violation,
)
from unisono.guard.agree.membership import Members
from unisono.guard.agree.reports import (
    Device,
    Member,
    NodeReport,
    count,
    enumerate_words,
    name_all,
    show_bytes,
)
from unisono.guard.agree.rules import NODE_RULES, Rule
from unisono.guard.agree.version_rules import release_of

_HELD_SHARE = 0.5  # of a device's memory in use before the start: more than a desktop uses
_GIB = 2**30  # drivers report a little less memory on some nodes: compare whole GiB


def judge_devices(members: Members) -> Agreement:
    """All checks of the nodes' devices."""
    kinds = _judge_kind(members)
    if all(report.device_kind == "cpu" for _, report in members):
        return kinds
    cuda = [(who, report) for who, report in members if report.device_kind == "cuda"]
    return kinds.merged(_judge_choice(cuda), _judge_unique(cuda), _judge_alike(cuda), _judge_free(cuda))


def _judge_kind(members: Members) -> Agreement:
    rule = NODE_RULES["device.kind"]
    groups = partition((who, report.device_kind) for who, report in members)
    if len(groups) == 1:
        return Agreement.noted(rule.id, "pass", f"{groups[0].value} on {count(len(members), 'node')}")
    reports = dict(members)
    # A node without accelerators falls back to the CPU by itself; no node falls back to an
    # accelerator.
    odd = odd_out(groups, suspect=lambda who: reports[who].device_kind == "cpu")
    ordered = odd_first(groups, odd)
    notes = partition(
        (who, one_line(reports[who].device_note) or _kind_text(reports[who])) for who, _ in members
    )
    return violation(
        rule,
        f"device: {describe_groups(ordered, NODES, str)}",
        people=odd,
        evidence=evidence_of(odd_first(notes, odd), NODES, str),
        fix=remedy_for(rule, odd),
    )


def _kind_text(report: NodeReport) -> str:
    if report.chosen:
        return enumerate_words([_named(device) for device in report.chosen], at_most=4)
    return "no devices selected" if report.device_kind == "cuda" else "CPU"


def _named(device: Device) -> str:
    return f"{device.index}: {one_line(device.name, limit=40)}"


def _judge_choice(cuda: Members) -> Agreement:
    """Each rank has a device that is visible on its node."""
    rule = NODE_RULES["device.choice"]
    problems = partition((who, _choice_problem(report)) for who, report in cuda)
    bad = [group for group in problems if group.value]
    if not bad:
        return Agreement.noted(rule.id, "pass", "every rank has a visible device")
    people = sorted(who for group in bad for who in group.members)
    return violation(
        rule,
        "; ".join(f"{name_all(group.members)}: {group.value}" for group in bad[:3]),
        people=people,
        evidence=evidence_of(bad, NODES, str),
        fix=remedy_for(rule, people),
    )


def _choice_problem(report: NodeReport) -> str:
    if len(report.chosen) < report.nproc:
        return (
            f"{count(report.nproc, 'rank')} and {count(len(report.chosen), 'device')}"
            f" ({len(report.visible)} visible, {len(report.physical)} physical)"
        )
    visible = {device.uuid for device in report.visible}
    hidden = [device for device in report.chosen if device.uuid and visible and device.uuid not in visible]
    if hidden:
        names = enumerate_words([f"{device.index} ({one_line(device.uuid)})" for device in hidden], at_most=3)
        return f"selected, but not among the {len(report.visible)} visible devices: {names}"
    return ""


def _judge_unique(cuda: Members) -> Agreement:
    """No device is used twice, neither on one node nor by two nodes that are the same machine."""
    rule = NODE_RULES["device.unique"]
    taken = [(who, device) for who, report in cuda for device in report.chosen[: report.nproc]]
    without_uuid = sorted({who for who, device in taken if not device.uuid})
    duplicates = {
        uuid
        for uuid, times in Counter(device.uuid for _, device in taken if device.uuid).items()
        if times > 1
    }
    if not duplicates:
        if without_uuid:
            return Agreement.noted(
                rule.id,
                "unknown",
                f"devices without a UUID on {name_all(without_uuid)}",
                where=name_all(without_uuid),
            )
        return Agreement.noted(rule.id, "pass", f"{count(len(taken), 'device')}, each used by one rank")
    culprits = sorted({who for who, device in taken if device.uuid in duplicates})
    summary, evidence = _sharing(taken, sorted(duplicates))
    return violation(rule, summary, people=culprits, evidence=evidence, fix=rule.remedy)


def _sharing(taken: Sequence[tuple[Member, Device]], duplicates: Sequence[str]) -> tuple[str, list[Evidence]]:
    holders = {uuid: [who for who, device in taken if device.uuid == uuid] for uuid in duplicates}
    names = {device.uuid: _named(device) for _, device in taken}
    uuid = duplicates[0]
    people = holders[uuid]
    if len(set(people)) == 1:
        summary = f"{name_all(people)} would put {len(people)} ranks on one device ({names[uuid]})"
    else:
        summary = f"{name_all(people)} would use the same device ({names[uuid]}, {one_line(uuid)})"
        if len({who.host for who in people}) > 1:
            summary += ": they are one machine with several names"
    if len(duplicates) > 1:
        summary += f"; and {count(len(duplicates) - 1, 'more device')}"
    evidence = [
        Evidence(
            where=name_all(holders[uuid]),
            text=f"{names[uuid]}, {one_line(uuid)}, chosen {len(holders[uuid])} times",
        )
        for uuid in duplicates[:8]
    ]
    return summary, evidence


def _judge_alike(cuda: Members) -> Agreement:
    rule = NODE_RULES["device.alike"]

    def kinds(report: NodeReport) -> Hashable:
        return tuple(
            sorted({(one_line(d.name, limit=60), round(d.memory_bytes / _GIB)) for d in report.chosen})
        )

    mixed = [who for who, report in cuda if len({device.name for device in report.chosen}) > 1]
    if mixed:
        texts = partition((who, _kind_text(report)) for who, report in cuda if who in set(mixed))
        return violation(
            rule,
            f"devices of different models on {name_all(mixed)}: {texts[0].value}",
            people=mixed,
            evidence=evidence_of(texts, NODES, str),
            fix=rule.remedy,
        )
    reported = [(who, {"devices": kinds(report)}) for who, report in cuda]
    return judge_keys(
        rule, reported, Wording(shown=lambda _, value: _type_text(value), good="one model, one memory size")
    )


def _type_text(value: Hashable) -> str:
    if not isinstance(value, tuple) or not value:
        return "none"
    return " and ".join(f"{name} with {memory} GiB" for name, memory in value)


def _judge_free(cuda: Members) -> Agreement:
    """A device with half of its memory in use before the start usually has a stale process."""
    rule = NODE_RULES["device.free"]
    held = [
        (who, device)
        for who, report in cuda
        for device in report.chosen
        if device.memory_bytes > 0 and device.memory_free_bytes < _HELD_SHARE * device.memory_bytes
    ]
    if not held:
        return Agreement.noted(rule.id, "pass", "more than half of each device's memory is free")
    who, device = held[0]
    people = sorted({who for who, _ in held})
    summary = (
        f"{name_all([who])}: only {show_bytes(device.memory_free_bytes)} of {show_bytes(device.memory_bytes)}"
        f" free on device {_named(device)}"
    )
    if len(held) > 1:
        summary += f"; and {count(len(held) - 1, 'more device')}"
    evidence = [
        Evidence(
            where=name_all([who]),
            text=f"{_named(d)}: {show_bytes(d.memory_free_bytes)} of {show_bytes(d.memory_bytes)} free",
        )
        for who, d in held[:8]
    ]
    fix = remedy_for(rule, people)
    return violation(rule, summary, people=people, evidence=evidence, fix=fix)


# ruff: noqa: S108 - /dev/shm is what is looked at


_FEWEST_FILES = 256  # with fewer a rank cannot even open its libraries, sockets and data files
_FEW_FILES = 4096
_FEW_FILES_MANY_RANKS = 32_768
_MANY_RANKS = 128
_FEW_PROCESSES = 1024
_TINY_SHM = 64 * 2**20  # the default of containers
_SMALL_SHM = 2**30
_LITTLE_LOCKED = 64 * 2**20
_STACK_FIXED_IN_NCCL = (2, 28)


def judge_limits(members: Members) -> Agreement:
    """All checks of limits: open files, processes, shared memory, cores, memory."""
    world = sum(max(0, report.nproc) for _, report in members)
    return Agreement().merged(
        _judge(
            NODE_RULES["limits"],
            members,
            lambda r: _too_few_files(r, world),
            _many_files(members),
            fatal=True,
        ),
        _judge_rest(members),
        _judge_shm(members),
        _judge(NODE_RULES["cores"], members, _too_few_cores, "enough for all ranks"),
        _judge(NODE_RULES["memory"], members, _too_little_memory, _reserves(members)),
    )


def _judge(
    rule: Rule, members: Members, problem_of: Callable[[NodeReport], str], good: str, *, fatal: bool = False
) -> Agreement:
    """One check; `problem_of` returns an empty string if there is no problem; a leading `!` marks a
    fatal one.
    """
    groups = partition((who, problem_of(report)) for who, report in members)
    bad = [group for group in groups if group.value]
    if not bad:
        return Agreement.noted(rule.id, "pass", good)
    worst = [group for group in bad if fatal and group.value.startswith("!")]
    shown = worst or bad
    people = sorted(who for group in shown for who in group.members)
    return violation(
        replace(rule, violated="fail" if worst else "warn"),
        "; ".join(f"{name_all(group.members)}: {_plain(group.value)}" for group in shown[:3]),
        people=people,
        evidence=evidence_of(bad, NODES, _plain),
        fix=remedy_for(rule, people),
    )


def _plain(value: str) -> str:
    return value.lstrip("!")


def _too_few_files(report: NodeReport, world: int) -> str:
    files = report.limits.open_files  # None: unlimited
    if files is None:
        return ""
    if files < _FEWEST_FILES:
        return f"!only {count(files, 'open file')} per process (ulimit -n)"
    recommended = _FEW_FILES_MANY_RANKS if world >= _MANY_RANKS else _FEW_FILES
    return (
        f"{count(files, 'open file')} per process (ulimit -n), {recommended:,} are recommended"
        if files < recommended
        else ""
    )


def _many_files(members: Members) -> str:
    files = [report.limits.open_files for _, report in members if report.limits.open_files is not None]
    return f"at least {count(min(files), 'open file')} per process" if files else "open files are unlimited"


def _judge_rest(members: Members) -> Agreement:
    """Limits that only warn."""
    rule = NODE_RULES["limits"]
    agreement = Agreement()
    for look, fix in (
        (_few_processes, "`ulimit -u`; in Kubernetes, the pod's PID limit"),
        (_little_locked_memory, "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`"),
        (_endless_stack, "`ulimit -s 8192`, or NCCL 2.28"),
    ):
        groups = [group for group in partition((who, look(report)) for who, report in members) if group.value]
        for group in groups[:3]:
            where = name_all(group.members)
            agreement = agreement.merged(
                violation(
                    replace(rule, violated="warn"),
                    f"{where}: {group.value}",
                    people=group.members,
                    fix=[f"on {where}: {fix}"],
                )
            )
    return agreement


def _few_processes(report: NodeReport) -> str:
    limit = report.limits.processes
    return (
        f"only {count(limit, 'process', 'processes')} and threads"
        if limit is not None and limit < _FEW_PROCESSES
        else ""
    )


def _little_locked_memory(report: NodeReport) -> str:
    locked = report.limits.locked_memory_bytes
    adapters = any(one.kind == "infiniband" and one.up for one in report.interfaces)
    if not adapters or locked is None or locked >= _LITTLE_LOCKED:
        return ""
    return f"{show_bytes(locked)} of locked memory allowed (ulimit -l): InfiniBand needs more"


def _endless_stack(report: NodeReport) -> str:
    """NCCL before 2.28 starts threads with the limit as their stack size.

    None may also mean that it could not be read.
    """
    nccl = release_of(report.versions.get("nccl", ""))
    if (
        report.device_kind != "cuda"
        or not nccl
        or nccl >= _STACK_FIXED_IN_NCCL
        or report.limits.stack_bytes is not None
    ):
        return ""
    return f"unlimited stack size (ulimit -s) with NCCL {'.'.join(map(str, nccl))}"


def _judge_shm(members: Members) -> Agreement:
    rule = NODE_RULES["shm"]
    unknown = [who for who, report in members if report.limits.shm_bytes is None]
    reported = [(who, report) for who, report in members if report.limits.shm_bytes is not None]
    missing = unknown_for(rule, unknown, "/dev/shm could not be read")
    if not reported:
        return missing
    least = min(report.limits.shm_bytes or 0 for _, report in reported)
    return _judge(rule, reported, _small_shm, f"at least {show_bytes(least)}", fatal=True).merged(missing)


def _small_shm(report: NodeReport) -> str:
    size, free = report.limits.shm_bytes or 0, report.limits.shm_free_bytes
    # NCCL needs it between the devices of one machine; gloo on CPU and single ranks do not.
    needed = report.device_kind == "cuda" and report.nproc > 1
    if size < _TINY_SHM:
        return f"{'!' if needed else ''}/dev/shm has {show_bytes(size)}"
    if free is not None and free < _TINY_SHM:
        return (
            f"{'!' if needed else ''}/dev/shm has {show_bytes(free)} free of {show_bytes(size)}; `ls -l"
            " /dev/shm` shows leftovers"
        )
    return f"/dev/shm has {show_bytes(size)}, 1 GiB is recommended" if size < _SMALL_SHM and needed else ""


def _too_few_cores(report: NodeReport) -> str:
    cores, threads = report.limits.cores, report.threads
    if report.nproc > cores:
        return f"{count(report.nproc, 'rank')} on {count(cores, 'core')}"
    if report.nproc * threads > cores:
        return f"{report.nproc} × {count(threads, 'thread')} on {count(cores, 'core')}"
    return ""


def _too_little_memory(report: NodeReport) -> str:
    kept = report.reserved.get("memory_bytes", 0)
    if report.limits.memory_bytes <= kept:
        return (
            f"{show_bytes(report.limits.memory_bytes)} of memory, but {show_bytes(kept)} are reserved for the"
            " system"
        )
    return ""


def _reserves(members: Members) -> str:
    """Resources that the plan reserves for the system."""
    kept = {
        key: max(report.reserved.get(key, 0) for _, report in members)
        for key in ("memory_bytes", "shm_bytes", "cores")
    }
    parts = [
        f"{show_bytes(kept['memory_bytes'])} of memory" if kept["memory_bytes"] else "",
        f"{show_bytes(kept['shm_bytes'])} of /dev/shm" if kept["shm_bytes"] else "",
        count(kept["cores"], "core") if kept["cores"] else "",
    ]
    reported = ", ".join(part for part in parts if part)
    return (
        f"{reported} reserved for the system on each node"
        if reported
        else "nothing is reserved for the system"
    )


_TOO_FAR_S = 2.0
_SHOWN = 8


def judge_clocks(members: Members) -> Agreement:
    """A warning if two clocks differ by more than two seconds; unisono itself does not compare
    clocks of machines.
    """
    rule = NODE_RULES["clock"]
    offsets = {who: _offset(report.clock_offset_s, who) for who, report in members}
    measured = {who: offset for who, offset in offsets.items() if offset is not None}
    unknown = unknown_for(rule, [who for who in offsets if who not in measured], "not measured")
    if len(measured) < 2:
        return Agreement.noted(rule.id, "pass", "one clock") if len(members) == 1 else unknown
    apart = max(measured.values()) - min(measured.values())
    if apart <= _TOO_FAR_S:
        return Agreement.noted(rule.id, "pass", f"within {apart:.1f} s").merged(unknown)
    odd = _far_off(measured)
    first, last = (
        min(measured, key=lambda who: (measured[who], who)),
        max(measured, key=lambda who: (measured[who], who)),
    )
    if odd:
        base = median(measured.values())
        who = max(odd, key=lambda who: (abs(measured[who] - base), who))
        ahead = "ahead of" if measured[who] > base else "behind"
        summary = f"the clock of {name_all([who])} is {abs(measured[who] - base):.1f} s {ahead} the others"
        summary += f"; {len(odd) - 1} more differ" if len(odd) > 1 else ""
    else:
        summary = f"the clocks of {name_all([first])} and {name_all([last])} are {apart:.1f} s apart"
    evidence = [
        Evidence(where=name_all([who]), text=f"{measured[who]:+.1f} s relative to the head")
        for who in sorted(measured, key=lambda who: (who not in odd, who))[:_SHOWN]
    ]
    fix = remedy_for(rule, sorted(odd))
    return violation(rule, summary, people=odd, evidence=evidence, fix=fix).merged(unknown)


def _offset(measured: float | None, who: Member) -> float | None:
    """The measured offset; the head measures others against itself, so its own is zero."""
    return 0.0 if measured is None and who.node_rank == 0 else measured


def _far_off(offsets: dict[Member, float]) -> set[Member]:
    """The members far from the median, if most are near it; else none."""
    middle = median(offsets.values())
    far = {who for who, offset in offsets.items() if abs(offset - middle) > _TOO_FAR_S}
    return far if 2 * len(far) < len(offsets) else set()
