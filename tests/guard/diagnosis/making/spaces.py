"""Network namespaces as nodes: 10.77.3.0/24, made for a run and taken away after it."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NET, PREFIX = "10.77.3", "dgm"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def clear(n: int) -> None:
    for i in range(n):
        ip("netns", "del", f"{PREFIX}{i}", check=False)
        ip("link", "del", f"{PREFIX}v{i}", check=False)
        for file in Path(f"/etc/netns/{PREFIX}{i}").glob("*"):
            file.unlink()
    ip("link", "del", f"{PREFIX}br", check=False)


@contextlib.contextmanager
def nodes(
    n: int, loopback: Sequence[int] = (), names: Sequence[str] = (), bridge: str = ""
) -> Iterator[list[list[str]]]:
    """What to put before a command to run it on node i; `loopback`: nodes whose own name is
    127.0.1.1; `bridge`: one more interface on each, which leads nowhere.
    """
    clear(n)
    names = names or [f"node{i}" for i in range(n)]
    ip("link", "add", f"{PREFIX}br", "type", "bridge")
    ip("link", "set", f"{PREFIX}br", "up")
    try:
        for i in range(n):
            name = f"{PREFIX}{i}"
            ip("netns", "add", name)
            ip("link", "add", f"{PREFIX}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{PREFIX}v{i}", "master", f"{PREFIX}br", "up")
            ip("-n", name, "addr", "add", f"{NET}.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if bridge:
                ip("-n", name, "link", "add", bridge, "type", "bridge")
                ip("-n", name, "addr", "add", f"172.17.0.{i + 1}/32", "dev", bridge)
                ip("-n", name, "link", "set", bridge, "up")
            folder = Path(f"/etc/netns/{name}")
            folder.mkdir(parents=True, exist_ok=True)
            rows = ["127.0.0.1 localhost"] + ([f"127.0.1.1 {names[i]}"] if i in loopback else [])
            (folder / "hosts").write_text(
                "\n".join(rows + [f"{NET}.{j + 1} {names[j]}" for j in range(n)]) + "\n"
            )
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        yield [
            [
                "ip",
                "netns",
                "exec",
                f"{PREFIX}{i}",
                "unshare",
                "--uts",
                "sh",
                "-c",
                f'hostname {names[i]}; exec "$@"',
                "_",
            ]
            for i in range(n)
        ]
    finally:
        clear(n)
