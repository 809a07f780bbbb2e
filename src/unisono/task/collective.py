"""One small collective with the real back-end, before the ranks load anything: whether the nodes' processes can work together.

Told to the front: `store` (port) from rank 0, then `phase` messages: `collective.store` once torch is loaded. Every rank
then reads one line from stdin, `{"store": [host, port]}`, from which its deadline counts: so all are started at once.
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

from unisono.events import Reporter
from unisono.gloo import let_gloo_finish
from unisono.text import one_line

_LARGE_BYTES = 4 << 20
_ROUNDS = 3
_GRACE_S = 3.0
_POLL_S = 0.02


@dataclass(frozen=True)
class _Request:
    """The request, read."""

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
    def read(cls, request: dict[str, Any]) -> "_Request":
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
    """Gives `ok`, `text` (what was found, one line), `seconds`, `missing` (ranks that never came), `bytes_per_second`, `small_s`.

    `small_s` is of a sum of one number, once connections are made; null: it never came to that.

    A failure is no crash: `ok` is false, and `text` says what torch said. What hangs past the deadline says so and ends itself:
    gloo, for one, waits on for ever in init_process_group if a peer dies while they connect (torch 2.13), whatever its time-out.

    Args:
        request: `rank`, `world_size`; `backend` (gloo, nccl); `device_index` (of the visible accelerators, or null);
            `store_host` (rank 0: where the store listens); `deadline_s` (from the line on stdin); `names` (of the ranks,
            for `text`); `rounds` of the large sum; `large_bytes`
            in it; `store_ports` to be tried before one that the system chooses.
        report: told the phases, and by rank 0 the store's port.
    """
    asked = _Request.read(request)
    found: dict[str, Any] = {"ok": False, "missing": [], "bytes_per_second": None, "small_s": None}
    began = time.monotonic()
    try:
        listening = _listen(asked, report)
        report.phase("collective.store", "waits to be told where the store is")
        host, port = _read_store()
        began = time.monotonic()
        limit = began + asked.deadline_s
        with _given_up(asked, report, found):
            found |= _try(asked, report, _store(host, port, listening, limit), limit, found)
    except (RuntimeError, OSError, EOFError) as error:  # torch.distributed's own are RuntimeErrors
        found["text"] = f"{asked.backend}: {one_line(str(error), limit=400) or type(error).__name__}"
    seconds = time.monotonic() - began
    _end_after(_GRACE_S)  # also if torch hangs while it is taken down
    if found["ok"]:  # what failed is left to the end of the process: taking it down could wait for its peers
        let_gloo_finish(_GRACE_S / 2)
        dist.destroy_process_group()
    return {**found, "seconds": seconds}


@contextlib.contextmanager
def _given_up(asked: _Request, report: Reporter, found: dict[str, Any]) -> Iterator[None]:
    """Reports a failure in this process's name, and ends it, if what is done inside takes longer than the deadline."""

    def give_up() -> None:
        text = f"{asked.backend}: nothing came of it within {asked.deadline_s:g} s, and torch's own time-out did not end it"
        report.send("result", **{**found, "ok": False, "text": text, "seconds": asked.deadline_s})
        os._exit(0)

    timer = threading.Timer(asked.deadline_s + _GRACE_S / 2, give_up)
    timer.daemon = True
    timer.start()
    _end_after(asked.deadline_s + _GRACE_S)  # for what holds the interpreter, and that thread with it
    try:
        yield
    finally:
        timer.cancel()


def _end_after(seconds: float) -> None:
    """Ends this process then, with all stacks on stderr, whatever it hangs in; a later call takes the place of this one."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def _listen(asked: _Request, report: Reporter) -> socket.socket | None:
    """Rank 0 binds the store's port itself: one that was found free and is bound later may be taken by then."""
    if asked.rank != 0:
        return None
    listening = _bound(asked.store_host, [*asked.store_ports, 0])
    report.send("store", port=listening.getsockname()[1])
    return listening


def _bound(host: str, ports: list[int]) -> socket.socket:
    """Listens on the first port that is free. The last is 0: what the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports[:-1]:
        with contextlib.suppress(OSError):  # somebody has it
            return socket.create_server((host, port), family=family)
    return socket.create_server((host, ports[-1]), family=family)


def _store(host: str, port: int, listening: socket.socket | None, limit: float) -> "dist.TCPStore":
    if listening is None:  # refused is said at once; torch would try until twice its time-out
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
    asked: _Request, report: Reporter, store: "dist.TCPStore", limit: float, found: dict[str, Any]
) -> dict[str, Any]:
    missing = _roll_call(store, asked, limit)
    if missing:
        who = ", ".join(asked.names[rank] for rank in missing)
        return {
            "text": f"{who} did not come to the store at {store.host}:{store.port} within {asked.deadline_s:g} s",
            "missing": missing,
        }
    report.phase("collective.group", f"makes a {asked.backend} group of {asked.world_size}")
    on_gpu = asked.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(asked.device)
    dist.init_process_group(
        asked.backend,
        store=store,
        rank=asked.rank,
        world_size=asked.world_size,
        timeout=_left(limit),
        device_id=asked.device if on_gpu else None,
    )
    report.phase("collective.sum", "adds numbers over all ranks")
    return _small(asked, limit, found) or _large(asked, limit)


def _read_store() -> tuple[str, int]:
    """The line from the front. The end of stdin means that the front is gone.

    Raises:
        EOFError: then.
    """
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the front is gone")
    host, port = json.loads(line)["store"]
    return str(host), int(port)


def _roll_call(store: "dist.TCPStore", asked: _Request, limit: float) -> list[int]:
    """Says that this rank is here and waits for the others; gives those that did not come.

    The group's own set-up would say `wait timeout`, and not for whom.
    """
    store.set(f"here/{asked.rank}", b"1")
    missing = list(range(asked.world_size))
    while missing and time.monotonic() < limit:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing:
            time.sleep(_POLL_S)
    if asked.rank == 0:
        _wait_until_all_know(store, asked, missing)
    else:
        store.set(f"knows/{asked.rank}", b"1")
    return missing


def _wait_until_all_know(store: "dist.TCPStore", asked: _Request, missing: list[int]) -> None:
    """Rank 0 holds the store: if it left first, the others could not ask it who is missing."""
    waiting = [rank for rank in range(1, asked.world_size) if rank not in missing]
    limit = time.monotonic() + _GRACE_S / 2
    while waiting and time.monotonic() < limit:
        waiting = [rank for rank in waiting if not store.check([f"knows/{rank}"])]
        time.sleep(_POLL_S if waiting else 0)


def _small(asked: _Request, limit: float, found: dict[str, Any]) -> dict[str, Any]:
    """Adds the numbers of all ranks, which must give W(W-1)/2; what is wrong, or nothing. All ranks take part."""
    total = torch.tensor([float(asked.rank)], device=asked.device)
    _all_reduce(total.clone(), limit)  # makes the connections
    began = time.monotonic()
    _all_reduce(total, limit)
    value = total.item()
    found["small_s"] = time.monotonic() - began
    wanted = asked.world_size * (asked.world_size - 1) / 2
    if value != wanted:
        return {"text": f"the sum over all ranks is {value:g} and must be {wanted:g}"}
    return {}


def _large(asked: _Request, limit: float) -> dict[str, Any]:
    """Adds a large tensor, and measures that. All ranks take part."""
    large = torch.ones(asked.large_bytes // 4, device=asked.device)
    _all_reduce(large, limit)  # connections and kernels for this size are made when it first comes
    bool((large == asked.world_size).all())
    began = time.monotonic()
    for _ in range(asked.rounds):
        large.fill_(1.0)
        _all_reduce(large, limit)
    same = bool((large == asked.world_size).all())  # waits for the device, too
    seconds = max(time.monotonic() - began, 1e-9)
    size = f"{asked.large_bytes >> 20} MiB"
    if not same:
        return {"text": f"a sum of {size} over all ranks came back wrong"}
    speed = asked.rounds * asked.large_bytes / seconds
    text = f"{asked.backend}: {asked.world_size} ranks add {size} at {speed / 1e6:,.0f} MB/s"
    return {"ok": True, "text": text, "bytes_per_second": speed}


def _all_reduce(tensor: torch.Tensor, limit: float) -> None:
    """Adds over all ranks, which all take part. Its own time-out, since gloo's begins anew with each operation.

    Raises:
        RuntimeError: if it fails, or is not done by then.
    """
    dist.all_reduce(tensor, async_op=True).wait(timeout=_left(limit))


def _left(limit: float) -> timedelta:
    return timedelta(seconds=max(0.5, limit - time.monotonic()))
