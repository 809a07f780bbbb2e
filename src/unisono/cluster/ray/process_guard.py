"""`python -m unisono.cluster.ray.process_guard FOLDER`: runs a node's front, and sees that nothing of it stays.

Ray kills an actor at once, with the processes that it has started itself. So this one leaves the actor's family, and lives for as long as the actor holds the
other end of its stdin, whose lines are: the job's token; then `signal NAME`, or `end`. When that closes, the job is over or the
actor is dead: then a front that still runs is killed, with its ranks, and the job's folder is removed.
Its last line on stdout is {"kind": "front_ended", "code": N}.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

_PATIENCE_S = 60.0
"""For the front's own end, once it was asked for: a checkpoint in flight is finished."""


def main(folder: Path) -> int:
    """Runs the front to its end, and waits for the actor's; gives the front's exit code."""
    token = sys.stdin.buffer.readline()
    front = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "unisono.cluster.ray.node_main",
            str(folder / "request.json"),
            str(os.getpid()),
        ],
        stdin=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    assert front.stdin is not None
    front.stdin.write(token)
    front.stdin.flush()
    obeying = threading.Thread(target=_follow_commands, args=(front, folder), daemon=True)
    obeying.start()
    code = front.wait()
    with contextlib.suppress(OSError):  # the actor is dead: there is still the folder to be removed
        print(json.dumps({"kind": "front_ended", "code": code}), flush=True)  # noqa: T201 - this is how it speaks
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, sys.stdout.fileno())  # the actor has read all
    os.dup2(nowhere, sys.stderr.fileno())
    obeying.join()  # what the front has left is fetched meanwhile
    return code


def _follow_commands(front: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Does what the lines of stdin say, until they end; then nothing is left."""
    for line in sys.stdin.buffer:
        word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
        if word == "signal" and front.poll() is None:
            front.send_signal(signal.Signals.__members__.get(rest, signal.SIGTERM))
        elif word == "end":
            _end(front)
    front.kill()  # its ranks and tasks end with it: the kernel sees to that
    front.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _end(front: "subprocess.Popen[bytes]") -> None:
    assert front.stdin is not None
    front.stdin.close()  # its lifeline
    try:
        front.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        front.kill()


def _detach() -> None:
    """Goes on as nobody's child, and hears signals again: Ray has its workers, and what they start, block SIGINT."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    _detach()
    sys.exit(main(Path(sys.argv[1])))
