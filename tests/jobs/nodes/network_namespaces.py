"""What stands in for several machines: network namespaces where root is to be had, else this
machine's own loopback.
"""

import atexit
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.front_server import Place
from tests.needs import lacking
from tests.ports import free_port

HOSTS = ("ada", "bob", "cyd", "dan")
_PREFIX = "uni"
_LETTERS = "acdefghijk"  # a process may have several grounds at a time; without the "b" of a bridge
_letters = itertools.cycle(_LETTERS)


@dataclass(frozen=True)
class Own:
    """What a process on a node sees in place of the machine's own.

    Attributes:
        hosts: its /etc/hosts; None: all nodes by their names.
        binds: (directory, where it appears).
        small: (where, bytes) of an empty file system in memory.
    """

    hosts: str | None = None
    binds: Sequence[tuple[Path, Path]] = ()
    small: Sequence[tuple[Path, int]] = ()


class Ground(Protocol):
    """Places on which nodes run."""

    apart: bool
    """Whether each node has a network, mounts and files in /etc of its own."""

    def host(self, node: int) -> str:
        """The host name that the node has."""
        ...

    def address(self, node: int) -> str:
        """Where other nodes reach it."""
        ...

    def head_port(self) -> int:
        """A port on which the head may listen."""
        ...

    def command(self, node: int, words: Sequence[str], own: Own) -> list[str]:
        """The command line that runs `words` on the node, in the same process."""
        ...

    def place(self, node: int, own: Own) -> Place | None:
        """Where that command line runs them; None where that is the tests' own place, or a process
        without root cannot go there.
        """
        ...

    def close(self) -> None:
        """Leaves nothing behind."""
        ...


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)


def _must(*words: str) -> str:
    done = _run(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Namespaces:
    """Nodes as network namespaces on one bridge; its names carry this process's id, so that two
    test runs do not meet.
    """

    nodes: int
    folder: Path
    apart: bool = True
    _name: str = field(default_factory=lambda: f"{_PREFIX}{os.getpid()}{next(_letters)}")

    def __post_init__(self) -> None:
        sweep()
        atexit.register(self.close)
        bridge = f"{self._name}b"
        _must("ip", "link", "add", bridge, "type", "bridge")
        _must("ip", "link", "set", bridge, "up")
        for node in range(self.nodes):
            name, veth = self.name(node), f"{self._name}v{node}"
            _must("ip", "netns", "add", name)
            _must("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
            _must("ip", "link", "set", veth, "master", bridge, "up")
            _must("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _must("ip", "-n", name, "link", "set", "eth0", "up")
            _must("ip", "-n", name, "link", "set", "lo", "up")
            # Whole segments would travel as one packet between namespaces, and no rule on a
            # packet's length would be real.
            _run("ip", "-n", name, "link", "set", "eth0", "gso_max_segs", "1")
        # A resolver that refuses at once: a real one cannot be reached from here, and each look-up
        # would wait for it.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def name(self, node: int) -> str:
        return f"{self._name}n{node}"

    def host(self, node: int) -> str:
        return HOSTS[node]

    def address(self, node: int) -> str:
        return f"10.231.7.{node + 1}"

    def head_port(self) -> int:
        return 29411

    def hosts(self) -> str:
        """The hosts file of all nodes."""
        lines = [f"{self.address(node)} {self.host(node)}" for node in range(self.nodes)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def place(self, node: int, own: Own) -> Place:
        hosts = own.hosts if own.hosts is not None else self.hosts()
        hosts_file = self.folder / f"hosts-{node}-{abs(hash(hosts)):x}"
        if not hosts_file.exists():  # living nodes may have it as their own
            hosts_file.write_text(hosts)
        binds = [(hosts_file, Path("/etc/hosts")), (self.folder / "resolv.conf", Path("/etc/resolv.conf"))]
        return Place(
            network=self.name(node), host=self.host(node),
            binds=[(str(source), str(target)) for source, target in [*binds, *own.binds]],
            small=[(str(target), size) for target, size in own.small],
        )  # fmt: skip

    def command(self, node: int, words: Sequence[str], own: Own) -> list[str]:
        place = self.place(node, own)
        script = ["set -e", f"hostname {place.host}"]
        script += [f"mount --bind '{source}' '{target}'" for source, target in place.binds]
        script += [f"mount -t tmpfs -o size={size} tmpfs '{target}'" for target, size in place.small]
        script.append('exec "$@"')
        shell = ["bash", "-c", "\n".join(script), "node", *words]
        return ["ip", "netns", "exec", place.network, "unshare", "--uts", *shell]

    def inside(self, node: int, *words: str) -> str:
        """Runs a command in the node's network, and gives what it prints."""
        return _must("ip", "netns", "exec", self.name(node), *words)

    def drop(self, node: int, *rule: str) -> None:
        """Has the node drop packets that come in and match a rule of iptables."""
        self.inside(node, "iptables", "-A", "INPUT", *rule, "-j", "DROP")

    def pids(self, node: int) -> list[int]:
        """What runs in the node's network."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name(node)).stdout.split()]

    def open(self) -> None:
        """Takes all rules away, and puts the MTU back."""
        for node in range(self.nodes):
            if shutil.which("iptables"):
                _run("ip", "netns", "exec", self.name(node), "iptables", "-F")
            _run("ip", "-n", self.name(node), "link", "set", "eth0", "up", "mtu", "1500")

    def close(self) -> None:
        atexit.unregister(self.close)
        for node in range(self.nodes):
            _remove(self.name(node))
        _run("ip", "link", "del", f"{self._name}b")


def _remove(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).stdout.split():
        _run("kill", "-9", pid)  # only what runs in a namespace that we made
    _run("ip", "netns", "del", namespace)


def sweep() -> None:
    """Removes what a test run left that was killed."""
    for line in _run("ip", "netns", "list").stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        found = re.fullmatch(rf"{_PREFIX}(\d+)[{_LETTERS}]n\d", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(name)
    for found in re.finditer(rf"\d+: ({_PREFIX}(\d+)[{_LETTERS}]b):", _run("ip", "-o", "link").stdout):
        if not Path(f"/proc/{found[2]}").exists():
            _run("ip", "link", "del", found[1])


class Loopback:
    """Nodes that share this machine's network and differ in their host names, where the system
    allows that.
    """

    apart = False

    def __init__(self) -> None:
        root = os.geteuid() == 0
        words = ["unshare", "--uts"] if root else ["unshare", "--user", "--map-root-user", "--uts"]
        self._unshare = words if _run(*words, "hostname", "ada").returncode == 0 else []

    def host(self, node: int) -> str:
        return HOSTS[node] if self._unshare else re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())

    def address(self, node: int) -> str:
        del node
        return "127.0.0.1"

    def head_port(self) -> int:
        return free_port()

    def command(self, node: int, words: Sequence[str], own: Own) -> list[str]:
        assert not own.binds, "mounts of its own need root"
        if not self._unshare:
            return list(words)
        return [*self._unshare, "bash", "-c", f'hostname {HOSTS[node]}; exec "$@"', "node", *words]

    def place(self, node: int, own: Own) -> Place | None:
        del own
        return Place(network="", host=HOSTS[node]) if self._unshare == ["unshare", "--uts"] else None

    def close(self) -> None:
        return


def why_no_namespaces() -> str:
    """Why nodes cannot be network namespaces here; empty where they can."""
    if reason := lacking("ip", "unshare", "mount", root=True):
        return reason
    name = f"{_PREFIX}{os.getpid()}try"
    done = _run("ip", "netns", "add", name)
    if done.returncode != 0:
        return f"needs network namespaces: {done.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""
