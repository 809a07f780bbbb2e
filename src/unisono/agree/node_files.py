"""Files of the nodes: data, tokenizer and model files that are equal, and an output_dir that can be written."""

from collections.abc import Callable, Hashable, Iterable

from unisono.agree.agreement import (
    NODES,
    Agreement,
    Wording,
    evidence_of,
    judge_keys,
    odd_first,
    odd_out,
    partition,
    remedy_for,
    unknown_for,
    violation,
)
from unisono.agree.display import Member, count, name_all, show_bytes, show_digest
from unisono.agree.membership import Members
from unisono.agree.reports import FileDigest, NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.text import one_line

_READERS: dict[str, Callable[[NodeReport], list[FileDigest]]] = {
    "files.data": lambda report: report.data_files,
    "files.tokenizer": lambda report: report.tokenizer_files,
    "files.model": lambda report: report.model_files,
}


def judge_files(members: Members, rule_id: str) -> Agreement:
    """Files of one kind have the same content on all nodes, compared by label, size and digest."""
    rule = NODE_RULES[rule_id]
    read = _READERS[rule_id]
    listed = [(who, report, read(report)) for who, report in members]
    known = [(who, _by_label(files)) for who, report, files in listed if _known(report, files)]
    unknown = [(who, report.files_note) for who, report, files in listed if not _known(report, files)]
    missing = unknown_for(
        rule,
        [who for who, _ in unknown],
        one_line(next((note for _, note in unknown if note), "not digested")),
    )
    if not known:
        return missing
    number = len(known[0][1])
    good = f"{count(number, 'file')}, the same everywhere" if number else "none to compare"
    if len(known) == 1 and len(members) > 1:
        return missing  # a single list cannot be compared
    return judge_keys(rule, known, Wording(shown=_shown_content, good=good)).merged(missing)


def _known(report: NodeReport, files: list[FileDigest]) -> bool:
    """Whether a node's files can be compared: an empty list with a note means that they could not be read."""
    return all(file.digest for file in files) and bool(files or not report.files_note)


def _by_label(files: Iterable[FileDigest]) -> dict[str, Hashable]:
    found: dict[str, list[tuple[int, str]]] = {}
    for file in files:
        found.setdefault(file.label, []).append((file.bytes, file.digest))
    return {label: tuple(contents) for label, contents in found.items()}


def _shown_content(_: str, value: Hashable) -> str:
    if not isinstance(value, tuple):
        return "missing"
    return " + ".join(f"{count(size, 'byte')}, digest {show_digest(digest)}" for size, digest in value[:4])


_LEAST_FREE = 64 * 2**20


def judge_storage(members: Members) -> Agreement:
    """Each node can write to output_dir; whether it is shared is reported."""
    return _judge_writing(members).merged(_judge_sharing(members))


def _judge_writing(members: Members) -> Agreement:
    rule = NODE_RULES["storage.write"]
    troubles = partition((who, _trouble(report)) for who, report in members)
    bad = [group for group in troubles if group.value]
    unknown = [who for who, report in members if report.output.writable is None and not _trouble(report)]
    reports = dict(members)
    why = next(
        (one_line(reports[who].output.trouble) for who in unknown if reports[who].output.trouble), "not tried"
    )
    missing = unknown_for(rule, unknown, why)
    if not bad:
        return missing if len(unknown) == len(members) else _room(members).merged(missing)
    people = sorted(who for group in bad for who in group.members)
    return violation(
        rule,
        "; ".join(f"{name_all(group.members)}: {group.value}" for group in bad[:3]),
        people=people,
        evidence=evidence_of(bad, NODES, str),
        fix=_with_path(rule.remedy, people, reports[people[0]]),
    ).merged(missing)


def _with_path(remedy: tuple[str, ...], people: list[Member], report: NodeReport) -> list[str]:
    path = one_line(report.output.path)
    return [line.replace("{who}", name_all(people)).replace("OUTPUT_DIR", path) for line in remedy]


def _trouble(report: NodeReport) -> str:
    """Why output_dir is not writable, or an empty string."""
    output = report.output
    path = one_line(output.path)
    if output.writable is False:
        return f"output_dir {path} cannot be written: {one_line(output.trouble) or 'no reason given'}"
    if output.free_bytes is None or not (report.node_rank == 0 or output.shared):
        return ""
    least = max(_LEAST_FREE, report.reserved.get("disk_bytes", 0))
    if output.free_bytes < least:
        return f"output_dir {path} has {show_bytes(output.free_bytes)} free, and {show_bytes(least)} are reserved"
    return ""


def _room(members: Members) -> Agreement:
    rule = NODE_RULES["storage.write"]
    measured = [report for _, report in members if report.output.free_bytes is not None]
    if not measured:
        return Agreement.noted(rule.id, "pass", "written, read back and renamed; free space unknown")
    tightest = min(measured, key=lambda report: (report.output.free_bytes or 0, report.node_rank))
    free = tightest.output.free_bytes or 0
    text = f"written, read back and renamed; {show_bytes(free)} free"
    if len(measured) > 1:
        text += f" on {name_all([Member(tightest.node_rank, -1, tightest.host)])}, the least"
    reserved = max((report.reserved.get("disk_bytes", 0) for report in measured), default=0)
    if reserved:
        text += f"; {show_bytes(reserved)} are reserved for the system"
    return Agreement.noted(rule.id, "pass", text)


def _judge_sharing(members: Members) -> Agreement:
    rule = NODE_RULES["storage.shared"]
    if len(members) == 1:
        return Agreement()
    seen = [(who, report.output.shared) for who, report in members if who.node_rank != 0]
    known = [(who, shared) for who, shared in seen if shared is not None]
    missing = unknown_for(
        rule, [who for who, shared in seen if shared is None], "the head's marker could not be checked"
    )
    groups = partition(known)
    if not known or (len(groups) == 1 and groups[0].value):
        text = f"shared by {count(len(known) + 1, 'node')}"
        return (Agreement.noted(rule.id, "pass", text) if known else Agreement()).merged(missing)
    holder = next((who for who, _ in members if who.node_rank == 0), None)
    holds = name_all([holder]) if holder else "the head"
    apart = next(group.members for group in groups if not group.value)
    # If some nodes share it, the head is one of them.
    odd = odd_out(partition([*known, *([(holder, True)] if holder else [])])) if len(groups) > 1 else ()
    summary = f"output_dir of {name_all(apart)} is not shared with {holds}"
    if len(groups) > 1:
        together = next(group.members for group in groups if group.value)
        summary += f", unlike on {name_all(together)}"
    summary += f": {holds} stores the run, the other nodes store copies of result.json and verdict.json"
    paths = partition((who, _place(report)) for who, report in members)
    return violation(
        rule,
        summary,
        people=odd,
        evidence=evidence_of(odd_first(paths, apart), NODES, str),
        fix=remedy_for(rule, apart),
        where=apart,
    ).merged(missing)


def _place(report: NodeReport) -> Hashable:
    output = report.output
    kind = f" ({one_line(output.file_system)})" if output.file_system else ""
    seen = {True: ", with the head's marker", False: ", without the head's marker", None: ""}[output.shared]
    return f"{one_line(output.path)}{kind}{'' if report.node_rank == 0 else seen}"
