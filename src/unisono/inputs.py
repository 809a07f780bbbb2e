"""Checks of files given by the user: whether a path is a readable file, and the encoding of its text.

Text is read as UTF-8 only (a byte order mark is accepted). UTF-16 and regional encodings are detected and rejected with the command that
converts the file: a wrong guess would silently train on wrong characters, and one encoding keeps lines, digests and error positions the
same for every tool that reads the file.
"""

import errno
import re
import shlex
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePath

HEAD_BYTES = 4096
SAMPLE_BYTES = 1 << 20

_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_CONTENTS = (
    (b"\x1f\x8b", "gzip", "gunzip -c {0} > {1}"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc {0} > {1}"),
    (b"BZh", "bzip2", "bunzip2 -c {0} > {1}"),
    (b"\xfd7zXZ\x00", "xz", "xz -dc {0} > {1}"),
    (b"PK\x03\x04", "zip (or Excel)", ""),
    (b"PAR1", "Parquet", ""),
    (b"ARROW1", "Arrow", ""),
    (b"%PDF", "PDF", ""),
    (b"SQLite format 3", "SQLite", ""),
    (b"\x89HDF", "HDF5", ""),
    (b"\xd0\xcf\x11\xe0", "old Excel or Word", ""),
)
_KINDS = (
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
# The most frequent letters of the languages of each encoding. Wrongly decoded text has few of them.
_FREQUENT = {
    "GB18030": "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过",
    "BIG5": "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過",
    "SHIFT_JIS": "のにはをたがでてとしれさるいもなこらまかうありすっよ、。ーンス",
    "EUC-JP": "のにはをたがでてとしれさるいもなこらまかうありすっよ、。ーンス",
    "EUC-KR": "이다는에을가의고하지를은로한사어기도서리나자시인대",
    "WINDOWS-1251": "оеаинтсрвлкмдпуяызьбгчйхжшюцщэфё",
    "WINDOWS-1252": "éèàùâêîôûçäöüßñáíóúåæø¿¡«»’‘“”–—…€°",
}
_HIGH = re.compile(rb"[\x80-\xff]+")
_LEAST_CHARACTERS = 4
_LEAST_SHARE = {"WINDOWS-1251": 0.95, "WINDOWS-1252": 0.9, "SHIFT_JIS": 0.3, "EUC-JP": 0.3}
_LONG_RUN = 3.0  # adjacent bytes above ASCII: Cyrillic words, not single letters among Latin ones
_SHARE = 0.12  # of Chinese or Korean text: measured 0.2 to 0.4 if right, under 0.03 if wrong


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem with a file as a whole: what, why, and the fix."""

    what: str
    why: str
    fix: str
    is_missing: bool = False
    is_directory: bool = False


def expand(text: str) -> Path:
    """The path given by the user, with `~` expanded if possible."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)  # the file is then reported missing under the given name


def fault_of(path: Path, name: str) -> Fault | None:
    """Why a path cannot be read as a file, checked without opening it, since a pipe without a writer would block.

    Args:
        path: on this machine.
        name: as given by the user.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            why = f"it is a symbolic link to {path.readlink()}, which does not exist"
            return Fault(f"there is no file {name}", why, "fix the link, or pass the file itself")
        why = "relative paths start at the working directory"
        return Fault(f"there is no file {name}", why, "check the path", is_missing=True)
    except (OSError, ValueError) as error:
        return _unseen(name, error)
    if stat.S_ISREG(mode):
        return None
    kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "not a regular file")
    if stat.S_ISDIR(mode):
        return Fault(f"{name} is a directory", "a file is required", "pass a file in it", is_directory=True)
    why = "only regular files can be read, since they are read twice: for the digest and for the content"
    return Fault(f"{name} is {kind}", why, "write its content to a file, and pass that file")


def _unseen(name: str, error: OSError | ValueError) -> Fault:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ELOOP:
        return Fault(f"{name} is a symbolic link loop", "", "pass the file itself")
    detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
    fix = "check the permissions of the directories on its path" if code == errno.EACCES else "check the path"
    return Fault(f"{name} cannot be read", detail, fix)


def foreign_contents(head: bytes, name: str) -> Fault | None:
    """Why a file is not UTF-8 text, if its first bytes show it for certain; None otherwise.

    Args:
        head: up to HEAD_BYTES from its beginning.
        name: as given by the user.
    """
    for magic, kind, command in _CONTENTS:
        if head.startswith(magic):
            suffix = PurePath(name).suffix
            fix = "use the matching suffix" if kind in ("Parquet", "Arrow") else "save its rows as text"
            if command:
                fix = "decompress it: " + command.format(
                    shlex.quote(name), shlex.quote(_beside(name, "unpacked"))
                )
            return Fault(
                f"{name} is not text", f"its first bytes are those of {kind}, not of a {suffix} file", fix
            )
    encoding = encoding_of(head)
    if encoding is not None:
        return Fault(f"{name} is {encoding} text", "text is read as UTF-8 only", conversion(name, encoding))
    nuls = head.count(0)
    if nuls > len(head) // 2:
        why = f"{nuls} of its first {len(head)} bytes are zero"
        return Fault(f"{name} is not text", why, "write the file again: a copy or download may have failed")
    return None


def encoding_of(head: bytes) -> str | None:
    """`UTF-16` or `UTF-32`, by the byte order mark or the positions of zeros in the first bytes; else None."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    whole = head[: len(head) // 4 * 4]
    if len(whole) < 4 or 0 not in whole:
        return None
    zeros = [whole[i::4].count(0) * 4 / len(whole) for i in range(4)]
    # European letters and the syntax of JSON and CSV are below U+0100; a few characters may be above.
    for name, empty in (
        ("UTF-32LE", (1, 2, 3)),
        ("UTF-32BE", (0, 1, 2)),
        ("UTF-16LE", (1, 3)),
        ("UTF-16BE", (0, 2)),
    ):
        others = [zeros[i] for i in range(4) if i not in empty]
        if min(zeros[i] for i in empty) >= 0.1 and max(others) <= 0.02:
            return name
    return None


def guess_encoding(sample: bytes) -> str | None:
    """The likely encoding of text that is not UTF-8; None if uncertain.

    UTF-8 with a few broken bytes counts as uncertain.

    Args:
        sample: some of its bytes, at best whole lines.
    """
    text = sample.decode("utf-8", "surrogateescape")
    broken = sum(1 for c in text if "\udc80" <= c <= "\udcff")
    whole = sum(1 for c in text if c > "\x7f") - broken
    if broken < _LEAST_CHARACTERS or whole > broken:
        return None
    found = [name for name, letters in _FREQUENT.items() if _fits(sample, name, letters)]
    return found[0] if len(found) == 1 else None


def _fits(sample: bytes, encoding: str, letters: str) -> bool:
    text = sample[:SAMPLE_BYTES].decode(encoding, "replace").lower()
    beyond = Counter(c for c in text if c > "\x7f")
    total, wrong = beyond.total(), beyond.get("\ufffd", 0)
    if total < _LEAST_CHARACTERS or wrong > 1:  # one may be cut at the end of the sample
        return False
    runs = [len(run) for run in _HIGH.findall(sample[:SAMPLE_BYTES])]
    if encoding.startswith("WINDOWS") and (sum(runs) / len(runs) >= _LONG_RUN) != (
        encoding == "WINDOWS-1251"
    ):
        return False
    return sum(beyond[c] for c in letters) >= _LEAST_SHARE.get(encoding, _SHARE) * total


def conversion(name: str, encoding: str) -> str:
    """The command that converts a file to UTF-8, and how to use the copy."""
    if "://" in name:
        return f"convert it from {encoding} to UTF-8 where it is stored"
    copy = _beside(name, "utf8")
    return (
        f"convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(name)} > {shlex.quote(copy)}, and name {copy}"
    )


def _beside(name: str, word: str) -> str:
    path = PurePath(name)
    stem = path.name.removesuffix(path.suffix)
    return str(path.with_name(f"{stem}.{word}{path.suffix}"))


def place_of(data: bytes, position: int) -> tuple[int, int]:
    """The line, and the byte within it, both from 1, of a position in a file."""
    return data.count(b"\n", 0, position) + 1, position - data.rfind(b"\n", 0, position)


def decode_text(data: bytes, name: str) -> str | tuple[Fault, str]:
    """The text of a UTF-8 file; or the fault and its place: `FILE` or `FILE:LINE:BYTE`."""
    fault = foreign_contents(data[:HEAD_BYTES], name)
    if fault is not None:
        return fault, name
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The error's position does not count the mark.
        shift = 3 if data.startswith(b"\xef\xbb\xbf") else 0
        line, byte = place_of(data, error.start + shift)
        where = f"{name}:{line}:{byte}"
        return not_utf8(name, data[error.start + shift], data[:SAMPLE_BYTES]), where


def not_utf8(name: str, byte: int, sample: bytes) -> Fault:
    """The fault of text with an invalid UTF-8 byte, with its likely encoding."""
    guess = guess_encoding(sample)
    fix = "save the file as UTF-8" if guess is None else conversion(name, guess)
    likely = f"; the text looks like {guess}" if guess else ""
    return Fault(f"{name} is not UTF-8", f"byte {byte:#04x} is not valid there{likely}", fix)
