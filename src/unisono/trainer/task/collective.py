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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.base.events import Reporter
from unisono.base.text import one_line
from unisono.base.torch_internals import let_gloo_finish

_LARGE_BYTES = 4 << 20
_ROUNDS = 3
_GRACE_S = 3.0
_POLL_S = 0.02


@dataclass(frozen=True)
class _Options:
    """The parsed request."""

    rank: int
    world_size: int
    store_host: str
    backend: str
    device: torch.device
    deadline_s: float
    rounds: int
    large_bytes: int
    store_ports: list[int]
    names: list[str]

    @classmethod
    def read(cls, request: dict[str, Any]) -> "_Options":
        index = request.get("device_index")
        world_size = int(request["world_size"])
        return cls(
            rank=int(request["rank"]),
            world_size=world_size,
            store_host=str(request.get("store_host") or "127.0.0.1"),
            backend=str(request.get("backend", "gloo")),
            device=torch.device("cpu") if index is None else torch.device("cuda", int(index)),
            deadline_s=float(request.get("deadline_s", 15.0)),
            rounds=int(request.get("rounds", _ROUNDS)),
            large_bytes=int(request.get("large_bytes", _LARGE_BYTES)),
            store_ports=[int(port) for port in request.get("store_ports") or []],
            names=[str(name) for name in request.get("names") or [f"rank {r}" for r in range(world_size)]],
        )


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `ok`, `text` (the outcome, one line), `seconds`, `missing` (ranks that did not join),
    `bytes_per_second`, `small_s`.

    `small_s` is the time for a sum of one number over existing connections; null if that was not
    reached.

    After a failure `ok` is false, and `text` has torch's message. A process that hangs past the
    deadline reports it and exits: e.g. gloo (torch 2.13) waits forever in init_process_group,
    whatever the timeout, if a peer dies while they connect.

    Args:
        request: `rank`, `world_size`; `backend` (gloo, nccl); `device_index` (among the visible
            accelerators, or null); `store_host` (rank 0: where the store listens); `deadline_s`
            (from the line on stdin); `names` (of the ranks, for `text`); `rounds` of the large sum;
            `large_bytes` in it; `store_ports` to try before one that the system chooses.
        report: receives the phases, and from rank 0 the store's port.
    """
    options = _Options.read(request)
    result: dict[str, Any] = {"ok": False, "missing": [], "bytes_per_second": None, "small_s": None}
    began = time.monotonic()
    try:
        listening = _listen(options, report)
        report.phase("collective.store", "waiting for the store's address")
        host, port = _read_store()
        began = time.monotonic()
        limit = began + options.deadline_s
        with _given_up(options, report, result):
            result |= _try(options, report, _store(host, port, listening, limit), limit, result)
    except (RuntimeError, OSError, EOFError) as error:  # torch.distributed raises RuntimeErrors
        result["text"] = f"{options.backend}: {one_line(str(error), limit=400) or type(error).__name__}"
    seconds = time.monotonic() - began
    _end_after(_GRACE_S)  # also if torch hangs while it closes the group
    if result["ok"]:  # after a failure the group is not closed: that could wait for its peers
        let_gloo_finish(_GRACE_S / 2)
        dist.destroy_process_group()
    return {**result, "seconds": seconds}


@contextlib.contextmanager
def _given_up(options: _Options, report: Reporter, result: dict[str, Any]) -> Iterator[None]:
    """A context that reports a failure and exits the process if it takes longer than the
    deadline.
    """

    def give_up() -> None:
        text = f"{options.backend}: no result within {options.deadline_s:g} s, and torch's own timeout did not end it"
        report.send("result", **{**result, "ok": False, "text": text, "seconds": options.deadline_s})
        os._exit(0)

    timer = threading.Timer(options.deadline_s + _GRACE_S / 2, give_up)
    timer.daemon = True
    timer.start()
    _end_after(options.deadline_s + _GRACE_S)  # for code that holds the GIL, which blocks that thread, too
    try:
        yield
    finally:
        timer.cancel()


def _end_after(seconds: float) -> None:
    """Exits this process after that time, with all stacks on stderr, even if it hangs; a later call
    replaces this one.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def _listen(options: _Options, report: Reporter) -> socket.socket | None:
    """Binds the store's port on rank 0: a port that is only found free may be taken before it is
    bound.
    """
    if options.rank != 0:
        return None
    listening = _bound(options.store_host, [*options.store_ports, 0])
    report.send("store", port=listening.getsockname()[1])
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
    options: _Options, report: Reporter, store: "dist.TCPStore", limit: float, result: dict[str, Any]
) -> dict[str, Any]:
    missing = _roll_call(store, options, limit)
    if missing:
        who = ", ".join(options.names[rank] for rank in missing)
        return {
            "text": f"{who} did not connect to the store at {store.host}:{store.port} within {options.deadline_s:g} s",
            "missing": missing,
        }
    report.phase("collective.group", f"creating a {options.backend} group of {options.world_size}")
    on_gpu = options.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(options.device)
    dist.init_process_group(
        options.backend,
        store=store,
        rank=options.rank,
        world_size=options.world_size,
        timeout=_left(limit),
        device_id=options.device if on_gpu else None,
    )
    report.phase("collective.sum", "summing over all ranks")
    return _small(options, limit, result) or _large(options, limit)


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


def _roll_call(store: "dist.TCPStore", options: _Options, limit: float) -> list[int]:
    """Announces this rank and waits for the others; gives those that did not join.

    torch's own setup of the group would report `wait timeout` without the missing ranks.
    """
    store.set(f"here/{options.rank}", b"1")
    missing = list(range(options.world_size))
    while missing and time.monotonic() < limit:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing:
            time.sleep(_POLL_S)
    if options.rank == 0:
        _wait_until_all_know(store, options, missing)
    else:
        store.set(f"knows/{options.rank}", b"1")
    return missing


def _wait_until_all_know(store: "dist.TCPStore", options: _Options, missing: list[int]) -> None:
    """Keeps rank 0, which has the store, until the other ranks know who is missing."""
    waiting = [rank for rank in range(1, options.world_size) if rank not in missing]
    limit = time.monotonic() + _GRACE_S / 2
    while waiting and time.monotonic() < limit:
        waiting = [rank for rank in waiting if not store.check([f"knows/{rank}"])]
        time.sleep(_POLL_S if waiting else 0)


def _small(options: _Options, limit: float, result: dict[str, Any]) -> dict[str, Any]:
    """Sums the ranks' numbers, which must give W(W-1)/2; gives the failure, or an empty dict.

    All ranks must call it.
    """
    total = torch.tensor([float(options.rank)], device=options.device)
    _all_reduce(total.clone(), limit)  # opens the connections
    began = time.monotonic()
    _all_reduce(total, limit)
    value = total.item()
    result["small_s"] = time.monotonic() - began
    wanted = options.world_size * (options.world_size - 1) / 2
    if value != wanted:
        return {"text": f"the sum over all ranks is {value:g} and must be {wanted:g}"}
    return {}


def _large(options: _Options, limit: float) -> dict[str, Any]:
    """Sums a large tensor, and measures the time. All ranks must call it."""
    large = torch.ones(options.large_bytes // 4, device=options.device)
    _all_reduce(large, limit)  # the first sum of this size sets up connections and kernels
    bool((large == options.world_size).all())
    began = time.monotonic()
    for _ in range(options.rounds):
        large.fill_(1.0)
        _all_reduce(large, limit)
    same = bool((large == options.world_size).all())  # waits for the device, too
    seconds = max(time.monotonic() - began, 1e-9)
    size = f"{options.large_bytes >> 20} MiB"
    if not same:
        return {"text": f"a sum of {size} over all ranks gave a wrong result"}
    speed = options.rounds * options.large_bytes / seconds
    text = f"{options.backend}: {options.world_size} ranks sum {size} at {speed / 1e6:,.0f} MB/s"
    return {"ok": True, "text": text, "bytes_per_second": speed}


def _all_reduce(tensor: torch.Tensor, limit: float) -> None:
    """Sums over all ranks; all must call it.

    It has its own timeout, because gloo's restarts with each operation.

    Raises:
        RuntimeError: if it fails, or does not finish in time.
    """
    dist.all_reduce(tensor, async_op=True).wait(timeout=_left(limit))


def _left(limit: float) -> timedelta:
    return timedelta(seconds=max(0.5, limit - time.monotonic()))
