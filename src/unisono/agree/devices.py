"""The devices of the nodes: of one kind, all there, each for one rank, alike, and free."""

from collections import Counter
from collections.abc import Hashable, Sequence

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import NODES, evidence_of, finding, remedy_for, say_groups
from unisono.agree.groups import odd_out, partition, told
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.naming import Who, count, enumerate_words, name_all
from unisono.agree.report import Device, NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import show_bytes
from unisono.causes import Evidence
from unisono.text import one_line

_HELD_SHARE = 0.5  # of a device's memory in use before the start: more than a desktop takes
_GIB = 2**30  # drivers report a little less memory on some nodes: compare whole GiB


def judge_devices(members: Members) -> Agreement:
    """All that can be said about the nodes' devices."""
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
    # A node without accelerators falls back to the CPU by itself; nobody falls back to an accelerator.
    odd = odd_out(groups, suspect=lambda who: reports[who].device_kind == "cpu")
    ordered = told(groups, odd)
    notes = partition(
        (who, one_line(reports[who].device_note) or _kind_text(reports[who])) for who, _ in members
    )
    return finding(
        rule, f"device: {say_groups(ordered, NODES, str)}", people=odd,
        evidence=evidence_of(told(notes, odd), NODES, str),
        fix=remedy_for(rule, odd),
    )  # fmt: skip


def _kind_text(report: NodeReport) -> str:
    if report.chosen:
        return enumerate_words([_named(device) for device in report.chosen], at_most=4)
    return "no devices were chosen" if report.device_kind == "cuda" else "CPU"


def _named(device: Device) -> str:
    return f"{device.index}: {one_line(device.name, limit=40)}"


def _judge_choice(cuda: Members) -> Agreement:
    """Each rank has a device, and the device is one that the node shows."""
    rule = NODE_RULES["device.choice"]
    troubles = partition((who, _choice_trouble(report)) for who, report in cuda)
    bad = [group for group in troubles if group.value]
    if not bad:
        return Agreement.noted(rule.id, "pass", "every rank has a visible device")
    people = sorted(who for group in bad for who in group.members)
    return finding(
        rule, "; ".join(f"{name_all(group.members)}: {group.value}" for group in bad[:3]), people=people,
        evidence=evidence_of(bad, NODES, str),
        fix=remedy_for(rule, people),
    )  # fmt: skip


def _choice_trouble(report: NodeReport) -> str:
    if len(report.chosen) < report.nproc:
        return (
            f"{count(report.nproc, 'rank')} and {count(len(report.chosen), 'device')}"
            f" ({len(report.visible)} visible, {len(report.physical)} physical)"
        )
    visible = {device.uuid for device in report.visible}
    hidden = [device for device in report.chosen if device.uuid and visible and device.uuid not in visible]
    if hidden:
        names = enumerate_words([f"{device.index} ({one_line(device.uuid)})" for device in hidden], at_most=3)
        return f"chosen, and not among the {len(report.visible)} visible devices: {names}"
    return ""


def _judge_unique(cuda: Members) -> Agreement:
    """No device is taken twice: not on one node, and not by two nodes that are one machine."""
    rule = NODE_RULES["device.unique"]
    taken = [(who, device) for who, report in cuda for device in report.chosen[: report.nproc]]
    nameless = sorted({who for who, device in taken if not device.uuid})
    twice = {
        uuid
        for uuid, times in Counter(device.uuid for _, device in taken if device.uuid).items()
        if times > 1
    }
    if not twice:
        if nameless:
            return Agreement.noted(
                rule.id,
                "unknown",
                f"devices without a UUID on {name_all(nameless)}",
                where=name_all(nameless),
            )
        return Agreement.noted(rule.id, "pass", f"{count(len(taken), 'device')}, each for one rank")
    culprits = sorted({who for who, device in taken if device.uuid in twice})
    summary, evidence = _sharing(taken, sorted(twice))
    return finding(rule, summary, people=culprits, evidence=evidence, fix=rule.remedy)


def _sharing(taken: Sequence[tuple[Who, Device]], twice: Sequence[str]) -> tuple[str, list[Evidence]]:
    holders = {uuid: [who for who, device in taken if device.uuid == uuid] for uuid in twice}
    names = {device.uuid: _named(device) for _, device in taken}
    uuid = twice[0]
    people = holders[uuid]
    if len(set(people)) == 1:
        summary = f"{name_all(people)} would put {len(people)} ranks on one device ({names[uuid]})"
    else:
        summary = f"{name_all(people)} would use the same device ({names[uuid]}, {one_line(uuid)})"
        if len({who.host for who in people}) > 1:
            summary += ": they are one machine under several names"
    if len(twice) > 1:
        summary += f"; and {count(len(twice) - 1, 'more device')}"
    evidence = [
        Evidence(where=name_all(holders[uuid]), text=f"{names[uuid]}, {one_line(uuid)}, chosen {len(holders[uuid])} times")
        for uuid in twice[:8]
    ]  # fmt: skip
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
        return finding(
            rule, f"devices of several types on {name_all(mixed)}: {texts[0].value}", people=mixed,
            evidence=evidence_of(texts, NODES, str), fix=rule.remedy,
        )  # fmt: skip
    said = [(who, {"devices": kinds(report)}) for who, report in cuda]
    return judge_keys(
        rule, said, Wording(shown=lambda _, value: _type_text(value), good="one type, one memory size")
    )


def _type_text(value: Hashable) -> str:
    if not isinstance(value, tuple) or not value:
        return "none"
    return " and ".join(f"{name} with {memory} GiB" for name, memory in value)


def _judge_free(cuda: Members) -> Agreement:
    """A device whose memory is half used before the start mostly belongs to a process that somebody forgot."""
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
    summary = f"{name_all([who])}: only {show_bytes(device.memory_free_bytes)} of {show_bytes(device.memory_bytes)} free on device {_named(device)}"
    if len(held) > 1:
        summary += f"; and {count(len(held) - 1, 'more device')}"
    evidence = [
        Evidence(where=name_all([who]), text=f"{_named(d)}: {show_bytes(d.memory_free_bytes)} of {show_bytes(d.memory_bytes)} free")
        for who, d in held[:8]
    ]  # fmt: skip
    fix = remedy_for(rule, people)
    return finding(rule, summary, people=people, evidence=evidence, fix=fix)
