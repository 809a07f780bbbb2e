"""One end of the control channel in a process of its own, to be killed or stopped by tests.

one_end.py head NODES             listens; says `PORT`, then every event
one_end.py node PORT RANK [HOST]  joins; says `here`, then every event
one_end.py sender PORT RANK MIB    joins, and sends a file of so many MiB that is called `large`
one_end.py nodes PORT FIRST LAST  joins as many nodes; says `here`; acknowledges and ends with the head's last word
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unisono.guard.control.channel_ends import HeadServer, NodeLink
from unisono.guard.control.connection import Left
from unisono.guard.control.file_transfer import Content, FileSender

TOKEN = b"the secret of this job, 32 bytes"


def notify(text: object) -> None:
    print(text, flush=True)


def head(nodes: str) -> None:
    server = HeadServer(host="127.0.0.1", port=0, token=TOKEN, nodes=int(nodes), welcome={}, run_nonce="run1")
    notify(server.address[1])
    while True:
        for event in server.receive(60):
            notify(event)


def join(port: int, rank: int) -> NodeLink:
    return NodeLink.connect(
        host="127.0.0.1", port=port, token=TOKEN, node_rank=rank, node_host=f"host{rank}", timeout_s=30
    )


def node(port: str, rank: str) -> None:
    link = join(int(port), int(rank))
    notify("here")
    while True:
        for event in link.receive(60):
            notify(event)


def sender(port: str, rank: str, mib: str) -> None:
    link = join(int(port), int(rank))
    with FileSender(link) as transfers, tempfile.NamedTemporaryFile() as file:
        file.truncate(int(mib) << 20)
        transfers.send(Path(file.name), {"kind": "test", "name": "large"}, Content(int(mib) << 20, "0" * 32))
        while not transfers.outcomes():
            link.receive(0.1)


def nodes(port: str, first: str, last: str) -> None:
    with ThreadPoolExecutor(16) as pool:
        links = list(pool.map(lambda rank: join(int(port), rank), range(int(first), int(last) + 1)))
    notify("here")
    for link in links:
        link.send({"kind": "report", "report": "x" * 10_000})
    received = 0
    for link in links:
        gone = False
        while not gone:
            events = link.receive(60)
            received += sum(not isinstance(event, Left) for event in events)
            gone = any(isinstance(event, Left) for event in events)
        link.close()
    notify(received)


if __name__ == "__main__":
    ends: dict[str, Callable[..., None]] = {"head": head, "node": node, "sender": sender, "nodes": nodes}
    ends[sys.argv[1]](*sys.argv[2:])
