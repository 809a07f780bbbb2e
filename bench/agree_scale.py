"""How long do hundreds of nodes take to agree, from the last one's call to the same words on all of
them?

    python bench/agree_scale.py                      256 and 1,024 nodes; writes bench/results/agree_scale.json
    python bench/agree_scale.py --nodes 64 --out -   one size, printed

Real sockets on loopback, every node authenticated, every report as large as a real one. The head is
this process; the nodes live in two others, and all share this machine's cores. The head takes every
report as the front does, compares all of them, and says its last word, which every node
acknowledges. Cases:

    equal        all but one are here and have reported; then the last one calls. Counted from its call
    differs      the same; one node has another NCCL variable
    at_once      all call in the same moment. Counted from when the head has let the last one in; since_first_call_s is counted from
                 that moment, so it holds all handshakes and most reports as well
    never_comes  one never calls. Counted from the head's decision, 2 s after the last arrival
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.guard.agree.compare import compare_nodes
from unisono.guard.agree.membership import missing_nodes
from unisono.guard.agree.reports import Device, FileDigest, Interface, NodeReport, OutputFacts
from unisono.guard.control.channel_ends import HeadServer, NodeLink
from unisono.guard.control.connection import Joined, NodeMessage
from unisono.guard.facts.limits import SystemLimits

if TYPE_CHECKING:
    from unisono.base.causes import Verdict

TOKEN = b"agree_scale's own token, 32 bytes"
ODD = 7
NAMED_AFTER_S = 2.0
LIMIT_S = 120.0
AIMS = {256: 1.0, 1024: 10.0}
PROCESSES = 2
CASES = ("equal", "differs", "at_once", "never_comes")
WANTED = {"equal": "", "at_once": "", "differs": "env_mismatch", "never_comes": "node_missing"}


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def report(rank: int, nodes: int, *, odd: bool) -> NodeReport:
    """As large as a node with eight devices, 220 packages and a hundred files makes it."""
    devices = [
        Device(index=i, uuid=f"GPU-{digest(rank, i)}", name="NVIDIA H100 80GB HBM3", memory_bytes=85_520_809_984,
               memory_free_bytes=84_520_809_984, bus_id=f"00000000:{i:02X}:00.0", numa_node=i // 4)
        for i in range(8)
    ]  # fmt: skip
    address = f"10.0.{rank // 250}.{rank % 250 + 1}"
    interfaces = [
        Interface(name=name, addresses=[there], mtu=mtu, up=True, loopback=name == "lo")
        for name, there, mtu in (("lo", "127.0.0.1", 65536), ("eth0", address, 9000))
    ]
    variables = {f"NCCL_SETTING_{n}": "1" for n in range(12)} | ({"NCCL_IB_DISABLE": "1"} if odd else {})
    return NodeReport(
        node_rank=rank, host=f"node{rank:04d}", address=address, pid=4000 + rank, nodes=nodes, nproc=8, nproc_declared=True,
        nproc_origin="--nproc", device_kind="cuda", chosen=devices, visible=devices, physical=devices, visible_variable=None,
        variables=variables,
        versions=dict.fromkeys(("python", "torch", "cuda", "nccl", "driver", "transformers", "peft", "unisono"), "1.2.3"),
        environment_digest=digest("packages"), packages={f"package-{n}": f"{n}.{n % 7}.1" for n in range(220)},
        code={f"unisono/room{n % 9}/part{n}.py": digest("code", n)[:16] for n in range(110)},
        config={f"section{n % 6}.key{n}": n * 0.5 for n in range(60)},
        data_files=[FileDigest(label=f"train[{n}]: part-{n:05d}.jsonl", bytes=10**9 + n, digest=digest("data", n)) for n in range(24)],
        tokenizer_files=[FileDigest(label=f"tokenizer{n}.json", bytes=10**6, digest=digest("t", n)) for n in range(4)],
        model_files=[FileDigest(label=f"model-{n:05d}.safetensors", bytes=5 * 10**9, digest=digest("w", n)) for n in range(8)],
        output=OutputFacts(path="/shared/runs/one", writable=True, shared=True, free_bytes=10**13, file_system="nfs4"),
        limits=SystemLimits(cores=96, memory_bytes=10**12, shm_bytes=10**11, shm_free_bytes=10**11, open_files=65536,
                      locked_memory_bytes=None, stack_bytes=8 << 20, processes=10**6),
        interfaces=interfaces, host_addresses=[address], head_addresses=["10.0.0.1"], clock_offset_s=0.001,
        probe_ports=[40001, 40002, 40003],
    )  # fmt: skip


class Nodes:
    """Some of the nodes, in this process: what the parent's lines on stdin ask for, answered by
    lines of JSON on stdout.
    """

    def __init__(self, port: int, nodes: int, odd: int) -> None:
        self.port = port
        self.nodes = nodes
        self.odd = odd
        self.links: list[NodeLink] = []
        self.reports: dict[int, dict[str, Any]] = {}

    def prepare(self, ranks: list[int]) -> None:
        """Makes the reports, which takes time that is not counted."""
        for rank in ranks:
            self.reports[rank] = report(rank, self.nodes, odd=rank == self.odd).to_json()

    def join(self, rank: int) -> NodeLink:
        """One node calls and reports."""
        link = NodeLink.connect(
            host="127.0.0.1", port=self.port, token=TOKEN, node_rank=rank, node_host=f"node{rank:04d}", timeout_s=LIMIT_S,
            nodes=self.nodes,
        )  # fmt: skip
        link.send({"kind": "report", "report": self.reports[rank]})
        return link

    def call(self, ranks: list[int]) -> dict[str, Any]:
        """These nodes call; says when they began."""
        began = time.monotonic()
        with ThreadPoolExecutor(32) as pool:
            self.links += pool.map(self.join, ranks)
        return {"began": began} if ranks else {}

    def listen(self) -> dict[str, Any]:
        """Waits until every node has the words."""
        words, waiting = set(), list(self.links)
        until = time.monotonic() + LIMIT_S
        while waiting and time.monotonic() < until:
            heard = [(link, link.receive(0.0)) for link in waiting]
            words |= {
                json.dumps(e.message, sort_keys=True)
                for _, events in heard
                for e in events
                if isinstance(e, NodeMessage)
            }
            waiting = [link for link, events in heard if not events]
            time.sleep(0.002)
        ended = time.monotonic()
        for link in self.links:
            link.close()
        return {"ended": ended, "without": len(waiting), "words": [digest(word) for word in words]}


def be_nodes(port: int, nodes: int, odd: int) -> None:
    """The body of a process that holds nodes."""
    here = Nodes(port, nodes, odd)
    for line in sys.stdin:
        verb, *numbers = line.split()
        ranks = [int(number) for number in numbers]
        answer: dict[str, Any] = {}
        if verb == "prepare":
            here.prepare(ranks)
        elif verb == "call":
            answer = here.call(ranks)
        else:
            answer = here.listen()
        print(json.dumps(answer), flush=True)


class Crowd:
    """The processes that hold the nodes, seen from the head."""

    def __init__(self, port: int, nodes: int, odd: int) -> None:
        self._parts: list[tuple[subprocess.Popen[str], list[int]]] = []
        ranks = list(range(1, nodes))
        for part in range(PROCESSES):
            command = [sys.executable, __file__, "--be-nodes", str(port), str(nodes), str(odd)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._parts.append((process, ranks[part::PROCESSES]))
        for process, own in self._parts:
            self._ask(process, "prepare", own)
        self.answers()

    def call(self, ranks: set[int]) -> None:
        """These nodes call now."""
        for process, own in self._parts:
            self._ask(process, "call", [rank for rank in own if rank in ranks])

    def listen(self) -> None:
        """All wait for the words now."""
        for process, _ in self._parts:
            self._ask(process, "listen", [])

    def answers(self) -> list[dict[str, Any]]:
        """What each process says to the last request."""
        return [json.loads(process.stdout.readline()) for process, _ in self._parts if process.stdout]

    def end(self) -> None:
        """The processes end."""
        for process, _ in self._parts:
            process.communicate()

    def _ask(self, process: "subprocess.Popen[str]", verb: str, ranks: list[int]) -> None:
        assert process.stdin is not None
        process.stdin.write(" ".join([verb, *map(str, ranks)]) + "\n")
        process.stdin.flush()


def take_reports(server: HeadServer, known: dict[int, NodeReport], count: int) -> float:
    """Waits until `count` nodes have reported; gives when the last one was let in."""
    until = time.monotonic() + LIMIT_S
    last_joined = 0.0
    while len(known) < count:
        assert time.monotonic() < until, f"{len(known)} of {count} have reported"
        for event in server.receive(0.5):
            if isinstance(event, NodeMessage):
                known[event.node_rank] = NodeReport.model_validate(event.message["report"])
            else:
                assert isinstance(event, Joined), event
                last_joined = time.monotonic()
    return last_joined


def measure(case: str, nodes: int) -> dict[str, Any]:
    """One case: seconds, and whether the words are right."""
    server = HeadServer(host="127.0.0.1", port=0, token=TOKEN, nodes=nodes, welcome={}, run_nonce="bench")
    crowd = Crowd(server.address[1], nodes, ODD if case == "differs" else -1)
    known = {0: report(0, nodes, odd=False)}
    last = nodes - 1
    early = set(range(1, nodes)) if case == "at_once" else set(range(1, last))
    crowd.call(early)
    began = take_reports(server, known, len(early) + 1)
    first_call = min(answer["began"] for answer in crowd.answers() if answer)
    verdicts: list[Verdict]
    if case == "never_comes":
        time.sleep(NAMED_AFTER_S)
        began = time.monotonic()
        verdicts = [missing_nodes(nodes, {rank: r.host for rank, r in known.items()}, [], NAMED_AFTER_S)]
        compared_s = time.monotonic() - began
    else:
        if case != "at_once":
            crowd.call({last})
            take_reports(server, known, nodes)
            began = max(answer["began"] for answer in crowd.answers() if answer)
        compared = time.monotonic()
        verdicts = compare_nodes(list(known.values())).fatal
        compared_s = time.monotonic() - compared
    crowd.listen()
    server.send_last({"kind": "ended", "verdicts": [verdict.to_json() for verdict in verdicts]})
    server.close(patience_s=LIMIT_S)
    heard = crowd.answers()
    crowd.end()
    words = {word for answer in heard for word in answer["words"]}
    assert len(words) == 1, "not the same words everywhere"
    assert not any(answer["without"] for answer in heard), heard
    assert (verdicts[0].cause if verdicts else "") == WANTED[case], verdicts
    ended = max(answer["ended"] for answer in heard)
    return {
        "case": case, "nodes": nodes, "seconds": round(ended - began, 3),
        **({"since_first_call_s": round(ended - first_call, 3)} if case == "at_once" else {}),
        "of_which_comparing_s": round(compared_s, 3), "report_bytes": len(json.dumps(known[0].to_json())),
        "verdict": verdicts[0].summary if verdicts else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, action="append", help="how many; default 256 and 1024")
    parser.add_argument("--repeat", type=int, default=3, help="of each case; the slowest counts")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "agree_scale.json"))
    parser.add_argument("--be-nodes", nargs=3, type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_nodes:
        be_nodes(*asked.be_nodes)
        return
    results = []
    for nodes in asked.nodes or sorted(AIMS):
        for case in CASES:
            tries = [measure(case, nodes) for _ in range(asked.repeat)]
            slowest = max(tries, key=lambda one: one["seconds"])
            results.append(
                {**slowest, "all_seconds": sorted(one["seconds"] for one in tries), "aim_s": AIMS.get(nodes)}
            )
            print(json.dumps(results[-1]), file=sys.stderr)
    body = {
        "schema": 1, "command": "python " + " ".join(["bench/agree_scale.py", *sys.argv[1:]]),
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "load": round(os.getloadavg()[0], 1)},
        "results": results,
    }  # fmt: skip
    text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    if asked.out == "-":
        print(text, end="")
    else:
        Path(asked.out).write_text(text)


if __name__ == "__main__":
    main()
