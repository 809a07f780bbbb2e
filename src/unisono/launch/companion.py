"""Work that goes on in the head's front beside the ranks: uploads, the check of the first checkpoint, re-reading old ones."""

from typing import Protocol

from unisono.causes import Verdict
from unisono.errors import UnisonoError
from unisono.events import Message


class Companion(Protocol):
    """Lives for one start of the ranks. Nothing in it may block: what takes long is done in a thread or a process of its own."""

    def heard(self, rank: int, message: Message) -> None:
        """Is told each message of a rank that the head hears; rank 0 tells of steps and of checkpoints."""

    def look(self) -> UnisonoError | Verdict | None:
        """Called some times a second. An error or a verdict ends the ranks, and is how the run ends."""

    def finish(self) -> None:
        """The ranks have ended, or are about to be ended. Must return in bounded time."""
