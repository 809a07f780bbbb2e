"""How processes ended: Python's tracebacks, put together from lines, and exits as launchers report
them.
"""

import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from unisono.guard.diagnosis.run_facts import Exit, LogEvent, Origin, Traceback

MOST_LINES = 1500
"""Lines of an open traceback: a longer one has lost its end."""
MESSAGE_LINES = 14
_STRANGERS = 80
"""Unindented lines that are not an exception; they end an open traceback."""

_HEADER = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'^\W{0,8}File "(?P<file>[^"]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,120}))?'
)
_BOXED = re.compile(r"^[│|] (?:❱ ?)?(?P<file>[^\s:]{1,400}):(?P<line>\d{1,9}) in (?P<function>\S{1,120})")
_CELL = re.compile(
    r"^(?:File )?(?P<file>(?:Cell|Input) In ?\[\d{1,6}\]|<ipython-input-[\w-]{1,60}>|[^\s:\"]{1,400}\.pyx?)"
    r"(?:(?:, line |:)(?P<line>\d{1,9}))?(?:,? in (?P<function><[^>]{1,80}>|[^\s(]{1,120}).{0,400})?$"
)
_ARROW = re.compile(r"^-{2,8}> (?P<line>\d{1,9})\b")
"""A frame of a notebook's traceback, and the line of its code."""
_EXCEPTION = re.compile(
    r"^(?P<module>(?:[A-Za-z_]\w{0,80}\.){0,12})(?P<type>[A-Za-z_]\w{0,80})(?:\((?P<inner>[\w.]{1,120})\))?(?::(?:"
    r" (?P<message>.*))?)?$"
)
# fmt: off
_ENDINGS = ("Error", "Exception", "Interrupt", "Exit", "Iteration", "Timeout", "Failure", "Failed", "Fault",
            "NotMet", "Exhausted", "NotFound", "Empty", "Expired", "Aborted")
# fmt: on
_CAUSE = "The above exception was the direct cause"
_HANDLING = "During handling of the above exception"
_THREAD = "Exception in thread"
_IGNORED = ("Exception ignored in", _THREAD, "Error in atexit", "Exception ignored on")
_IN_TABLE = re.compile(r"^\s{0,8}traceback\s{0,3}: ")
_REMOTE = re.compile(r"\(pid=(?P<pid>\d{1,10}), ip=(?P<ip>[\w.:-]{3,60})")
_PACKAGES = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\][Ll]ib[/\\]python\d|^<(?:frozen|string|stdin)|[/\\]envs[/\\]\w+[/\\]lib"
    r"|(?:^|[/\\])(?:torch|transformers|accelerate|deepspeed|lightning|pytorch_lightning|ray|datasets|peft|trl|vllm"
    r"|bitsandbytes|diffusers|safetensors|llamafactory|xtuner|mmengine|colossalai|openrlhf|unsloth|torchtune)[/\\]\w"
    r"|(?:^|[/\\])(?:megatron[/\\](?:core|training|legacy|model|data)|verl[/\\](?:trainer|workers|utils|single_controller)"
    r"|swift[/\\](?:llm|trainers|utils|cli)|axolotl[/\\](?:cli|core|utils|train)|nemo[/\\](?:collections|core|utils))\b"
    r"|[/\\]bin[/\\][\w.-]{1,60}$|^/opt/conda/lib/|^/usr/lib/python|[/\\]Lib[/\\](?:threading|runpy|multiprocessing)"
)
"""Paths of installed packages and of training tools, also where these are run from their own
repositories.
"""


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
    who: Origin | None = None
    tabled: bool = False


@dataclass(slots=True)
class _Closed:
    """A traceback with its exception; the message may continue."""

    traceback: Traceback
    more: list[str] = field(default_factory=list)


class Tracebacks:
    """Takes the lines of one log; `done` has what was found."""

    def __init__(self) -> None:
        """With nothing read."""
        self._open: dict[str, _Open] = {}
        self._last: dict[str, _Closed] = {}
        self._talking: set[str] = set()  # keys of the last ones whose messages may continue
        self._link: dict[str, str] = {}
        self._ignored: dict[str, int] = {}
        self._thread = False
        self._all: list[_Closed] = []

    @property
    def waiting(self) -> bool:
        """Whether the next lines are wanted, whatever is in them."""
        return bool(self._open or self._talking)

    def leave(self) -> None:
        """Waits for no more lines of those before, and links none to them."""
        for state in (self._open, self._talking, self._link):
            state.clear()

    def feed(self, key: str, text: str, order: int, event: Callable[[], LogEvent]) -> bool:
        """Takes a line without its prefixes; `key` distinguishes the processes of a log.

        True: it was part of a traceback.

        Args:
            order: of its event.
            event: makes it, which few lines need.
        """
        text = text.rstrip()
        stripped = text.strip(" │|")
        if _HEADER in text:
            self._begin(key, text, order)
            return True
        if stripped.startswith((_CAUSE, _HANDLING)):
            self._link[key] = "cause" if stripped.startswith(_CAUSE) else "handling"
            return True
        if stripped.startswith(_IGNORED):
            self._ignored[key] = order
            self._thread = stripped.startswith(_THREAD)
        opened = self._open.get(key)
        if opened is None:
            return self._message(key, text)
        return self._inside(key, opened, text, event)

    def done(self) -> list[Traceback]:
        """The last of each chain, with the earlier ones in it, in the order of their ends."""
        chains: dict[int, list[Traceback]] = {}
        newest: dict[tuple[int | None, int | None], int] = {}  # the chain of each process
        for number, closed in enumerate(self._all):
            one = closed.traceback
            process = one.event.who.rank, one.event.who.pid
            chain = chains.pop(newest[process]) if one.linked and process in newest else []
            began = min(one.began, chain[-1].began) if chain else one.began
            message = "\n".join([one.message, *closed.more]).strip()
            if (began, message) != (one.began, one.message):
                one = replace(one, began=began, message=message)
            chain.append(one)
            chains[number], newest[process] = chain, number
        return [_last_of(chain) for chain in chains.values()]

    def _begin(self, key: str, text: str, order: int) -> None:
        ignored = order - self._ignored.pop(key, -(1 << 60)) < 400
        tabled = bool(_IN_TABLE.match(text))
        indent = 4 if tabled else len(text) - len(text.lstrip())
        linked = self._link.pop(key, "")
        self._talking.discard(key)
        self._open[key] = _Open(
            order,
            indent,
            linked=linked,
            ignored=ignored,
            threaded=ignored and self._thread,
            tabled=tabled,
        )

    def _inside(self, key: str, opened: _Open, text: str, event: Callable[[], LogEvent]) -> bool:
        opened.lines += 1
        frame = _FRAME.match(text) or _BOXED.match(text) or _CELL.match(text)
        if frame:
            opened.frames.append((frame["file"], int(frame["line"] or 0), (frame["function"] or "").strip()))
            return True
        if opened.frames and (arrow := _ARROW.match(text)):
            opened.frames[-1] = (opened.frames[-1][0], int(arrow["line"]), opened.frames[-1][2])
            return True
        if (
            text[: opened.indent + 1].strip()
            and (match := _EXCEPTION.match(text.strip()))
            and _is_exception(match)
        ):
            self._close(key, opened, match, event())
            return True
        if text and not text[0].isspace() and text[0] not in "│|╭╰+~^":
            opened.strangers += 1
        if opened.lines > MOST_LINES or opened.strangers > _STRANGERS:
            del self._open[key]
        return bool(text) and text[0] in " │|╭╰"

    def _close(self, key: str, opened: _Open, match: re.Match[str], event: LogEvent) -> None:
        del self._open[key]
        if (
            match["inner"] and match["type"] == "RayTaskError"
        ):  # frames of the remote process follow, and its own exception
            self._open[key] = _Open(
                opened.began, 0, linked=opened.linked, who=_remote(match["message"] or "")
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
                type=match["type"],
                message=match["message"] or "",
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
        self._talking.add(key)
        self._all.append(closed)

    def _message(self, key: str, text: str) -> bool:
        if key in self._talking:
            more = self._last[key].more
            more.append(text)
            if len(more) >= MESSAGE_LINES:
                self._talking.discard(key)
        return False


def exception_of(text: str) -> tuple[str, str] | None:
    """The class without its module and the message, where the line is a traceback's last one."""
    match = _EXCEPTION.match(text.strip())
    return (match["type"], match["message"] or "") if match and _is_exception(match) else None


def _is_exception(match: re.Match[str]) -> bool:
    name = match["type"]
    if match["inner"]:
        return True
    return name.endswith(_ENDINGS) or bool(match["module"] and name[0].isupper() and name != name.upper())


def _remote(message: str) -> Origin | None:
    """The process whose exception Ray forwards."""
    match = _REMOTE.search(message)
    return Origin(pid=int(match["pid"]), host=match["ip"]) if match else None


def _last_of(chain: list[Traceback]) -> Traceback:
    """The last traceback of a chain, with the earlier ones in it, the newest first; each says how
    the next one follows from it.
    """
    if len(chain) == 1 and not chain[0].linked:
        return chain[0]
    links = [after.linked for after in chain[1:]]
    earlier = [replace(one, linked=link) for one, link in zip(chain, links, strict=False)]
    return replace(chain[-1], linked="", earlier=tuple(reversed(earlier)))


def _shown(frame: tuple[str, int, str] | None) -> str:
    return f"{frame[0]}:{frame[1]} in {frame[2]}".removesuffix(" in ") if frame else ""


_BLOCK_LINES = 8
"""Lines of one process in torchrun's table."""
_WORDS = {
    "Segmentation fault": -11,
    "Killed": -9,
    "Aborted": -6,
    "Bus error": -7,
    "Illegal instruction": -4,
    "Floating point exception": -8,
    "Terminated": -15,
    "Out Of Memory": -9,
}


def find_exits(events: Iterable[LogEvent]) -> list[Exit]:
    """All reported exits, in the order of the logs. One exit may be reported twice."""
    exits: list[Exit] = []
    block: dict[str, LogEvent] = {}
    first = False
    for event in events:
        if event.signature == "table_first":
            first, block = True, {}
        elif event.signature == "table_failures":
            first, block = False, {}
        elif event.signature in ("table_time", "table_host", "table_rank"):
            block[event.signature] = event
        elif event.signature == "table_exit":
            exits.append(_table_exits(event, block, first))
            block = {}
        elif event.signature in _READERS:
            exits += _READERS[event.signature](event)
    return exits


def _table_exits(event: LogEvent, block: dict[str, LogEvent], first: bool) -> Exit:  # noqa: FBT001
    near = {name: one for name, one in block.items() if 0 <= event.line - one.line <= _BLOCK_LINES}
    rank, host, time = near.get("table_rank"), near.get("table_host"), near.get("table_time")
    return Exit(
        event=event,
        code=event.number("code") or 0,
        rank=rank.number("rank") if rank else None,
        local_rank=rank.number("local_rank") if rank else None,
        host=host.fields.get("host") if host else None,
        pid=event.number("pid"),
        first=first,
        time=time.time if time else None,
    )


def _line_exits(event: LogEvent) -> list[Exit]:
    return [
        Exit(
            event,
            event.number("code") or 0,
            local_rank=event.number("local_rank"),
            pid=event.number("pid"),
            host=event.who.host,
            time=event.time,
        )
    ]


def _srun_exits(event: LogEvent) -> list[Exit]:
    how = event.fields.get("how", "")
    code = event.number("code")
    code = (
        next((number for words, number in _WORDS.items() if words in how), 1)
        if code is None
        else _of_shell(code)
    )
    ranks = _numbers(event.fields.get("rank", ""))
    return [Exit(event, code, rank=rank, host=event.fields.get("host"), time=event.time) for rank in ranks]


def _rank_exits(event: LogEvent) -> list[Exit]:
    code = event.number("code") or 0
    code = -code if event.fields.get("how") == "signal" else _of_shell(code)
    return [
        Exit(
            event,
            code,
            rank=event.number("rank"),
            pid=event.number("pid"),
            host=event.who.host,
            time=event.time,
        )
    ]


def _mpirun_exits(event: LogEvent) -> list[Exit]:
    return [
        Exit(
            event,
            -(event.number("signal") or 0),
            rank=event.number("rank"),
            pid=event.number("pid"),
            host=event.fields.get("host"),
        )
    ]


def _spawned_exits(event: LogEvent) -> list[Exit]:
    name = event.fields.get("signal")
    if name:
        number = getattr(signal, name, None)
        code = -int(number) if number else 1
    else:
        code = event.number("code") or 1
    return [Exit(event, code, local_rank=event.number("local_rank"), first=True)]


def _container_exits(event: LogEvent) -> list[Exit]:
    """Exit codes that shells, containers and make give to a process that a signal ended: 128 plus
    the signal's number.
    """
    code = event.number("code") or event.number("make") or 0
    return [Exit(event, 128 - code, host=event.fields.get("host") or event.who.host, time=event.time)]


def _deepspeed_exits(event: LogEvent) -> list[Exit]:
    return [
        Exit(event, event.number("code") or 0, time=event.time)
    ]  # whose it is, the line does not know: it names the last local rank


def _of_shell(code: int) -> int:
    """Minus the signal if a shell's code contains one: 128 plus its number. 255 is the code of
    programs that exit with -1.
    """
    return 128 - code if 128 < code <= 128 + signal.NSIG else code


def _numbers(text: str) -> list[int]:
    """`1,3-5` as numbers, of limited count, since the text is not trusted."""
    numbers: list[int] = []
    for part in re.findall(r"\d{1,6}(?:-\d{1,6})?", text):
        low, _, high = part.partition("-")
        numbers += range(int(low), min(int(high or low), int(low) + 4096) + 1)
    return numbers[:4096]


_READERS = {
    "exit_line": _line_exits,
    "srun_exit": _srun_exits,
    "mpirun_exit": _mpirun_exits,
    "rank_exit": _rank_exits,
    "spmd_error": _spawned_exits,
    "died_with": _spawned_exits,
    "deepspeed_return": _deepspeed_exits,
    "container_exit": _container_exits,
}
