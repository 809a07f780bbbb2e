"""Two nodes as network namespaces on one bridge, and a cable that can be pulled."""

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.drill.ground import Ground, needs_root, write_token

_HOSTS = ("drill-a", "drill-b")
_PREFIX = "udr"
_PORT = 29411
_LIMIT_S = 30


class TwoNetworks(Ground):
    """Two nodes, each with a network and a host name of its own. The names carry this process's id."""

    nodes = 2

    def __init__(self) -> None:
        super().__init__()
        self._name = f"{_PREFIX}{os.getpid()}"
        self._made = False

    def why_not(self) -> str:
        """Namespaces need root, and a system that allows them."""
        missing = needs_root("network namespaces", "ip", "unshare", "mount", "hostname")
        if missing:
            return missing
        name = f"{self._name}try"
        done = _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
        return f"no network namespace can be made: {done.stderr.strip()}" if done.returncode else ""

    def prepare(self, folder: Path) -> None:
        """Makes both, and the bridge between."""
        super().prepare(folder)
        _sweep()
        self._made = True
        self._token = write_token(folder)
        lines = [f"{self._address(node)} {host}" for node, host in enumerate(_HOSTS)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # A resolver that refuses at once: a real one cannot be reached from there, and each look-up would wait for it.
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        _must("ip", "link", "add", f"{self._name}b", "type", "bridge")
        _must("ip", "link", "set", f"{self._name}b", "up")
        for node in range(self.nodes):
            self._make(node)

    def host(self, node: int) -> str | None:
        """A name of its own."""
        return _HOSTS[node]

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """The front is moved there before it begins."""
        script = [
            f"hostname {_HOSTS[node]}",
            f"mount --bind '{self.folder}/hosts' /etc/hosts",
            f"mount --bind '{self.folder}/resolv.conf' /etc/resolv.conf",
            'exec "$@"',
        ]
        shell = ["sh", "-ec", "\n".join(script), "node", *words]
        return ["ip", "netns", "exec", self._space(node), "unshare", "--uts", *shell]

    def request(self, node: int) -> dict[str, Any]:
        """Two nodes, of which this is one."""
        head = f"{self._address(0)}:{_PORT}"
        return {"nodes": "2", "node_rank": node, "head": head, "token_file": str(self._token)}

    def strike(self) -> None:
        """Pulls node 1's cable out of the bridge: both sides keep their links, and nothing passes any more."""
        _must("ip", "link", "set", f"{self._name}v1", "nomaster")

    def close(self) -> None:
        """Takes both networks and the bridge away."""
        if self._made:
            for node in range(self.nodes):
                _remove(self._space(node))
            _run("ip", "link", "del", f"{self._name}b")

    def _make(self, node: int) -> None:
        name, veth = self._space(node), f"{self._name}v{node}"
        _must("ip", "netns", "add", name)
        _must("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
        _must("ip", "link", "set", veth, "master", f"{self._name}b", "up")
        _must("ip", "-n", name, "addr", "add", f"{self._address(node)}/24", "dev", "eth0")
        _must("ip", "-n", name, "link", "set", "eth0", "up")
        _must("ip", "-n", name, "link", "set", "lo", "up")

    def _space(self, node: int) -> str:
        return f"{self._name}n{node}"

    def _address(self, node: int) -> str:
        return f"10.231.8.{node + 1}"


def _sweep() -> None:
    """Removes what drills left that were killed."""
    for line in _run("ip", "netns", "list").stdout.splitlines():
        found = re.match(rf"{_PREFIX}(\d+)n\d\b", line)
        if found and not Path("/proc", found[1]).exists():
            _remove(found[0])
    for found in re.finditer(rf"\d+: ({_PREFIX}(\d+)b):", _run("ip", "-o", "link").stdout):
        if not Path("/proc", found[2]).exists():
            _run("ip", "link", "del", found[1])


def _remove(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)  # only what runs in a network that a drill has made
    _run("ip", "netns", "del", namespace)


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S)


def _must(*words: str) -> None:
    done = _run(*words)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
