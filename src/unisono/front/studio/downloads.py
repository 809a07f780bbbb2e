"""A directory as one zip file, made while it is sent."""

import io
import queue
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_WAITING = 4  # chunks that are ready before the client takes them
_PATIENCE_S = 60.0


class _ChunkPipe(io.RawIOBase):
    """Passes on what is written, in chunks; whoever writes waits for the reader."""

    def __init__(self) -> None:
        self.chunks: queue.Queue[bytes] = queue.Queue(_WAITING)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        part = bytes(data)  # type: ignore[call-overload]
        self.chunks.put(part, timeout=_PATIENCE_S)
        return len(part)


def zipped(folder: Path) -> Iterator[bytes]:
    """The files below a directory, without links that lead out of it; not compressed, as weights
    hardly shrink.
    """
    pipe = _ChunkPipe()

    def write() -> None:
        try:
            buffered = io.BufferedWriter(pipe, _CHUNK_BYTES)
            with zipfile.ZipFile(buffered, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                        _add(archive, path, str(Path(folder.name) / path.relative_to(folder)))
            buffered.flush()
        except (OSError, queue.Full, zipfile.LargeZipFile):
            return  # the client sees that the file is not whole
        finally:
            with_end(pipe)

    threading.Thread(target=write, daemon=True).start()
    while chunk := pipe.chunks.get():
        yield chunk


def with_end(pipe: _ChunkPipe) -> None:
    """Marks the end, unless nobody reads."""
    try:
        pipe.chunks.put(b"", timeout=_PATIENCE_S)
    except queue.Full:
        return


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    info = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
    with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
