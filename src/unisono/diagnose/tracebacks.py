"""Python's tracebacks, put together from lines: of several ranks at once, in chains, in boxes, in launchers' tables."""

import re
from dataclasses import dataclass, field, replace

from unisono.diagnose.event import Event, Who
from unisono.diagnose.facts import Traceback

MOST_LINES = 1500
"""Of an open traceback: what is longer has lost its end."""
MESSAGE_LINES = 14
_STRANGERS = 80
"""Unindented lines that are no exception, after which an open traceback is given up."""

_HEADER = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(
    r'^\W{0,8}File "(?P<file>[^"]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,120}))?'
)
_BOXED = re.compile(r"^[│|] (?:❱ ?)?(?P<file>[^\s:]{1,400}):(?P<line>\d{1,9}) in (?P<function>\S{1,120})")
_EXCEPTION = re.compile(
    r"^(?P<module>(?:[A-Za-z_]\w{0,80}\.){0,12})(?P<type>[A-Za-z_]\w{0,80})(?:\((?P<inner>[\w.]{1,120})\))?(?::(?: (?P<message>.*))?)?$"
)
_ENDINGS = ("Error", "Exception", "Interrupt", "Exit", "Iteration", "Timeout", "Failure", "Failed", "Fault", "NotMet", "Exhausted", "NotFound", "Empty", "Expired", "Aborted")  # fmt: skip
_CAUSE = "The above exception was the direct cause"
_HANDLING = "During handling of the above exception"
_IGNORED = re.compile(r"^Exception ignored in|^Exception in thread|^Error in atexit|^Exception ignored on")
_IN_TABLE = re.compile(r"^\s{0,8}traceback\s{0,3}: ")
_REMOTE = re.compile(r"\(pid=(?P<pid>\d{1,10}), ip=(?P<ip>[\w.:-]{3,60})")
_THREAD = re.compile(r"^Exception in thread")
_PACKAGES = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3|^<frozen|/(?:torch|transformers|accelerate|deepspeed|lightning|pytorch_lightning|ray)/\w|^/opt/conda/lib/"
)


@dataclass(slots=True)
class _Open:
    """A traceback that is being read."""

    began: int
    indent: int
    lines: int = 0
    strangers: int = 0
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    linked: str = ""
    ignored: bool = False
    threaded: bool = False
    who: Who | None = None
    tabled: bool = False


@dataclass(slots=True)
class _Closed:
    """One that has its exception; its message may go on."""

    traceback: Traceback
    more: list[str] = field(default_factory=list)
    over: bool = False


class Tracebacks:
    """Takes the lines of one log; `done` has what was found."""

    def __init__(self) -> None:
        """With nothing read."""
        self._open: dict[str, _Open] = {}
        self._last: dict[str, _Closed] = {}
        self._link: dict[str, str] = {}
        self._ignored: dict[str, int] = {}
        self._thread = False
        self._all: list[_Closed] = []

    @property
    def waiting(self) -> bool:
        """Whether the next lines are wanted, whatever is in them."""
        return bool(self._open) or any(not one.over for one in self._last.values())

    @staticmethod
    def begins(text: str) -> bool:
        """Whether this line begins one."""
        return bool(_HEADER.search(text))

    def feed(self, key: str, text: str, event: Event) -> bool:
        """Takes a line without its prefixes; `key` tells the processes of a log apart. True: it was part of a traceback."""
        text = text.rstrip()
        stripped = text.strip(" │|")
        if _HEADER.search(text):
            self._begin(key, text, event)
            return True
        if stripped.startswith((_CAUSE, _HANDLING)):
            self._link[key] = "cause" if stripped.startswith(_CAUSE) else "handling"
            return True
        if _IGNORED.search(stripped):
            self._ignored[key] = event.order
            self._thread = _THREAD.search(stripped) is not None
        opened = self._open.get(key)
        if opened is None:
            return self._message(key, text)
        return self._inside(key, opened, text, event)

    def done(self) -> list[Traceback]:
        """The last of each chain, with the earlier ones in it, in the order of their ends."""
        chains: list[Traceback] = []
        for closed in self._all:
            whole = replace(
                closed.traceback, message="\n".join([closed.traceback.message, *closed.more]).strip()
            )
            if whole.linked and chains:
                near = next((i for i in reversed(range(len(chains))) if _same(chains[i], whole)), None)
                if near is not None:
                    previous = chains.pop(near)
                    earlier = (replace(previous, linked=whole.linked, earlier=()), *previous.earlier)
                    whole = replace(whole, linked="", earlier=earlier, began=min(whole.began, previous.began))
            chains.append(replace(whole, linked=""))
        return chains

    def _begin(self, key: str, text: str, event: Event) -> None:
        ignored = event.order - self._ignored.pop(key, -(1 << 60)) < 400
        tabled = bool(_IN_TABLE.match(text))
        indent = 4 if tabled else len(text) - len(text.lstrip())
        linked = self._link.pop(key, "")
        if key in self._last:
            self._last[key].over = True
        self._open[key] = _Open(
            event.order,
            indent,
            linked=linked,
            ignored=ignored,
            threaded=ignored and self._thread,
            tabled=tabled,
        )

    def _inside(self, key: str, opened: _Open, text: str, event: Event) -> bool:
        opened.lines += 1
        frame = _FRAME.match(text) or _BOXED.match(text)
        if frame:
            opened.frames.append((frame["file"], int(frame["line"]), (frame["function"] or "").strip()))
            return True
        if (
            text[: opened.indent + 1].strip()
            and (found := _EXCEPTION.match(text.strip()))
            and _is_exception(found)
        ):
            self._close(key, opened, found, event)
            return True
        if text and not text[0].isspace() and text[0] not in "│|╭╰+~^":
            opened.strangers += 1
        if opened.lines > MOST_LINES or opened.strangers > _STRANGERS:
            del self._open[key]
        return bool(text) and text[0] in " │|╭╰"

    def _close(self, key: str, opened: _Open, found: re.Match[str], event: Event) -> None:
        del self._open[key]
        if (
            found["inner"] and found["type"] == "RayTaskError"
        ):  # frames of the remote process follow, and its own exception
            self._open[key] = _Open(
                opened.began, 0, linked=opened.linked, who=_remote(found["message"] or "")
            )
            return
        user = next((frame for frame in reversed(opened.frames) if not _PACKAGES.search(frame[0])), None)
        inner = opened.frames[-1] if opened.frames else None
        linked = opened.linked
        previous = self._last.get(key)
        if previous is not None and not linked and previous.traceback.message.startswith("Caught "):
            linked = "cause"  # a loader's worker: its own exception follows
        closed = _Closed(
            Traceback(
                event=replace(event, who=opened.who) if opened.who and event.who.rank is None else event,
                began=opened.began,
                type=found["type"],
                message=found["message"] or "",
                frame=_shown(inner),
                user_frame=_shown(user),
                user_file=user[0] if user else "",
                user_line=user[1] if user else None,
                functions=tuple(name for _, _, name in opened.frames),
                linked="cause" if linked == "cause" else "handling" if linked else "",
                ignored=opened.ignored,
                threaded=opened.threaded,
                tabled=opened.tabled,
            )
        )
        self._last[key] = closed
        self._all.append(closed)

    def _message(self, key: str, text: str) -> bool:
        last = self._last.get(key)
        if last is None or last.over:
            return False
        last.more.append(text)
        if len(last.more) >= MESSAGE_LINES or _HEADER.search(text):
            last.over = True
        return False


def exception_of(text: str) -> tuple[str, str] | None:
    """The class without its module and the message, where the line is a traceback's last one."""
    found = _EXCEPTION.match(text.strip())
    return (found["type"], found["message"] or "") if found and _is_exception(found) else None


def _is_exception(found: re.Match[str]) -> bool:
    name = found["type"]
    if found["inner"]:
        return True
    return name.endswith(_ENDINGS) or bool(found["module"] and name[0].isupper() and name != name.upper())


def _remote(message: str) -> Who | None:
    """Whose exception Ray hands on."""
    found = _REMOTE.search(message)
    return Who(pid=int(found["pid"]), host=found["ip"]) if found else None


def _same(one: Traceback, other: Traceback) -> bool:
    return one.event.who.rank == other.event.who.rank and one.event.who.pid == other.event.who.pid


def _shown(frame: tuple[str, int, str] | None) -> str:
    return f"{frame[0]}:{frame[1]} in {frame[2]}".removesuffix(" in ") if frame else ""
