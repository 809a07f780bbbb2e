"""Output of the command line: results to stdout, messages to stderr; with `--json` only JSON on
stdout.

Names, logs and answers of others are in what is printed, and control characters in them would
command the terminal. So all that is written loses them, here and in the streams of the program.
Only what `styled` writes keeps its colours and cursor movements: they are our own, and the text
between them has been made plain before. A model's answer is kept, too, where no terminal reads it.
"""

import errno
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

from unisono.base.text import escape_controls, escape_json, plain, wrapped

GLOBAL_FLAGS = {
    "--json": "Write JSON, and nothing else, to stdout.",
    "--quiet": "Show only results, warnings and errors.",
    "--debug": "Show the full traceback of every error.",
    "--version": "Show the version and exit.",
}
"""The flags of every command, with their help; they may stand anywhere on the command line."""
_LANG = "--lang"
GLOBAL_OPTIONS = {
    **GLOBAL_FLAGS,
    f"{_LANG} en|zh": "Language of the terminal; default: UNISONO_LANG, or the locale.",
}
"""All global flags, and the global option that takes a value."""
_READER_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of writing to a closed pipe (`| head`), and to a closed terminal."""


class _OutputStream(io.TextIOWrapper):
    """stdout or stderr of the program, also for libraries.

    A failed write does not raise: no run may fail because of it.

    Attributes:
        lost: the error of a failed write, unless the reader was gone.
    """

    lost: OSError | None = None

    def write(self, text: str) -> int:
        return self.write_styled(plain(text))

    def write_styled(self, text: str) -> int:
        """Writes text with control characters of our own."""
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        silence(self)
        if error.errno not in _READER_CLOSED:
            self.lost = self.lost or error


class _Styled:
    """A stream whose text is written as it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write = stream.write_styled if isinstance(stream, _OutputStream) else stream.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def styled(stream: TextIO) -> TextIO:
    """stdout or stderr for text with our own colours and cursor movements.

    Words of others in it must be `plain`.
    """
    # while a line is redrawn in place, rich has its own stream in place of ours
    return cast("TextIO", _Styled(getattr(stream, "rich_proxied_file", stream)))


def open_streams() -> None:
    """Makes stdin, stdout and stderr of this process usable, however it was started.

    Daemons start programs with closed streams (`>&-`). The next opened files would get their
    numbers: a lock, or the connection to a node, which child processes would then write into.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            devnull = os.open(os.devnull, flags)  # gets the lowest free number, which is this one
            os.set_inheritable(devnull, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - of a number, for the life of the process
    sys.stdout, sys.stderr = _stream(1, sys.stdout, "strict"), _stream(2, sys.stderr, "backslashreplace")


def _stream(fd: int, given: TextIO | None, errors: str) -> _OutputStream:
    """A stream on a file descriptor, with the encoding of Python's own stream."""
    raw = open(fd, "wb", closefd=False)  # noqa: SIM115 - of a number, for the life of the process
    encoding = (given and given.encoding) or "utf-8"
    return _OutputStream(
        raw, encoding, (given and given.errors) or errors, line_buffering=fd == 2 or raw.isatty()
    )


def lost_output() -> OSError | None:
    """The error if results could not be written to stdout; None if they were, or the reader was
    gone.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return sys.stdout.lost if isinstance(sys.stdout, _OutputStream) else None


@dataclass(frozen=True, slots=True)
class Output:
    """The global flags.

    Attributes:
        json: stdout carries JSON only.
        quiet: only results, warnings and errors.
    """

    json: bool = False
    quiet: bool = False
    debug: bool = False

    def notify(self, text: str) -> None:
        """Writes a line to stderr, unless `--quiet`."""
        if not self.quiet:
            _say(sys.stderr, text)

    def warn(self, text: str) -> None:
        """Writes a line to stderr, also with `--quiet`."""
        _say(sys.stderr, text)

    def result(self, text: str) -> None:
        """Writes a line of a result to stdout; with `--json` to stderr, as stdout is for JSON."""
        _say(sys.stderr if self.json else sys.stdout, text)

    def quote(self, text: str) -> None:
        """Like `result`, for the words of others, e.g. a model's answer or a log: they stay in
        their language.
        """
        stream = sys.stderr if self.json else sys.stdout
        _write(stream, wrapped(plain(text), terminal_width(stream)))

    def answer(self, text: str) -> None:
        """Writes a model's words to stdout: as they are, or for a terminal wrapped, with escapes
        for control characters.
        """
        text = wrapped(escape_controls(text), terminal_width(sys.stdout)) if sys.stdout.isatty() else text
        _write(styled(sys.stdout), text)

    def verbatim(self, text: str) -> None:
        """Like `result`, for files and drawings: a terminal gets the same lines as a pipe."""
        _write(sys.stderr if self.json else sys.stdout, text)

    def drawing(self, text: str) -> None:
        """Like `verbatim`, for a line with our own colours, in which the words of others are
        `plain`.
        """
        _write(styled(sys.stderr if self.json else sys.stdout), text)

    def emit(self, value: Any) -> None:
        """Writes a JSON value as a line to stdout.

        NaN and infinities become null, since JSON cannot represent them.
        """
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
        _write(sys.stdout, escape_json(text))


_current = Output()  # set once by main, before the command runs
_translate: Callable[[str], str] | None = None  # likewise; None: English


def output() -> Output:
    """The output of the present command."""
    return _current


def set_output(value: Output) -> None:
    """Sets the output for the rest of this process."""
    global _current
    _current = value


def shown(text: str) -> str:
    """What a person reads: the text in the language of the command."""
    return text if _translate is None else _translate(text)


def set_language(translate: Callable[[str], str] | None) -> None:
    """Sets the language of everything that is printed for a person; None: English."""
    global _translate
    _translate = translate


LANGUAGES = ("en", "zh")


def choose_language(option: str | None, variables: Mapping[str, str]) -> str:
    """The language, from `--lang`, else UNISONO_LANG, else the locale as gettext reads it.

    Raises:
        ValueError: with the given name, if one of the first two is not known. A locale of a
            different language gives English.
    """
    given = variables.get("UNISONO_LANG", "") if option is None else option
    if given or option is not None:
        name = re.split(r"[_.@-]", given.lower())[0]
        if name not in LANGUAGES:
            raise ValueError(given)
        return name
    of_locale = next(filter(None, map(variables.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if re.split(r"[_.@]", of_locale.lower())[0] == "zh" else "en"


def can_show(text: str) -> bool:
    """Whether the encodings of stdout and stderr have these characters."""
    try:
        for stream in (sys.stdout, sys.stderr):
            text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def split_globals(arguments: list[str]) -> tuple[list[str], set[str], str | None]:
    """The arguments without global options, the flags, and the language if it is given.

    `--` ends the search.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags, words, language = set[str](), list[str](), None
    given = iter(arguments[:end])
    for word in given:
        if word in GLOBAL_FLAGS:
            flags.add(word)
        elif word == _LANG:
            language = next(given, "")
        elif word.startswith(f"{_LANG}="):
            language = word.partition("=")[2]
        else:
            words.append(word)
    return words + arguments[end:], flags, language


def _finite(value: Any) -> Any:
    """A JSON value with null in place of nan and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _say(stream: TextIO, text: str) -> None:
    """Writes a line in the language of the command, wrapped at words on a terminal."""
    _write(stream, wrapped(shown(plain(text)), terminal_width(stream)))


def _write(stream: TextIO, text: str) -> None:
    """Writes a line. If the reader is gone (`| head`), further output is discarded."""
    text = text if isinstance(stream, _Styled) else plain(text)
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError as error:
        if error.errno not in _READER_CLOSED:
            raise
        silence(stream)
    except UnicodeEncodeError:  # the terminal's encoding cannot represent it, e.g. with LANG=C
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()


def until_unread(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """`show` for the messages of a run: if they cannot be written, output goes to /dev/null and the
    run continues.
    """

    def shown(message: Any) -> None:
        try:
            show(message)
        except OSError:
            # a closed terminal or a full disk must not stop a run: its directory has everything
            silence(sys.stdout)
            silence(sys.stderr)

    return shown


def silence(stream: TextIO) -> None:
    """Discards further output, so that Python's flush at exit finds no broken pipe either."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def terminal_width(stream: TextIO) -> int:
    """The columns of the terminal that `stream` writes to; 0 without a terminal, or if its size is
    unknown.
    """
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # ValueError: closed
        return 0
