"""Nodes dial each other: every kind of way that is not one is told apart.

Run: pytest tests/guard/control/test_reachability.py
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.needs import need, need_namespaces
from unisono.guard.control import reachability
from unisono.guard.control.reachability import (
    CALLS,
    SIZES,
    DialLimits,
    DialResult,
    EchoListener,
    Peer,
    choose_peers,
    dial_all,
    reach_key,
)

KEY = reach_key(b"the job's token", "run-1")
SHORT = DialLimits(connect_s=1.0, message_s=1.0, patient_s=1.5)
"""Where nothing comes."""
LONG = DialLimits(connect_s=20.0, message_s=20.0, patient_s=40.0)


def peers_of(count: int) -> list[Peer]:
    return [Peer(rank, f"n{rank}", "127.0.0.1", (1, 2, 3)) for rank in range(count)]


@given(count=st.integers(1, 400), most=st.integers(1, 20))
@example(count=20, most=18)
@example(count=18, most=16)
@settings(deadline=None, max_examples=60)
def test_every_node_is_dialled_by_neighbours_and_the_head_by_everybody(count: int, most: int) -> None:
    peers = peers_of(count)
    chosen = {rank: choose_peers(peers, rank, most=most) for rank in range(count)}
    dialled = dict.fromkeys(range(count), 0)
    for rank, targets in chosen.items():
        ranks = [peer.node_rank for peer in targets]
        assert rank not in ranks
        assert len(set(ranks)) == len(ranks) <= most + 1
        assert rank == 0 or 0 in ranks
        for target in targets:
            dialled[target.node_rank] += not target.brief
    assert len({dialled[rank] for rank in range(count)}) == 1, "a ring looks the same from every place"
    assert min(dialled.values()) >= min(count - 1, most, 1)


def test_few_nodes_dial_all_others_and_a_thousand_dial_seventeen_at_most() -> None:
    assert [peer.node_rank for peer in choose_peers(peers_of(5), 2)] == [0, 1, 3, 4]
    many = peers_of(1024)
    assert all(len(choose_peers(many, rank)) <= 17 for rank in (0, 1, 500, 1023))
    head = next(peer for peer in choose_peers(many, 500) if peer.node_rank == 0)
    assert head.brief
    assert len(head.ports) == 1


@given(st.integers(0, 5000), st.lists(st.integers(1, 65535), max_size=8), st.booleans())
def test_a_peer_survives_the_wire(rank: int, ports: list[int], brief: bool) -> None:  # noqa: FBT001 - hypothesis gives it
    peer = Peer(rank, "host", "10.0.0.1", tuple(ports), brief)
    assert Peer.from_json(json.loads(json.dumps(peer.to_json()))) == peer


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.booleans(), lambda inner: st.lists(inner, max_size=6)
    )
)
def test_what_is_not_a_peer_is_refused(value: Any) -> None:
    with contextlib.suppress(ValueError):
        peer = Peer.from_json(value)
        assert all(0 < port < 65536 for port in peer.ports)


@pytest.fixture
def listener() -> Iterator[EchoListener]:
    with EchoListener("127.0.0.1", KEY) as made:
        yield made


def dial(*ports: int, limits: DialLimits = LONG, key: bytes = KEY) -> list[DialResult]:
    return dial_all([Peer(1, "b", "127.0.0.1", ports)], key, source=0, limits=limits)


def test_every_size_returns_from_the_first_port_and_small_ones_from_others(
    listener: EchoListener,
) -> None:
    found = dial(*listener.ports, limits=DialLimits())
    assert [(one.outcome, one.largest_bytes, one.tried_bytes) for one in found] == [
        ("ok", SIZES[-1], list(SIZES)),
        ("ok", SIZES[2], list(SIZES[:3])),
        ("ok", SIZES[2], list(SIZES[:3])),
    ]
    assert [one.port for one in found] == listener.ports
    assert all(one.rtt_s is not None and 0 < one.rtt_s < 1 for one in found)
    assert (found[0].source, found[0].target) == (0, 1)


def test_a_peer_that_everybody_dials_gets_small_messages(listener: EchoListener) -> None:
    [found] = dial_all([Peer(1, "b", "127.0.0.1", tuple(listener.ports[:1]), brief=True)], KEY, source=0)
    assert (found.outcome, found.largest_bytes) == ("ok", 9_000)


def test_a_closed_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    [found] = dial(port)
    assert found.outcome == "refused"


def test_a_name_in_place_of_an_address_is_unreachable() -> None:
    [found] = dial_all([Peer(1, "b", "not-an-address", (9,))], KEY, source=0)
    assert found.outcome == "unreachable"


@contextlib.contextmanager
def foreign(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program that is not ours; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    with contextlib.suppress(OSError):
                        answer(kept[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for sock in kept:
                sock.close()


def test_a_different_program_is_a_stranger_and_its_first_word_is_shown() -> None:
    with foreign(lambda sock: sock.sendall(b"SSH-2.0-\x1b[31mOpenSSH_9.6\r\n")) as port:
        [found] = dial(port)
    assert found.outcome == "stranger"
    assert "SSH-2.0" in found.note
    assert "\x1b" not in found.note


def test_one_that_hangs_up_is_a_stranger() -> None:
    with foreign(lambda sock: sock.close()) as port:
        [found] = dial(port)
    assert found.outcome == "stranger"


def test_one_that_accepts_and_is_silent_is_named_so() -> None:
    with foreign(lambda _sock: None) as port:
        [found] = dial(port, limits=SHORT)
    assert found.outcome == "timed_out"
    assert "accepted" in found.note


def test_a_different_jobs_unisono_is_a_stranger() -> None:
    with EchoListener("127.0.0.1", reach_key(b"another token", "run-1")) as other:
        [found, *_] = dial(*other.ports)
    assert found.outcome == "stranger"
    assert "a different job" in found.note


def test_large_messages_that_do_not_pass_are_distinguished_from_small_ones(
    listener: EchoListener,
) -> None:
    """A relay that carries 20,000 bytes each way and then no more: as a way with too small an MTU
    does to large messages.
    """
    reported = threading.Event()  # until then the connection stays open, so that it is silence and no end

    def relay(caller: socket.socket) -> None:
        target = socket.create_connection(("127.0.0.1", listener.ports[0]))

        def carry(source: socket.socket, sink: socket.socket, left: int) -> None:
            with contextlib.suppress(OSError):
                while left > 0 and (data := source.recv(min(left, 4096))):
                    sink.sendall(data)
                    left -= len(data)
                reported.wait(60)
            sink.close()

        for pair in ((caller, target), (target, caller)):
            threading.Thread(target=carry, args=(*pair, 20_000), daemon=True).start()

    with foreign(relay) as port:
        [found] = dial(port, limits=SHORT)
        reported.set()
    assert (found.outcome, found.largest_bytes) == ("stalled", 9_000)
    assert found.tried_bytes == [1, 1_400, 9_000, 65_536]
    assert "65,536 bytes did not come back" in found.note


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            data += chunk
    return data


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, CALLS[:-1] + b"\x02" + b"x" * 60])
def test_who_does_not_begin_as_we_do_gets_nothing(listener: EchoListener, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.ports[0]), timeout=10) as sock:
        sock.sendall(sent)
        assert read_all(sock) == b""
    assert dial(*listener.ports)[0].outcome == "ok"


def test_who_cannot_prove_the_key_is_sent_nothing_back(listener: EchoListener) -> None:
    with socket.create_connection(("127.0.0.1", listener.ports[0]), timeout=10) as sock:
        sock.sendall(CALLS + b"n" * 16 + b"p" * 32 + (5).to_bytes(4, "big") + b"m" * 32 + b"hello")
        assert len(read_all(sock)) <= 57


def test_who_reports_nothing_is_hung_up_on(listener: EchoListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_PROOF_S", 0.3)
    with socket.create_connection(("127.0.0.1", listener.ports[0]), timeout=20) as sock:
        assert read_all(sock) == b""


@given(st.binary(max_size=300))
@settings(max_examples=40, deadline=None)
def test_no_bytes_end_the_listener(data: bytes) -> None:
    with EchoListener("127.0.0.1", KEY, ports=1) as listener:
        with socket.create_connection(("127.0.0.1", listener.ports[0]), timeout=10) as sock:
            sock.sendall(CALLS + data)
            sock.shutdown(socket.SHUT_WR)
            assert len(read_all(sock)) <= 57
        assert dial(*listener.ports)[0].outcome == "ok"


def test_a_hundred_diallers_at_once_are_all_answered(listener: EchoListener) -> None:
    head = Peer(0, "a", "127.0.0.1", tuple(listener.ports[:1]), brief=True)
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda rank: dial_all([head], KEY, source=rank, limits=LONG)[0], range(100)))
    assert [one.outcome for one in found] == ["ok"] * 100


def test_after_close_the_ports_are_free_and_no_thread_is_left() -> None:
    before = threading.active_count()
    listener = EchoListener("127.0.0.1", KEY)
    with socket.create_connection(("127.0.0.1", listener.ports[0])):
        listener.close()
    listener.close()
    assert threading.active_count() <= before
    assert {one.outcome for one in dial(*listener.ports)} == {"refused"}


def test_an_address_of_a_different_machine_cannot_be_listened_on() -> None:
    with pytest.raises(OSError, match="assign"):
        EchoListener("192.0.2.77", KEY)


# Two machines and the cable between them: network namespaces.

LISTEN = """
import sys
from unisono.guard.control.reachability import EchoListener
with EchoListener("{address}", bytes.fromhex("{key}")) as listener:
    print(*listener.ports, flush=True)
    sys.stdin.read()
"""
DIAL = """
import json, sys
from dataclasses import asdict
from unisono.guard.control.reachability import Peer, dial_all
peer = Peer(1, "b", "{address}", tuple({ports}))
print(json.dumps([asdict(one) for one in dial_all([peer], bytes.fromhex("{key}"), source=0)]))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Cable:
    """Namespaces a and b, each with an eth0 of MTU 1500, and one between them with the bridge that
    carries their packets.
    """

    def __init__(self) -> None:
        name = f"reach{os.getpid()}"
        self.a, self.b, self.middle = f"{name}a", f"{name}b", f"{name}m"
        self.address = {self.a: "10.231.77.1", self.b: "10.231.77.2"}
        self.processes: list[subprocess.Popen[str]] = []
        for namespace in (self.a, self.b, self.middle):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", self.middle, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.middle, "link", "set", "bridge", "up")
        for end in (self.a, self.b):
            port = f"to{end[-1]}"
            ip("-n", self.middle, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", end)
            ip("-n", self.middle, "link", "set", port, "master", "bridge", "up")
            ip("-n", end, "addr", "add", f"{self.address[end]}/24", "dev", "eth0")
            ip("-n", end, "link", "set", "eth0", "up")

    def python(self, namespace: str, program: str, **values: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", program.format(key=KEY.hex(), **values)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def listen(self, namespace: str) -> list[int]:
        process = self.python(namespace, LISTEN, address=self.address[namespace])
        assert process.stdout is not None
        return [int(port) for port in process.stdout.readline().split()]

    def dial(self, source: str, target: str, ports: list[int]) -> list[dict[str, Any]]:
        process = self.python(source, DIAL, address=self.address[target], ports=ports)
        return json.loads(process.communicate(timeout=60)[0])

    def drop(self, namespace: str, *rule: str) -> None:
        subprocess.run(
            ["ip", "netns", "exec", namespace, "iptables", "-A", "INPUT", *rule],
            check=True,
            capture_output=True,
            timeout=20,
        )

    def close(self) -> None:
        for process in self.processes:
            with process:
                process.kill()
        for namespace in (self.a, self.b, self.middle):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=20)


@pytest.fixture
def cable() -> Iterator[Cable]:
    need("iptables")
    need_namespaces(f"reach{os.getpid()}try")
    made = Cable()
    yield made
    made.close()


@pytest.mark.ranks
def test_machines_on_one_cable_reach_each_other(cable: Cable) -> None:
    found = cable.dial(cable.a, cable.b, cable.listen(cable.b))
    assert [one["outcome"] for one in found] == ["ok"] * 3


@pytest.mark.ranks
def test_firewall_that_drops_ports_of_one_side_is_seen_from_the_other_only(cable: Cable) -> None:
    here, there = cable.listen(cable.a), cable.listen(cable.b)
    cable.drop(cable.b, "-p", "tcp", "--dport", "1024:65535", "--syn", "-j", "DROP")
    assert {one["outcome"] for one in cable.dial(cable.a, cable.b, there)} == {"timed_out"}
    assert {one["outcome"] for one in cable.dial(cable.b, cable.a, here)} == {"ok"}


@pytest.mark.ranks
def test_a_firewall_that_reports_it_is_refused_or_unreachable_at_once(cable: Cable) -> None:
    there = cable.listen(cable.b)
    cable.drop(
        cable.b,
        "-p",
        "tcp",
        "--dport",
        str(there[0]),
        "-j",
        "REJECT",
        "--reject-with",
        "icmp-host-prohibited",
    )
    cable.drop(cable.b, "-p", "tcp", "--dport", str(there[1]), "-j", "REJECT", "--reject-with", "tcp-reset")
    found = cable.dial(cable.a, cable.b, there)
    assert [one["outcome"] for one in found] == ["unreachable", "refused", "ok"]


@pytest.mark.ranks
def test_a_way_that_swallows_large_packets_is_stalled(cable: Cable) -> None:
    """Both ends believe in 1500 bytes; the bridge's way to b carries 1400, and says nothing of
    it.
    """
    there = cable.listen(cable.b)
    ip("-n", cable.middle, "link", "set", "tob", "mtu", "1400")
    began = time.monotonic()
    found = cable.dial(cable.a, cable.b, there)
    assert {(one["outcome"], one["largest_bytes"]) for one in found} == {("stalled", 1)}
    assert time.monotonic() - began < 12, "packets that are lost are not waited for as a slow peer is"


def test_a_peer_that_is_stopped_for_a_while_is_waited_for(listener: EchoListener) -> None:
    """It has all our packets and answers late, as a machine under load does: nothing is wrong with
    the way.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN.format(address="127.0.0.1", key=KEY.hex())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[0])
        process.send_signal(signal.SIGSTOP)
        threading.Timer(1.5, process.send_signal, (signal.SIGCONT,)).start()
        [found] = dial(port, limits=DialLimits(connect_s=3.0, message_s=0.3, patient_s=60.0))
        process.kill()
    assert (found.outcome, found.largest_bytes) == ("ok", SIZES[-1])


@pytest.mark.ranks
def test_a_cut_cable_is_not_an_answer(cable: Cable) -> None:
    there = cable.listen(cable.b)
    ip("-n", cable.middle, "link", "set", "tob", "down")
    found = cable.dial(cable.a, cable.b, there)
    assert {one["outcome"] for one in found} <= {"timed_out", "unreachable"}
