"""The processes of an environment, from the rank: the one that loads the class, and one for each
episode.
"""

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any

from unisono.trainer.objectives.rewards.process import ProcessLink, RewardProcess

_FORK_S = 30.0  # in which a process is forked


class EnvironmentProcess(RewardProcess):
    """The process that has loaded the class, from which episodes are forked."""

    module = "unisono.trainer.objectives.environments.episode_child"

    def next_messages(self, wait_s: float) -> list[Any]:
        """See `receive`, which does not wait."""
        readable = select.poll()
        readable.register(self, self.events)
        readable.poll(wait_s * 1000)
        return self.receive()

    def fork(self) -> "EpisodeProcess":
        """A process for an episode.

        Raises:
            EOFError: if this process has ended, or does not fork.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            try:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            except OSError as error:
                raise EOFError from error
            until = time.monotonic() + _FORK_S
            while (left := until - time.monotonic()) > 0:
                for reply in self.next_messages(left):
                    on_failure.pop_all()
                    return EpisodeProcess(ours, reply["pid"])
            raise EOFError

    def reap(self) -> None:
        """Forgets the processes of episodes that have been ended."""
        with contextlib.suppress(OSError):
            self._socket.send(b"r")


class EpisodeProcess(ProcessLink):
    """The process of an episode, which keeps its number until `EnvironmentProcess.reap`."""

    def end(self) -> None:
        """Ends it, and all processes that it has started."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
