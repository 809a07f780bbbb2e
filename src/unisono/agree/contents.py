"""Whether all nodes read the same data, tokenizer and model files."""

from collections.abc import Callable, Hashable, Iterable

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import unknown_for
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.naming import count
from unisono.agree.report import FileDigest, NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import show_digest
from unisono.text import one_line

_READERS: dict[str, Callable[[NodeReport], list[FileDigest]]] = {
    "files.data": lambda report: report.data_files,
    "files.tokenizer": lambda report: report.tokenizer_files,
    "files.model": lambda report: report.model_files,
}


def judge_files(members: Members, rule_id: str) -> Agreement:
    """Files of one kind have the same content on all nodes: each by its label, size and digest."""
    rule = NODE_RULES[rule_id]
    read = _READERS[rule_id]
    listed = [(who, report, read(report)) for who, report in members]
    known = [(who, _by_label(files)) for who, report, files in listed if _known(report, files)]
    unknown = [(who, report.files_note) for who, report, files in listed if not _known(report, files)]
    missing = unknown_for(
        rule, [who for who, _ in unknown], one_line(next((note for _, note in unknown if note), "not digested"))
    )  # fmt: skip
    if not known:
        return missing
    number = len(known[0][1])
    good = f"{count(number, 'file')}, the same everywhere" if number else "there are none to compare"
    if len(known) == 1 and len(members) > 1:
        return missing  # one list alone agrees with nobody
    return judge_keys(rule, known, Wording(shown=_shown, good=good)).merged(missing)


def _known(report: NodeReport, files: list[FileDigest]) -> bool:
    """Whether what a node says of these files can be compared: none with a note means that they could not be read."""
    return all(file.digest for file in files) and bool(files or not report.files_note)


def _by_label(files: Iterable[FileDigest]) -> dict[str, Hashable]:
    found: dict[str, list[tuple[int, str]]] = {}
    for file in files:
        found.setdefault(file.label, []).append((file.bytes, file.digest))
    return {label: tuple(contents) for label, contents in found.items()}


def _shown(_: str, value: Hashable) -> str:
    if not isinstance(value, tuple):
        return "missing"
    return " + ".join(f"{count(size, 'byte')}, digest {show_digest(digest)}" for size, digest in value[:4])
