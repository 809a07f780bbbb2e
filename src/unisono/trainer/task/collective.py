"""The task `collective`: a small collective with the real backend, to test that processes on all
nodes can communicate.

Messages to the front: `store` (port) from rank 0, then `phase`: `collective.store` once torch is
loaded. Every rank then reads one line from stdin, `{"store": [host, port]}`, from which its
deadline counts, so all start at the same time.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.base.events import Reporter
from unisono.base.messages import ResultMessage, message_of
from unisono.base.text import one_line
from unisono.base.torch_internals import let_gloo_finish
from unisono.guard.supervise.task_requests import CollectiveRequest, CollectiveResult

_GRACE_S = 3.0
_POLL_S = 0.02


def run(request: CollectiveRequest, report: Reporter) -> CollectiveResult:
    """Sums over all ranks.

    A process that hangs past the deadline reports it and exits: e.g. gloo (torch 2.13) waits
    forever in init_process_group, whatever the timeout, if a peer dies while they connect.
    """
    result: CollectiveResult = {
        "ok": False,
        "text": "",
        "missing": [],
        "bytes_per_second": None,
        "small_s": None,
        "seconds": 0.0,
    }
    began = time.monotonic()
    try:
        listening = _listen(request, report)
        report.phase("collective.store", "waiting for the store's address")
        host, port = _read_store()
        began = time.monotonic()
        limit = began + request.deadline_s
        with _given_up(request, report, result):
            _try(request, report, _store(host, port, listening, limit), limit, result)
    except (RuntimeError, OSError, EOFError) as error:  # torch.distributed raises RuntimeErrors
        result["text"] = f"{request.backend}: {one_line(str(error), limit=400) or type(error).__name__}"
    result["seconds"] = time.monotonic() - began
    _end_after(_GRACE_S)  # also if torch hangs while it closes the group
    if result["ok"]:  # after a failure the group is not closed: that could wait for its peers
        let_gloo_finish(_GRACE_S / 2)
        dist.destroy_process_group()
    return result


@contextlib.contextmanager
def _given_up(request: CollectiveRequest, report: Reporter, result: CollectiveResult) -> Iterator[None]:
    """A context that reports a failure and exits the process if it takes longer than the
    deadline.
    """

    def give_up() -> None:
        text = f"{request.backend}: no result within {request.deadline_s:g} s, and torch's own timeout did not end it"
        report.send(
            message_of(ResultMessage, {**result, "ok": False, "text": text, "seconds": request.deadline_s})
        )
        os._exit(0)

    timer = threading.Timer(request.deadline_s + _GRACE_S / 2, give_up)
    timer.daemon = True
    timer.start()
    _end_after(request.deadline_s + _GRACE_S)  # for code that holds the GIL, which blocks that thread, too
    try:
        yield
    finally:
        timer.cancel()


def _end_after(seconds: float) -> None:
    """Exits this process after that time, with all stacks on stderr, even if it hangs; a later call
    replaces this one.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def _listen(request: CollectiveRequest, report: Reporter) -> socket.socket | None:
    """Binds the store's port on rank 0: a port that is only found free may be taken before it is
    bound.
    """
    if request.rank != 0:
        return None
    listening = _bound(request.store_host, [*request.store_ports, 0])
    report.send({"kind": "store", "port": listening.getsockname()[1]})
    return listening


def _bound(host: str, ports: list[int]) -> socket.socket:
    """Listens on the first free port. The last one is 0: the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports[:-1]:
        with contextlib.suppress(OSError):  # in use
            return socket.create_server((host, port), family=family)
    return socket.create_server((host, ports[-1]), family=family)


def _store(host: str, port: int, listening: socket.socket | None, limit: float) -> "dist.TCPStore":
    if listening is None:  # a refused connection fails at once; torch would retry for twice its timeout
        socket.create_connection((host, port), timeout=_left(limit).total_seconds()).close()
    return dist.TCPStore(
        host,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=_left(limit),
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _try(
    request: CollectiveRequest,
    report: Reporter,
    store: "dist.TCPStore",
    limit: float,
    result: CollectiveResult,
) -> None:
    """Fills in the result."""
    missing = _roll_call(store, request, limit)
    if missing:
        who = ", ".join(request.names[rank] if request.names else f"rank {rank}" for rank in missing)
        result["text"] = (
            f"{who} did not connect to the store at {store.host}:{store.port} within {request.deadline_s:g} s"
        )
        result["missing"] = missing
        return
    report.phase("collective.group", f"creating a {request.backend} group of {request.world_size}")
    device = _device(request)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        request.backend,
        store=store,
        rank=request.rank,
        world_size=request.world_size,
        timeout=_left(limit),
        device_id=device if on_gpu else None,
    )
    report.phase("collective.sum", "summing over all ranks")
    if _small(request, limit, result):
        _large(request, limit, result)


def _device(request: CollectiveRequest) -> torch.device:
    index = request.device_index
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _read_store() -> tuple[str, int]:
    """The store's address, from the front.

    Raises:
        EOFError: if stdin ends: the front is gone.
    """
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the front is gone")
    host, port = json.loads(line)["store"]
    return str(host), int(port)


def _roll_call(store: "dist.TCPStore", request: CollectiveRequest, limit: float) -> list[int]:
    """Announces this rank and waits for the others; gives those that did not join.

    torch's own setup of the group would report `wait timeout` without the missing ranks.
    """
    store.set(f"here/{request.rank}", b"1")
    missing = list(range(request.world_size))
    while missing and time.monotonic() < limit:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing:
            time.sleep(_POLL_S)
    if request.rank == 0:
        _wait_until_all_know(store, request, missing)
    else:
        store.set(f"knows/{request.rank}", b"1")
    return missing


def _wait_until_all_know(store: "dist.TCPStore", request: CollectiveRequest, missing: list[int]) -> None:
    """Keeps rank 0, which has the store, until the other ranks know who is missing."""
    waiting = [rank for rank in range(1, request.world_size) if rank not in missing]
    limit = time.monotonic() + _GRACE_S / 2
    while waiting and time.monotonic() < limit:
        waiting = [rank for rank in waiting if not store.check([f"knows/{rank}"])]
        time.sleep(_POLL_S if waiting else 0)


def _small(request: CollectiveRequest, limit: float, result: CollectiveResult) -> bool:
    """Sums the ranks' numbers; whether that gives W(W-1)/2.

    All ranks must call it.
    """
    total = torch.tensor([float(request.rank)], device=_device(request))
    _all_reduce(total.clone(), limit)  # opens the connections
    began = time.monotonic()
    _all_reduce(total, limit)
    value = total.item()
    result["small_s"] = time.monotonic() - began
    wanted = request.world_size * (request.world_size - 1) / 2
    if value != wanted:
        result["text"] = f"the sum over all ranks is {value:g} and must be {wanted:g}"
    return value == wanted


def _large(request: CollectiveRequest, limit: float, result: CollectiveResult) -> None:
    """Sums a large tensor, and measures the time. All ranks must call it."""
    large = torch.ones(request.large_bytes // 4, device=_device(request))
    _all_reduce(large, limit)  # the first sum of this size sets up connections and kernels
    bool((large == request.world_size).all())
    began = time.monotonic()
    for _ in range(request.rounds):
        large.fill_(1.0)
        _all_reduce(large, limit)
    same = bool((large == request.world_size).all())  # waits for the device, too
    seconds = max(time.monotonic() - began, 1e-9)
    size = f"{request.large_bytes >> 20} MiB"
    if not same:
        result["text"] = f"a sum of {size} over all ranks gave a wrong result"
        return
    speed = request.rounds * request.large_bytes / seconds
    result["text"] = f"{request.backend}: {request.world_size} ranks sum {size} at {speed / 1e6:,.0f} MB/s"
    result["ok"], result["bytes_per_second"] = True, speed


def _all_reduce(tensor: torch.Tensor, limit: float) -> None:
    """Sums over all ranks; all must call it.

    It has its own timeout, because gloo's restarts with each operation.

    Raises:
        RuntimeError: if it fails, or does not finish in time.
    """
    dist.all_reduce(tensor, async_op=True).wait(timeout=_left(limit))


def _left(limit: float) -> timedelta:
    return timedelta(seconds=max(0.5, limit - time.monotonic()))
