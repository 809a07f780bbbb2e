"""`python -m unisono.cluster.ray_process_guard FOLDER`: runs a node's front, and removes everything it leaves.

Ray kills an actor at once, together with its child processes. So this process detaches from the actor, and runs as long as the
actor holds the other end of its stdin, whose lines are: the job's token; then `signal NAME`, or `end`. When stdin closes, the job
is over or the actor is dead: a front that still runs is killed with its ranks, and the job's folder is removed.
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
"""For the front to exit on request: a checkpoint in progress is finished."""


def main(folder: Path) -> int:
    """The front's exit code, after its end and that of the actor."""
    token = sys.stdin.buffer.readline()
    front = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "unisono.cluster.ray_node_main",
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
    commands = threading.Thread(target=_follow_commands, args=(front, folder), daemon=True)
    commands.start()
    code = front.wait()
    with contextlib.suppress(OSError):  # the actor is dead, but the folder still has to be removed
        print(json.dumps({"kind": "front_ended", "code": code}), flush=True)  # noqa: T201 - the protocol of this process
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, sys.stdout.fileno())  # the actor has read everything
    os.dup2(devnull, sys.stderr.fileno())
    commands.join()  # the driver fetches the front's files in the meantime
    return code


def _follow_commands(front: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Executes the commands on stdin until it closes; then removes everything."""
    for line in sys.stdin.buffer:
        word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
        if word == "signal" and front.poll() is None:
            front.send_signal(signal.Signals.__members__.get(rest, signal.SIGTERM))
        elif word == "end":
            _end(front)
    front.kill()  # the kernel ends its ranks and tasks with it
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
    """Continues as a detached process, with signals unblocked: Ray's workers and their children block SIGINT."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    _detach()
    sys.exit(main(Path(sys.argv[1])))
