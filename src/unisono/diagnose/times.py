"""Times at the head of lines, in the formats that trainers, launchers, kernels and schedulers write."""

import calendar
import re

_MONTHS = {name: number for number, name in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)}  # fmt: skip
LOOK_CHARS = 120
"""A line's time stands at its head."""

_ISO = re.compile(r"(?P<y>20\d\d)[-/](?P<m>\d\d)[-/](?P<d>\d\d)[ T_](?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?")  # fmt: skip
_GLOG = re.compile(r"(?:^|[\s\]\[])[IWEFDC](?P<m>\d{1,2})(?P<d>\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:\.(?P<f>\d{1,9}))?")  # fmt: skip
_AMERICAN = re.compile(r"\b(?P<m>\d\d)/(?P<d>\d\d)/(?P<y>20\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?P<f>)")
_SYSLOG = re.compile(r"(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<d>\d{1,2}) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?: (?P<y>20\d\d))?")  # fmt: skip


def find_time(text: str, *, year: int | None = None) -> float | None:
    """Seconds since 1970 of the time at the head of a line, read as if it were UTC; None: there is none.

    Args:
        text: the line.
        year: what to take where the format has none; None: such times are not understood.
    """
    head = text[:LOOK_CHARS]
    found = _ISO.search(head) or _AMERICAN.search(head) or _GLOG.search(head) or _SYSLOG.search(head)
    if not found:
        return None
    groups = found.groupdict()
    which = int(groups.get("y") or year or 0)
    month = _MONTHS.get(groups.get("b") or "") or int(groups.get("m") or 0)
    day, hour, minute, second = (int(groups[name]) for name in "dHMS")
    if not which or not 1 <= month <= 12 or not 1 <= day <= 31 or hour > 23 or minute > 59 or second > 60:
        return None
    fraction = float(f"0.{groups.get('f') or 0}")
    return calendar.timegm((which, month, day, hour, minute, second)) + fraction


def find_year(text: str) -> int | None:
    """The year in the head of a line, for the formats that have none."""
    found = re.search(r"\b(20[12]\d)[-/]\d\d[-/]\d\d[ T_]\d\d:|:\d\d (20[12]\d)\b", text[:LOOK_CHARS])
    return int(found[1] or found[2]) if found else None
