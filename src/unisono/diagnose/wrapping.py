"""What an unknown collector of logs puts before every line: found by the words that always begin a line, and by all other lines that bear it, too."""

import re

from unisono.diagnose import identity
from unisono.text import plain

_ANCHORS = (b"Traceback (most recent call last)", b"[rank", b'  File "', b"  exitcode  : ", b"ERROR:torch", b"srun: error", b"slurmstepd: error", b"usage: ")  # fmt: skip
"""Words with which a line begins, whoever writes it."""
_MOST_ANCHORS = 40
_LONGEST = 160
_SAMPLED = 60
"""Lines of the head and of the tail of a chunk that have to bear it."""
_FEWEST = 4
_SHARE = 0.85
_NUMBERED = re.compile(r"\d{1,5}: ?$")
"""What srun puts before a line; it is no part of a wrapping."""
_PARTS = re.compile(
    r"(?P<number>\d+)|(?P<level>\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL|FATAL|TRACE|stdout|stderr|info|warn|error)\b)"
    r"|(?P<month>\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b)|(?P<blank> +)|(?P<other>.)"
)


class Wrapping:
    """The wrapping of one log, as far as it is known."""

    def __init__(self) -> None:
        """With nothing seen."""
        self._pattern: re.Pattern[str] | None = None
        self._known = False

    def learn(self, data: bytes, style: str) -> None:
        """Looks at the lines of a chunk until it is known whether there is a wrapping."""
        if self._known:
            return
        before = [text for place in _places(data) if (text := _before(data, place)) is not None]
        if not before:
            return
        self._known = True
        rests = {identity.split_prefix(text, style=style)[1] for text in before}
        if "" in rests or any(len(text) > _LONGEST for text in rests):
            return
        rests = {_outer(text) for text in rests}
        if "" in rests:
            return
        lines = [identity.split_prefix(line, style=style)[1] for line in _sample(data) if line.strip()]
        self._pattern = _common(rests, lines)
        ranked = _common({_NUMBERED.sub("", text) for text in rests} - {""}, lines)
        if self._pattern and ranked and identity.find_style([line[found.end() :] for line in lines if (found := ranked.match(line))]):  # fmt: skip
            self._pattern = ranked

    def off(self, text: str) -> str | None:
        """The text of a line, known prefixes taken off, without its wrapping; None: it bears none."""
        found = self._pattern.match(text) if self._pattern else None
        return text[found.end() :] if found else None


def _common(texts: set[str], lines: list[str]) -> re.Pattern[str] | None:
    """A pattern for these texts, if nearly all lines begin with one of them."""
    if not texts or len(lines) < _FEWEST:
        return None
    pattern = re.compile("|".join(sorted({_shape(text) for text in texts}, key=len, reverse=True)))
    return pattern if sum(pattern.match(line) is not None for line in lines) >= _SHARE * len(lines) else None


def _outer(text: str) -> str:
    """The part of it that stands before prefixes that are known."""
    return next((text[:end] for end in range(len(text)) if not identity.split_prefix(text[end:])[1]), text)


def _places(data: bytes) -> list[int]:
    """Where the first anchors of each kind stand."""
    found: list[int] = []
    for word in _ANCHORS:
        place = data.find(word)
        while place >= 0 and len(found) < _MOST_ANCHORS:
            found.append(place)
            place = (
                data.find(word, data.find(b"\n", place)) if b"\n" in data[place : place + (1 << 16)] else -1
            )
    return found


def _before(data: bytes, place: int) -> str | None:
    """What stands before an anchor in its line; None: it is within something, as in a launcher's table or behind a bar."""
    least = max(0, place - 8 * _LONGEST)
    start = max(data.rfind(b"\n", least, place), data.rfind(b"\r", least, place), least - 1) + 1
    text = plain(data[start:place].decode("utf-8", "replace"))
    return None if text.rstrip().endswith(("traceback :", "]", "%")) and not text.endswith(" ") else text


def _sample(data: bytes) -> list[str]:
    head, tail = data[: 1 << 15].split(b"\n")[:_SAMPLED], data[-(1 << 15) :].split(b"\n")[1:][-_SAMPLED:]
    return [plain(line.rpartition(b"\r")[2].decode("utf-8", "replace")[:400]) for line in (*head, *tail)]


def _shape(text: str) -> str:
    """A pattern for this text with any numbers, months and levels; the blanks at its end count, since lines are indented."""
    body = text.rstrip(" ")
    parts = {"number": r"\d+", "level": r"\w+", "month": r"\w{3}", "blank": " +"}
    shaped = (parts.get(found.lastgroup or "") or re.escape(found[0]) for found in _PARTS.finditer(body))
    return "".join(shaped) + text[len(body) :]
