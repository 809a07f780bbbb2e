"""Decodes pictures in processes of their own, each within a limit of CPU time and memory: a decoder
is C code, which nothing in Python can interrupt.

Run as a module, it is such a process. It reads requests from stdin (`f` and a path, `d` and bytes,
or `v` and a request for frames as JSON, after their length) and writes a line of JSON for each to
stdout.
"""

import contextlib
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import xxhash

from unisono.base.text import one_line
from unisono.guard.facts.limits import limit_memory
from unisono.trainer.data import PictureSource
from unisono.trainer.data.pictures.decoding import BadPictureError, read_picture_file, upright_size
from unisono.trainer.data.pictures.film import FrameRequest, KeptFrames, keep_frames

CPU_S = 20.0
"""CPU seconds for one picture; one of MOST_PIXELS takes two or three."""
_MEMORY_BYTES = 2 << 30
_LENGTH = struct.Struct("<cQ")
_FEW = 64  # pictures for which one process is enough
_SHOWN = 200
_TRIES = 2  # processes for a picture, if the first one is killed


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture that can be decoded.

    Attributes:
        width: pixels, upright.
        height: likewise.
        digest: the xxh3-128 of its bytes.
        bytes: their number.
        changed_ns: when its file was changed last; 0 without a file.
    """

    width: int
    height: int
    digest: str
    bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A picture that cannot be used, and why.

    Attributes:
        why: one line.
        missing: whether there is no such file.
    """

    why: str
    missing: bool = False


def decode_all(sources: Sequence[PictureSource], *, processes: int) -> list[Decoded | Broken]:
    """Size and digest of each picture, decoded completely; or why it cannot be used."""
    count = min(processes, 1 + len(sources) // _FEW)
    decoders: SimpleQueue[DecoderProcess] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            decoders.put(stack.enter_context(contextlib.closing(DecoderProcess())))

        def decode(source: PictureSource) -> Decoded | Broken:
            decoder = decoders.get()
            try:
                return decoder.decode(source)
            finally:
                decoders.put(decoder)

        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(decode, sources))


class DecoderProcess:
    """A process that decodes, started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, source: PictureSource) -> Decoded | Broken:
        """Size and digest, or why there are none; a process that ends takes no other picture with
        it.
        """
        if source.file is not None and not os.path.lexists(source.file):
            return Broken("there is no such file", missing=True)
        kind, body = (b"d", source.data) if source.data is not None else (b"f", os.fsencode(str(source.file)))
        answer = self._ask(kind, body)
        return answer if isinstance(answer, Broken) else Decoded(**answer)

    def frames(self, request: FrameRequest) -> KeptFrames | Broken:
        """Some frames of a video, in order; or why there are none."""
        answer = self._ask(b"v", request.to_json().encode())
        return answer if isinstance(answer, Broken) else KeptFrames(**answer)

    def _ask(self, kind: bytes, body: bytes) -> dict[str, Any] | Broken:
        answer: dict[str, Any] | int = -signal.SIGKILL
        for _ in range(_TRIES):
            if answer == -signal.SIGKILL:  # from outside, e.g. for lack of memory: not by the picture
                answer = self._answer(kind, body)
        if isinstance(answer, int):
            return Broken(_death_words(answer))
        return Broken(answer["why"]) if "why" in answer else answer

    def _answer(self, kind: bytes, body: bytes) -> dict[str, Any] | int:
        """What the process says; its exit code if it ended instead."""
        process = self._process = self._process or self._start()
        stdin, stdout = _pipes(process)
        try:
            stdin.write(_LENGTH.pack(kind, len(body)) + body)
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            return self._ended(process)
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "unisono.trainer.data.pictures.decoder"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._ended(self._process)

    def _ended(self, process: "subprocess.Popen[bytes]") -> int:
        """The exit code of a process, which ends with its input."""
        self._process = None
        stdin, stdout = _pipes(process)
        with contextlib.suppress(OSError):  # it has ended already
            stdin.close()
        stdout.close()
        return process.wait()


def _death_words(code: int) -> str:
    """How a process ended that had to decode a picture, for people."""
    if code == -signal.SIGXCPU:
        return f"decoding it took more than {CPU_S:g} s of CPU time"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
    if code == -signal.SIGKILL:
        return f"the process that decoded it was killed {_TRIES} times ({name}, exit code {code})"
    return f"decoding it ended its process ({name}, exit code {code})"


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import PIL.Image  # before memory is limited

    PIL.Image.init()
    limit_memory(_MEMORY_BYTES)
    out = sys.stdout.buffer
    for kind, body in _requests(sys.stdin.buffer):
        _bound_time()
        try:
            answer = _answer(kind, body)
        except BadPictureError as error:
            answer = {"why": one_line(str(error), limit=_SHOWN)}
        except MemoryError:
            answer = {"why": f"decoding it needs more than {_MEMORY_BYTES >> 30} GiB of memory"}
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _requests(stream: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        kind, length = _LENGTH.unpack(head)
        yield kind, stream.read(length)


def _bound_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + CPU_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer(kind: bytes, body: bytes) -> dict[str, object]:
    if kind == b"v":
        return asdict(keep_frames(FrameRequest(**json.loads(body))))
    changed = 0
    if kind == b"f":
        path = Path(os.fsdecode(body))
        with contextlib.suppress(OSError):  # reading it reports the error
            changed = path.stat().st_mtime_ns
        body = read_picture_file(path)
    width, height = upright_size(body)
    digest = xxhash.xxh3_128(body).hexdigest()
    return {"width": width, "height": height, "digest": digest, "bytes": len(body), "changed_ns": changed}


if __name__ == "__main__":
    _main()
