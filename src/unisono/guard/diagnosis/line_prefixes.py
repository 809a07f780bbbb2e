"""Parses what surrounds the text of a log line: prefixes of launchers and log collectors, JSON
objects, times; and which rank and host they name.
"""

import calendar
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from unisono.base.text import plain
from unisono.guard.diagnosis.run_facts import NO_ORIGIN, Origin

_HOST = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
_STAMP = (
    r"\[?20\d\d[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d| UTC)?\]?"
    r" (?:std(?:err|out) [FP] )?"
)
"""The time that a log collector adds before each line."""
_PREFIXES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[rank(?P<rank>\d{1,6})\]:? ?",  # torch since 2.2
        # torchrun --tee writes this.
        r"\[(?:trainer|default|worker|elastic|local_rank)_?(?P<local_rank>\d{1,4})\]:? ?",
        # mpirun --tag-output; SageMaker
        r"\[\d{1,6},(?:mpirank:)?(?P<rank>\d{1,6})(?:,(?P<host>[\w.-]{1,63}))?\]<std(?:err|out)>:? ?",
        # Ray
        (
            r"\((?P<actor>[A-Za-z_][\w:.]{0,80}(?: rank=(?P<rank>\d{1,6}))?) pid=(?P<pid>\d{1,10})(?:,"
            r" ip=(?P<host>[\w.:-]{3,60}))?\) ?"
        ),
        # SkyPilot
        (
            r"\((?:head|task|worker\d{0,4}|node-?\d{0,4})(?:, rank=(?P<node_rank>\d{1,5}))?,"
            r" pid=(?P<pid>\d{1,10})(?:, ip=(?P<host>[\w.:-]{3,60}))?\) ?"
        ),
        r"std(?:err|out): ?",
        r"\((?:raylet|gcs_server|autoscaler)(?:, ip=(?P<host>[\w.:-]{3,60})| \+\w{1,12})?\) ?",
        # kubectl logs --prefix
        r"\[(?:pod/)?(?P<pod>[a-z0-9][a-z0-9.-]{1,200}-(?P<pod_number>\d{1,4}))[/ ][\w.-]{1,63}\] ?",
        r"(?P<compose>[a-z][\w.-]{0,62}) {1,12}\| ",  # docker compose
        r"\((?P<host>[a-z][\w.-]{0,50}\d)\) ",
        r"(?P<host>"
        + _HOST
        + r"):(?P<pid>\d{1,10}):\d{1,10} \[(?P<device>\d{1,3})\] (?=NCCL|[\w/.]{3,60}:\d)",  # NCCL
        r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\t(?P<host>[\w.-]{1,63})\t",
        _STAMP,
        r"\[\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\] ",
        # syslog
        (
            r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2} \d\d:\d\d:\d\d"
            r" (?P<host>[\w.-]{1,63}) (?=kernel: |systemd|python\d?\[|slurmd|nvidia)"
        ),
        r"\[Global rank (?P<rank>\d{1,6})\]:? ?",
        r"> ",  # quoted
        r" {0,6}\d{1,5}: ?(?=\[rank\d)",  # srun, behind what a collector puts before it
        r"\[(?:1|2),\d{1,4}\] ",
    )
)
_ANY_PREFIX = re.compile("|".join(re.sub(r"\(\?P<\w+>", "(?:", one.pattern) for one in _PREFIXES))
"""One search instead of one for each, since most lines have none."""
_SRUN = re.compile(r" {0,6}(?P<number>\d{1,5}): ?")
_INNER = re.compile(r"(?:^\[[Rr]ank ?|Process rank: )(\d{1,6})\b")
_PDSH = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9_.-]{0,62}): ")
_INSIDE = re.compile(
    r"\[Rank (\d{1,6})\]|\[PG [^\]]{0,120}Rank (\d{1,6})\]|\bglobal[_ ]rank[:=] ?(\d{1,6})\b"
    r"|[({\[, ]rank[=:] ?(\d{1,6})[,)}\] ]|\bProcess rank: (\d{1,6}),|\bon rank (\d{1,6})\b|^\W{0,3}[Rr]ank["
    r" =:]{1,2}(\d{1,6})(?:/\d{1,6})?[:,\] ]"
)
_FILE_RANK = re.compile(
    r"(?:^|[^a-z])(?:global[_-]?)?rank[_-]?(\d{1,6})(?!\d)|(?:^|[_-])r(\d{1,5})\.(?:log|out|err)"
    r"|^std_log_process_(\d{1,5})\.",
    re.IGNORECASE,
)
_FILE_NODE = re.compile(
    r"(?:^|[^a-z])(?:node|host|worker|machine|pod|master)[_-]?(\d{1,5})(?!\d)", re.IGNORECASE
)
_FILE_HOST = re.compile(
    r"^(?!(?:slurm|job|run|log|out|output|train|exp|attempt|std|console|part|epoch|version"
    r"|test)[^a-z])(?P<host>[A-Za-z][A-Za-z0-9-]{0,60}?\d[A-Za-z0-9-]{0,20}?|(?:node|host|worker|machine"
    r"|server|gpu)-[a-z])(?:[-_.]rank[-_]?\d{1,6})?\.(?:log|out|err|txt)$"
)
_FILE_SLURM = re.compile(
    r"^(?:[A-Za-z]\w{0,40}[-_.])?\d{3,12}[-_.](?P<host>(?!(?:rank|task|proc|node|host|worker|machine|gpu"
    r"|local|global)[-_.]?\d{1,6}\.)[A-Za-z][A-Za-z0-9-]{0,60}?)[-_.](?P<rank>\d{1,5})\.(?:log|out|err|txt)$"
)
"""A job, a node and a task, as Slurm's `%j-%N-%t` writes them."""
_LOG_DIR = re.compile(r"(?:^|/)(?:attempt_\d{1,4}/)?(\d{1,4})/(?:stderr|stdout)\.log$")
_MOST_PREFIXES = 4
_MOST_SRUN_SHARE = 0.6
_FEWEST_STYLED = 2
_FEWEST_COUNTED = 5
_BEFORE = re.compile(rf"(?:> )?(?:{_STAMP}){{0,2}}(?:> )?(?:(?P<compose>[a-z][\w.-]{{0,62}}) {{1,12}}\| )?")
"""Characters that may precede a launcher's prefix: a quotation mark, the time of a log
collector.
"""


@functools.lru_cache(maxsize=256)  # a line is looked at by several parts of diagnose
def split_prefix(piece: str, *, style: str = "") -> tuple[Origin, str]:
    """The origin that the prefixes of a line name, and the line without them.

    Args:
        piece: a line, or a part of one.
        style: of its log, from `find_style`.
    """
    who, start = NO_ORIGIN, 0
    if style:
        timed = _BEFORE.match(piece)
        who, start = (_merged(who, timed.groupdict()), timed.end()) if timed else (who, 0)
        match = (_PDSH if style == "pdsh" else _SRUN).match(piece, start)
        if match:
            start = match.end()
            who = _styled(who, match, style)
    for _ in range(_MOST_PREFIXES):
        if not _ANY_PREFIX.match(piece, start):
            break
        for pattern in _PREFIXES:
            match = pattern.match(piece, start)
            if match:
                who, start = _merged(who, match.groupdict()) if pattern.groups else who, match.end()
                break
    return who, piece[start:]


def find_rank(text: str) -> int | None:
    """The rank in the text of a line, if the line names its own."""
    head = text[:400]
    match = _INSIDE.search(head) if "ank" in head else None
    return int(next(group for group in match.groups() if group)) if match else None


def find_style(lines: list[str]) -> str:
    """The prefix style of a log: "srun" (the rank's number), "srun-nodes" (the node's number),
    "pdsh" (a host), or "" for none.

    Lines of a script before the first such line do not count, nor Slurm's own.
    """
    lines = [_BEFORE.sub("", line, count=1) for line in lines if line.strip()]
    lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    numbered = [bool(_SRUN.match(line)) for line in lines]
    if _is_usual(numbered) and not _are_line_numbers(lines):
        return "srun-nodes" if _are_nodes(lines) else "srun"
    named = [(match := _PDSH.match(line)) is not None and _like_host(match["host"]) for line in lines]
    return "pdsh" if _is_usual(named) else ""


def _is_usual(has: list[bool]) -> bool:
    """Whether most lines from the first such one on are like it."""
    if has.count(True) < _FEWEST_STYLED:
        return False
    after_first = has[has.index(True) :]
    return after_first.count(True) >= _MOST_SRUN_SHARE * len(after_first)


def who_is_file(name: str) -> Origin:
    """The rank and host of a log file, by its name."""
    base = name.rsplit("/", 1)[-1]
    if slurm := _FILE_SLURM.match(base):
        return Origin(rank=int(slurm["rank"]), host=slurm["host"])
    rank = _FILE_RANK.search(base)
    node = _FILE_NODE.search(base)
    host = _FILE_HOST.match(base)
    if not rank and (inside := _LOG_DIR.search(name)):
        return Origin(local_rank=int(inside[1]))
    named = host["host"] if host and not _FILE_RANK.fullmatch(host["host"]) else None
    return Origin(
        rank=int(next(number for number in rank.groups() if number)) if rank else None,
        node_rank=int(node[1]) if node else None,
        host=named,
    )


def _styled(who: Origin, match: re.Match[str], style: str) -> Origin:
    if style == "pdsh":
        return replace(who, host=match["host"])
    number = int(match["number"])
    return replace(who, rank=number) if style == "srun" else replace(who, node_rank=number)


def _are_nodes(lines: list[str]) -> bool:
    """Whether srun's numbers are those of launchers, with ranks of their own below them."""
    for line in lines:
        match = _SRUN.match(line)
        text = line[match.end() :] if match else ""
        inner = _INNER.search(text)
        if match and inner and int(inner[1]) != int(match["number"]):
            return True
        if match and ("distributed tasks at:" in text or "torch/distributed/run.py" in text):
            return True
    return False


def _are_line_numbers(lines: list[str]) -> bool:
    """Whether the numbers before lines only ever grow: an editor's or grep's."""
    numbers = [int(match["number"]) for line in lines if (match := _SRUN.match(line))]
    return (
        len(numbers) >= _FEWEST_COUNTED
        and numbers[0] > 0
        and all(one + 1 == other for one, other in pairwise(numbers))
    )


def _like_host(word: str) -> bool:
    return any(letter.isdigit() for letter in word) or "-" in word or "." in word


def _merged(who: Origin, groups: dict[str, str | None]) -> Origin:
    rank, local_rank, pid, node = (groups.get(name) for name in ("rank", "local_rank", "pid", "node_rank"))
    host = groups.get("host") or groups.get("pod") or groups.get("compose")
    if not (rank or local_rank or pid or node or host):
        return who
    return Origin(  # dataclasses.replace takes five times as long, and this is called for each line
        int(rank) if rank else who.rank,
        host or who.host,
        int(local_rank) if local_rank else who.local_rank,
        int(pid) if pid else who.pid,
        int(node) if node else who.node_rank,
    )


_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
LOOK_CHARS = 120
"""A line's time is within its first characters."""

_ISO = re.compile(
    r"(?P<y>20\d\d)[-/](?P<m>\d\d)[-/](?P<d>\d\d)["
    r" T_](?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?"
)
_GLOG = re.compile(
    r"(?:^|[\s\]\[])[IWEFDC](?P<m>\d{1,2})(?P<d>\d\d)"
    r" (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:\.(?P<f>\d{1,9}))?"
)
_AMERICAN = re.compile(r"\b(?P<m>\d\d)/(?P<d>\d\d)/(?P<y>20\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?P<f>)")
_SYSLOG = re.compile(
    r"(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<d>\d{1,2})"
    r" (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?: (?P<y>20\d\d))?"
)


_YEAR = re.compile(r"\b(20[12]\d)[-/]\d\d[-/]\d\d[ T_]\d\d:|:\d\d (20[12]\d)\b")


def find_time(text: str, *, year: int | None = None) -> float | None:
    """Seconds since 1970 of the time at the start of a line, read as UTC; None: there is none.

    Args:
        year: for formats without one; None: such times are ignored.
    """
    head = text[:LOOK_CHARS]
    match = _ISO.search(head) or _AMERICAN.search(head) or _GLOG.search(head) or _SYSLOG.search(head)
    if not match:
        return None
    groups = match.groupdict()
    which = int(groups.get("y") or year or 0)
    month = _MONTHS.get(groups.get("b") or "") or int(groups.get("m") or 0)
    day, hour, minute, second = (int(groups[name]) for name in "dHMS")
    if not which or not 1 <= month <= 12 or not 1 <= day <= 31 or hour > 23 or minute > 59 or second > 60:
        return None
    fraction = float(f"0.{groups.get('f') or 0}")
    return calendar.timegm((which, month, day, hour, minute, second)) + fraction


def find_year(text: str) -> int | None:
    """The year at the start of a line, for the formats without one."""
    head = text[:LOOK_CHARS]
    match = _YEAR.search(head) if "20" in head else None
    return int(match[1] or match[2]) if match else None


# fmt: off
_TEXTS = ("log", "msg", "message", "event", "textPayload", "text", "error", "exc", "exc_info", "exception",
          "traceback", "stack", "stack_info", "stacktrace")
# fmt: on
_RANKS = ("rank", "global_rank", "RANK")
_HOSTS = ("host", "hostname", "node", "pod", "pod_name", "container_name")
_HOST_FIELD = re.compile(r"[A-Za-z0-9_.@:-]{1,63}")
_MOST_CHARS = 1 << 16
_MOST_LINES = 200


def unwrap_json(line: str) -> tuple[Origin, list[str]] | None:
    """The origin and message lines of a line that is a JSON object; None: it is not one, or has no
    message.
    """
    text = line.strip()
    if not (text.startswith('{"') and text.endswith("}")) or len(text) > _MOST_CHARS:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    messages = [record[name] for name in _TEXTS if isinstance(record.get(name), str)]
    lines = [
        plain(one) if "\x1b" in one else one
        for message in messages
        for one in message.splitlines()
        if one.strip()
    ]
    if not lines or isinstance(record.get("loss"), int | float):
        return None
    inner = [record, *(value for value in record.values() if isinstance(value, dict))]
    return _origin_of_fields(inner), lines[:_MOST_LINES]


def _origin_of_fields(objects: Sequence[Mapping[str, Any]]) -> Origin:
    rank = next((one[name] for one in objects for name in _RANKS if name in one), None)
    host = next(
        (
            one[name]
            for one in objects
            for name in _HOSTS
            if isinstance(one.get(name), str) and _HOST_FIELD.fullmatch(one[name])
        ),
        None,
    )
    number = int(str(rank)) if str(rank).isdecimal() and len(str(rank)) < 7 else None
    return NO_ORIGIN if number is None and not host else Origin(rank=number, host=host)


_ANCHORS = (
    b"Traceback (most recent call last)",
    b"[rank",
    b'  File "',
    b"  exitcode  : ",
    b"ERROR:torch",
    b"srun: error",
    b"slurmstepd: error",
    b"usage: ",
)
"""Text that always starts a line."""
_MOST_ANCHORS = 40
_LONGEST = 160
_SAMPLED = 60
"""Lines at the start and end of a chunk that must have the prefix."""
_FEWEST = 4
_SHARE = 0.85
_NUMBERED = re.compile(r"\d{1,5}: ?$")
"""srun's prefix, which is not part of a collector's."""
_PARTS = re.compile(
    r"(?P<number>\d+)|(?P<level>\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL|FATAL|TRACE|stdout|stderr|info"
    r"|warn|error)\b)"
    r"|(?P<month>\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b)|(?P<blank>"
    r" +)|(?P<other>.)"
)


class CollectorPrefix:
    """The prefix that a log collector adds to every line of a log, found by the lines with a known
    start and confirmed by all others.
    """

    def __init__(self) -> None:
        """No line has been seen yet."""
        self._pattern: re.Pattern[str] | None = None
        self._known = False

    def learn(self, data: bytes, style: str) -> None:
        """Learns from the lines of a chunk whether there is a prefix."""
        if self._known:
            return
        before = [text for offset in _places(data) if (text := _before(data, offset)) is not None]
        if not before:
            return
        self._known = True
        texts = {split_prefix(text, style=style)[1] for text in before}
        if "" in texts or any(len(text) > _LONGEST for text in texts):
            return
        texts = {_outer(text) for text in texts}
        if "" in texts:
            return
        lines = [split_prefix(line, style=style)[1] for line in _sample(data) if line.strip()]
        self._pattern = _common(texts, lines)
        ranked = _common({_NUMBERED.sub("", text) for text in texts} - {""}, lines)
        if (
            self._pattern
            and ranked
            and find_style([line[match.end() :] for line in lines if (match := ranked.match(line))])
        ):
            self._pattern = ranked

    def off(self, text: str) -> str | None:
        """The text of a line without the collector's prefix; None: it has none."""
        match = self._pattern.match(text) if self._pattern else None
        return text[match.end() :] if match else None


def _common(texts: set[str], lines: list[str]) -> re.Pattern[str] | None:
    """A pattern for these texts, if nearly all lines begin with one of them."""
    if not texts or len(lines) < _FEWEST:
        return None
    pattern = re.compile("|".join(sorted({_shape(text) for text in texts}, key=len, reverse=True)))
    return pattern if sum(pattern.match(line) is not None for line in lines) >= _SHARE * len(lines) else None


def _outer(text: str) -> str:
    """The part before known prefixes."""
    return next((text[:end] for end in range(len(text)) if not split_prefix(text[end:])[1]), text)


def _places(data: bytes) -> list[int]:
    """Positions of the first anchors of each kind."""
    places: list[int] = []
    for word in _ANCHORS:
        offset = data.find(word)
        while offset >= 0 and len(places) < _MOST_ANCHORS:
            places.append(offset)
            offset = (
                data.find(word, data.find(b"\n", offset))
                if b"\n" in data[offset : offset + (1 << 16)]
                else -1
            )
    return places


def _before(data: bytes, offset: int) -> str | None:
    """The text before an anchor in its line; None: it is inside other text, e.g. a launcher's table
    or after a progress bar.
    """
    least = max(0, offset - 8 * _LONGEST)
    start = max(data.rfind(b"\n", least, offset), data.rfind(b"\r", least, offset), least - 1) + 1
    text = plain(data[start:offset].decode("utf-8", "replace"))
    return None if text.rstrip().endswith(("traceback :", "]", "%")) and not text.endswith(" ") else text


def _sample(data: bytes) -> list[str]:
    head, tail = data[: 1 << 15].split(b"\n")[:_SAMPLED], data[-(1 << 15) :].split(b"\n")[1:][-_SAMPLED:]
    return [plain(line.rpartition(b"\r")[2].decode("utf-8", "replace")[:400]) for line in (*head, *tail)]


def _shape(text: str) -> str:
    """A pattern for this text with any numbers, months and levels; trailing blanks count, since
    lines are indented.
    """
    body = text.rstrip(" ")
    parts = {"number": r"\d+", "level": r"\w+", "month": r"\w{3}", "blank": " +"}
    shaped = (parts.get(match.lastgroup or "") or re.escape(match[0]) for match in _PARTS.finditer(body))
    return "".join(shaped) + text[len(body) :]
