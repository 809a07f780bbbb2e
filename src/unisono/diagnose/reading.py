"""From paths to a diagnosis: the whole way, one log after the other."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.diagnose.flight import judge_recordings, with_recordings
from unisono.diagnose.gather import gather
from unisono.diagnose.judge import judge
from unisono.diagnose.recording import MOST_BYTES, NotARecordingError, Recording, is_recording, read_recording
from unisono.diagnose.scan import Scanned, scan
from unisono.diagnose.sources import Source
from unisono.diagnose.stream import Watched
from unisono.diagnose.tell import Diagnosis, tell
from unisono.diagnose.whom import with_host

_HEAD_BYTES = 4096


@dataclass(slots=True)
class Read:
    """What some logs hold.

    Attributes:
        scanned: the logs.
        recordings: those of flight recorders among them.
        refused: a line for each that cannot be read, or not to its end.
        bytes: how much was read.
    """

    scanned: list[Scanned] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    bytes: int = 0


def read_all(sources: Sequence[Source], *, on_read: Callable[[int], None] = lambda _: None) -> Read:
    """What each log holds.

    Args:
        sources: the logs.
        on_read: called now and then with the number of bytes that were read from the disk so far, of all logs.
    """
    read, before = Read(), 0
    for source in sources:
        size = source.size
        watched = None
        try:
            with source.open() as stream:
                watched = Watched(stream, size, lambda packed, _, before=before: on_read(before + packed))  # type: ignore[misc]
                watched.is_pipe = source.is_pipe
                _take(source, stream, watched, read)
        except (OSError, EOFError, zlib.error, NotARecordingError) as error:
            read.refused.append(f"{source.name}: {getattr(error, 'strerror', None) or error}")
        if watched:
            read.bytes += watched.given_bytes
            if watched.damage:
                read.refused.append(
                    f"{source.name}: damaged after {watched.given_bytes} bytes: {watched.damage}"
                )
            if watched.cut:
                of = "a pipe" if source.is_pipe else f"a compressed file of {size / 1e6:.1f} MB"
                read.refused.append(
                    f"{source.name}: after {watched.given_bytes / 1e9:.1f} GB, of {of}, the rest was left"
                )
        before += size
    return read


def diagnose_logs(scanned: Sequence[Scanned], recordings: Sequence[Recording] = ()) -> Diagnosis:
    """The verdict on logs, and on flight recordings, that were read."""
    facts = gather(scanned)
    findings = with_recordings(judge(facts), judge_recordings(recordings))
    return tell([with_host(finding, facts) for finding in findings], facts)


def _take(source: Source, stream: Any, watched: Watched, read: Read) -> None:
    if is_recording(stream.peek(_HEAD_BYTES)):
        read.recordings.append(read_recording(source.name, watched.read(MOST_BYTES + 1)))
    else:
        read.scanned.append(scan(source.name, watched))  # type: ignore[arg-type]  # read(n) is all that is asked of it
