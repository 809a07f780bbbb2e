"""Whom a line or a log speaks of: the prefixes of launchers, the words of torch and NCCL, the names of files."""

import re
from dataclasses import replace
from itertools import pairwise

from unisono.diagnose.event import Who

_HOST = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
_STAMP = r"\[?20\d\d[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d| UTC)?\]? (?:std(?:err|out) [FP] )?"
"""The time that a collector of logs puts before each line."""
_PREFIXES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[rank(?P<rank>\d{1,6})\]:? ?",  # torch since 2.2
        r"\[(?:trainer|default|worker|elastic|local_rank)_?(?P<local_rank>\d{1,4})\]:? ?",  # torchrun --tee
        r"\[\d{1,6},(?:mpirank:)?(?P<rank>\d{1,6})(?:,(?P<host>[\w.-]{1,63}))?\]<std(?:err|out)>:? ?",  # mpirun --tag-output; SageMaker
        r"\((?P<actor>[A-Za-z_][\w:.]{0,80}(?: rank=(?P<rank>\d{1,6}))?) pid=(?P<pid>\d{1,10})(?:, ip=(?P<host>[\w.:-]{3,60}))?\) ?",  # Ray
        r"\((?:head|task|worker\d{0,4}|node-?\d{0,4})(?:, rank=(?P<node_rank>\d{1,5}))?, pid=(?P<pid>\d{1,10})(?:, ip=(?P<host>[\w.:-]{3,60}))?\) ?",  # SkyPilot
        r"std(?:err|out): ?",
        r"\((?:raylet|gcs_server|autoscaler)(?:, ip=(?P<host>[\w.:-]{3,60})| \+\w{1,12})?\) ?",
        r"\[(?:pod/)?(?P<pod>[a-z0-9][a-z0-9.-]{1,200}-(?P<pod_number>\d{1,4}))[/ ][\w.-]{1,63}\] ?",  # kubectl logs --prefix
        r"(?P<compose>[a-z][\w.-]{0,62}) {1,12}\| ",  # docker compose
        r"\((?P<host>[a-z][\w.-]{0,50}\d)\) ",
        r"(?P<host>"
        + _HOST
        + r"):(?P<pid>\d{1,10}):\d{1,10} \[(?P<device>\d{1,3})\] (?=NCCL|[\w/.]{3,60}:\d)",  # NCCL
        r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\t(?P<host>[\w.-]{1,63})\t",
        _STAMP,
        r"\[\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\] ",
        r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2} \d\d:\d\d:\d\d (?P<host>[\w.-]{1,63}) (?=kernel: |systemd|python\d?\[|slurmd|nvidia)",  # syslog
        r"\[Global rank (?P<rank>\d{1,6})\]:? ?",
        r"> ",  # quoted
        r" {0,6}\d{1,5}: ?(?=\[rank\d)",  # srun, behind what a collector puts before it
        r"\[(?:1|2),\d{1,4}\] ",
    )
)
_SRUN = re.compile(r" {0,6}(?P<number>\d{1,5}): ?")
_INNER = re.compile(r"(?:^\[[Rr]ank ?|Process rank: )(\d{1,6})\b")
_PDSH = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9_.-]{0,62}): ")
_INSIDE = re.compile(
    r"\[Rank (\d{1,6})\]|\[PG [^\]]{0,120}Rank (\d{1,6})\]|\bglobal[_ ]rank[:=] ?(\d{1,6})\b"
    r"|[({\[, ]rank[=:] ?(\d{1,6})[,)}\] ]|\bProcess rank: (\d{1,6}),|\bon rank (\d{1,6})\b|^\W{0,3}[Rr]ank[ =:]{1,2}(\d{1,6})(?:/\d{1,6})?[:,\] ]"
)
_FILE_RANK = re.compile(r"(?:^|[^a-z])(?:global[_-]?)?rank[_-]?(\d{1,6})(?!\d)|(?:^|[_-])r(\d{1,5})\.(?:log|out|err)|^std_log_process_(\d{1,5})\.", re.IGNORECASE)  # fmt: skip
_FILE_NODE = re.compile(r"(?:^|[^a-z])(?:node|host|worker|machine|pod|master)[_-]?(\d{1,5})(?!\d)", re.IGNORECASE)  # fmt: skip
_FILE_HOST = re.compile(r"^(?!(?:slurm|job|run|log|out|output|train|exp|attempt|std|console|part|epoch|version|test)[^a-z])(?P<host>[A-Za-z][A-Za-z0-9-]{0,60}?\d[A-Za-z0-9-]{0,20}?|(?:node|host|worker|machine|server|gpu)-[a-z])(?:[-_.]rank[-_]?\d{1,6})?\.(?:log|out|err|txt)$")  # fmt: skip
_LOG_DIR = re.compile(r"(?:^|/)(?:attempt_\d{1,4}/)?(\d{1,4})/(?:stderr|stdout)\.log$")
_MOST_PREFIXES = 4
_MOST_SRUN_SHARE = 0.6
_FEWEST_STYLED = 2
_FEWEST_COUNTED = 5
_BEFORE = re.compile(rf"(?:> )?(?:{_STAMP}){{0,2}}(?:> )?(?:(?P<compose>[a-z][\w.-]{{0,62}}) {{1,12}}\| )?")
"""What may stand before what a launcher puts before a line: a quotation's mark, the time of a collector of logs."""


def split_prefix(piece: str, *, style: str = "") -> tuple[Who, str]:
    """Whom the prefixes of a line name, and the line without them.

    Args:
        piece: a line, or a part of one.
        style: what `find_style` says of its log.
    """
    who, place = Who(), 0
    if style:
        timed = _BEFORE.match(piece)
        who, place = (_merged(who, timed.groupdict()), timed.end()) if timed else (who, 0)
        found = (_PDSH if style == "pdsh" else _SRUN).match(piece, place)
        if found:
            place = found.end()
            who = _styled(who, found, style)
    for _ in range(_MOST_PREFIXES):
        for pattern in _PREFIXES:
            found = pattern.match(piece, place)
            if found:
                who, place = _merged(who, found.groupdict()), found.end()
                break
        else:
            break
    return who, piece[place:]


def find_rank(text: str) -> int | None:
    """The rank that a line names in its words, where it names itself."""
    found = _INSIDE.search(text[:400])
    return int(next(group for group in found.groups() if group)) if found else None


def find_style(lines: list[str]) -> str:
    """What the lines of a log begin with: "srun" (a number: the rank), "srun-nodes" (a number: the node), "pdsh" (a host), or "" for neither.

    What a script says before its first such line does not count, nor what Slurm itself says.
    """
    lines = [_BEFORE.sub("", line, count=1) for line in lines if line.strip()]
    lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    numbered = [bool(_SRUN.match(line)) for line in lines]
    if _is_usual(numbered) and not _are_line_numbers(lines):
        return "srun-nodes" if _are_nodes(lines) else "srun"
    named = [(found := _PDSH.match(line)) is not None and _like_host(found["host"]) for line in lines]
    return "pdsh" if _is_usual(named) else ""


def _is_usual(has: list[bool]) -> bool:
    """Whether most lines from the first such one on are like it."""
    if has.count(True) < _FEWEST_STYLED:
        return False
    rest = has[has.index(True) :]
    return rest.count(True) >= _MOST_SRUN_SHARE * len(rest)


def who_is_file(name: str) -> Who:
    """Whose log a file is, by its name."""
    base = name.rsplit("/", 1)[-1]
    rank = _FILE_RANK.search(base)
    node = _FILE_NODE.search(base)
    host = _FILE_HOST.match(base)
    if not rank and (inside := _LOG_DIR.search(name)):
        return Who(local_rank=int(inside[1]))
    named = host["host"] if host and not _FILE_RANK.fullmatch(host["host"]) else None
    return Who(
        rank=int(next(number for number in rank.groups() if number)) if rank else None,
        node_rank=int(node[1]) if node else None,
        host=named,
    )


def _styled(who: Who, found: re.Match[str], style: str) -> Who:
    if style == "pdsh":
        return replace(who, host=found["host"])
    number = int(found["number"])
    return replace(who, rank=number) if style == "srun" else replace(who, node_rank=number)


def _are_nodes(lines: list[str]) -> bool:
    """Whether srun's numbers are those of launchers, with ranks of their own below them."""
    for line in lines:
        found = _SRUN.match(line)
        rest = line[found.end() :] if found else ""
        inner = _INNER.search(rest)
        if found and inner and int(inner[1]) != int(found["number"]):
            return True
        if found and ("distributed tasks at:" in rest or "torch/distributed/run.py" in rest):
            return True
    return False


def _are_line_numbers(lines: list[str]) -> bool:
    """Whether the numbers before lines only ever grow: an editor's or grep's."""
    numbers = [int(found["number"]) for line in lines if (found := _SRUN.match(line))]
    return (
        len(numbers) >= _FEWEST_COUNTED
        and numbers[0] > 0
        and all(one + 1 == other for one, other in pairwise(numbers))
    )


def _like_host(word: str) -> bool:
    return any(letter.isdigit() for letter in word) or "-" in word or "." in word


def _merged(who: Who, found: dict[str, str | None]) -> Who:
    numbers = {
        name: int(found[name] or 0) for name in ("rank", "local_rank", "pid", "node_rank") if found.get(name)
    }
    host = found.get("host") or found.get("pod") or found.get("compose")
    return replace(who, **numbers, **({"host": host} if host else {}))  # type: ignore[arg-type]
