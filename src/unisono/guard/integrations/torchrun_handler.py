"""The handler: reports what this launcher is about to start to the front, waits for the result of
all nodes, and returns torch's store.
"""

import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from unisono.guard.integrations.border import LAUNCHER, Answer, Guard, Presence, find_guard

if TYPE_CHECKING:
    from torch.distributed import Store


_DEFAULT_PORT = 29577
_WAIT_S = 300.0
_STORE_S = 900.0  # torch's own limit for a store


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """A handler for one torchrun; called by it, below `launch_agent`."""
    return UnisonoRendezvous(
        parameters,
        nproc=launcher_nproc(),
        node_rank=launcher_node_rank(),
        max_restarts=launcher_restarts() or 0,
    )


class UnisonoRendezvous(RendezvousHandler):
    """Agreement through the front of this node; without a front, it starts one."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        *,
        nproc: int | None,
        node_rank: int | None,
        max_restarts: int = 0,
    ) -> None:
        """Stores torchrun's options; nothing is started.

        Args:
            nproc: ranks that it is about to start here; None: unknown.
            node_rank: torchrun's option; `--rdzv-conf rank=R` and the front take precedence.
            max_restarts: number of restarts of its ranks.
        """
        self._parameters = parameters
        self._nodes = int(parameters.max_nodes)
        self._nproc, self._max_restarts = nproc, max_restarts
        # This is a foreign process, which has the border's variable.
        self._guard = find_guard(os.environ)  # noqa: TID251
        configured_rank = parameters.config.get("rank")
        self._node_rank = (
            int(configured_rank)
            if configured_rank is not None
            else node_rank
            if node_rank is not None
            else -1
        )
        if self._guard is not None and self._guard.nodes == self._nodes:
            self._node_rank = self._guard.node_rank
        self._wait_s = float(parameters.config.get("wait", _WAIT_S))
        self._store: Store | None = None
        self._of_ranks: Store | None = None
        self._listening: socket.socket | None = None
        self._answer: Answer | None = None
        self._round = 0

    def get_backend(self) -> str:
        """The backend's name."""
        return "unisono"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the launchers' store: its port is already bound, so no other process can take
        it.
        """
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all nodes agree; restarted ranks get a new store.

        Raises:
            RendezvousTimeoutError: if there is no answer.
            SystemExit: with code 3, if they do not agree.
        """
        if self._store is None:
            self._store = self._alone() if self._nodes == 1 else self._together()
        else:
            self._renew(self._store)
        host, port = self._address
        store = PrefixStore(f"unisono/{self._parameters.run_id}/{self._round}", self._store)
        self._round += 1
        return RendezvousInfo(store, max(self._node_rank, 0), self._nodes, RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        """Never: the number of nodes is fixed."""
        return False

    def set_closed(self) -> None:
        """Does nothing."""

    def num_nodes_waiting(self) -> int:
        """None: nodes cannot join later."""
        return 0

    def get_run_id(self) -> str:
        """torchrun's run id."""
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with the process."""
        return True

    def _alone(self) -> "Store":
        return self._serve("127.0.0.1", self._bind("127.0.0.1"))

    def _together(self) -> "Store":
        if self._node_rank < 0:
            _leave(
                "torchrun --rdzv-backend unisono: the rank of this node is unknown; pass --node-rank R (or"
                " --rdzv-conf rank=R)",
                2,
            )
        guard, guard_process = self._guard, None
        if guard is None:
            guard, guard_process = self._start_guard_process()
        try:
            answer = self._report_facts(guard)
        finally:
            code = _end(guard_process) if guard_process is not None else 0
        if answer is None and code:  # it has reported why
            _leave("", code)
        if answer is None:
            raise RendezvousTimeoutError(
                f"unisono: node {self._node_rank} got no answer from the other nodes; the lines above show"
                " the missing ones"
            )
        if not answer.agreed:
            _leave("", answer.exit_code)
        host, port = parse_rendezvous_endpoint(str(answer.facts["store"]), -1)
        if self._node_rank == 0:
            assert self._listening is not None
            return self._serve(host, self._listening)
        self._address = (host, port)
        return TCPStore(host, port, None, False, timedelta(seconds=_STORE_S))

    def _renew(self, store: "Store") -> None:
        """A new store for restarted ranks: torch adds no prefix, and the old one has addresses of
        ranks that are gone.
        """
        key = f"unisono/{self._parameters.run_id}/{self._round}/ranks"
        if self._node_rank > 0:
            host, port = json.loads(store.get(key))
            self._address = (str(host), int(port))
            return
        host = self._address[0]
        self._of_ranks = self._serve(host, self._bind(host))
        store.set(key, json.dumps(self._address))

    def _report_facts(self, guard: Guard) -> Answer | None:
        details: dict[str, object] = {"max_restarts": self._max_restarts}
        if self._node_rank == 0:
            host = parse_rendezvous_endpoint(guard.store or self._parameters.endpoint, _DEFAULT_PORT)[0]
            self._listening = self._bind(host)
            details["store_port"] = self._listening.getsockname()[1]
        limit_s = (
            float(guard.options.get("join_timeout_s", self._wait_s)) + 60.0
        )  # the front's own timeout comes first
        return Presence(guard).report_facts(
            LAUNCHER,
            {"nproc": self._nproc},
            rank=self._node_rank,
            world_size=self._nodes,
            details=details,
            limit_s=limit_s,
        )

    def _bind(self, host: str) -> socket.socket:
        """A bound port on the address at which the nodes reach node 0."""
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        sock.bind(address)
        sock.listen(4096)
        return sock

    def _serve(self, host: str, sock: socket.socket) -> "Store":
        port = int(sock.getsockname()[1])
        self._address = (host, port)
        return TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=_STORE_S),
            wait_for_workers=False,
            master_listen_fd=sock.detach(),
        )

    def _start_guard_process(self) -> "tuple[Guard, subprocess.Popen[bytes]]":
        """Starts a small front where there is none: it compares the nodes, reports the result, and
        exits.

        The job's token is passed to it and removed from this process, so that ranks never see it.
        """
        host, port = parse_rendezvous_endpoint(self._parameters.endpoint, _DEFAULT_PORT)
        settings = {
            "nodes": self._nodes,
            "node_rank": self._node_rank,
            "host": host,
            "port": port,
            "nproc": self._nproc,
            "wait_s": self._wait_s,
            "uneven": str(self._parameters.config.get("uneven", "0")) in ("1", "true", "True"),
            "words": sys.argv,
            "pid": os.getpid(),
        }
        environment = dict(os.environ)  # noqa: TID251 - as above
        os.environ.pop("UNISONO_TOKEN", None)  # noqa: TID251 - as above
        guard_process = subprocess.Popen(
            [sys.executable, "-m", "unisono.guard.programs.torchrun_front"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert guard_process.stdin is not None
        assert guard_process.stdout is not None
        guard_process.stdin.write(json.dumps(settings).encode() + b"\n")
        guard_process.stdin.flush()
        line = guard_process.stdout.readline().decode().strip()
        guard = find_guard({"UNISONO_GUARD": line})
        if guard is None:  # it has reported why
            _leave("", guard_process.wait(60) or 3)
        return guard, guard_process


def _end(guard_process: "subprocess.Popen[bytes]") -> int:
    """Waits for the front, which exits once it has informed the other nodes; returns its exit
    code.
    """
    assert guard_process.stdin is not None
    with contextlib.suppress(OSError):
        guard_process.stdin.close()
    try:
        return guard_process.wait(15)
    except subprocess.TimeoutExpired:
        guard_process.kill()
        return 0


def _leave(text: str, code: int) -> NoReturn:
    if text:
        sys.stderr.write(f"error: {text}\n")
    sys.exit(code)


_LAUNCHER = "torch.distributed.launcher.api"
_RUN = "torch.distributed.run"


def launcher_nproc() -> int | None:
    """Number of ranks that the launcher is about to start on this node, whose call is on the stack;
    None if unknown.
    """
    return _of_config("nproc_per_node", inspect.currentframe())


def launcher_restarts() -> int | None:
    """Number of restarts of the launcher; None if unknown."""
    return _of_config("max_restarts", inspect.currentframe())


def launcher_node_rank() -> int | None:
    """The node rank from torchrun's `--node-rank` or PET_NODE_RANK; None if torchrun's command was
    not used.
    """
    args = _local_of(inspect.currentframe(), _RUN, "run", "args")
    rank = getattr(args, "node_rank", None)
    return rank if isinstance(rank, int) else None


def _of_config(name: str, frame: FrameType | None) -> int | None:
    value = getattr(_local_of(frame, _LAUNCHER, "launch_agent", "config"), name, None)
    return value if isinstance(value, int) else None


def _local_of(frame: FrameType | None, module: str, function: str, name: str) -> Any:
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
