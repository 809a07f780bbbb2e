"""What the fronts of a job say, read from the file into which srun writes it: JSON lines of node 0, other lines of all."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.events import Message
from unisono.files import parse_json
from unisono.text import one_line

_LABEL = re.compile(rb"^ *(\d{1,9}): ")
_MOST_BYTES = 8_000_000
"""At once; a line that is longer is no message of ours."""
_PIECE_BYTES = 1_024
"""With --label srun breaks longer lines into pieces of this size, each with a label and an end of its own (Slurm 22.05 to 24.05)."""


@dataclass(frozen=True)
class Spoken:
    """One line.

    Attributes:
        node: of which node; None: of srun itself.
        message: the message that it is; None: it is text.
        text: the line, safe to show.
    """

    node: int | None
    message: Message | None
    text: str


@dataclass
class Lines:
    """A file that grows.

    Attributes:
        path: of it; it need not be there yet.
    """

    path: Path
    _at: int = 0
    _rest: bytes = field(default=b"", repr=False)
    _pieces: dict[int, bytes] = field(default_factory=dict, repr=False)
    """What has come of a message that is longer than a piece, by node."""

    def news(self) -> list[Spoken]:
        """The whole lines that have come since the last call; none where the file cannot be read now."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                read = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._at += len(read)
        *whole, rest = (self._rest + read).split(b"\n")
        self._rest = rest if len(rest) < _MOST_BYTES else b""
        return [spoken for line in whole if (spoken := self._spoken(line)) is not None]

    def _spoken(self, line: bytes) -> Spoken | None:
        """What a line says; None for a piece of a message that goes on."""
        label = _LABEL.match(line)
        if label is None:
            return Spoken(None, None, _shown(line))
        node, piece = int(label[1]), line[label.end() :]
        said = self._pieces.pop(node, b"") + piece
        if not said.startswith(b"{"):
            return Spoken(node, None, _shown(said))
        try:
            value: Any = parse_json(said)
        except ValueError:
            if len(piece) == _PIECE_BYTES and len(said) < _MOST_BYTES:
                self._pieces[node] = said
                return None
            return Spoken(node, None, _shown(said))
        is_message = isinstance(value, dict) and isinstance(value.get("kind"), str)
        return Spoken(node, value if is_message else None, _shown(said))


def _shown(text: bytes) -> str:
    return one_line(text[:4_000].decode("utf-8", "replace"), limit=1_000)
