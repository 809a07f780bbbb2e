"""Networks that can be broken, and a look at one of them from inside."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.front.checks.doctor_process import environment
from tests.jobs.nodes.network_namespaces import Ground, Namespaces, Own, why_no_namespaces

ROOT = Path(__file__).parents[4]


@pytest.fixture
def networks(ground: Ground) -> Iterator[Namespaces]:
    """Nodes whose networks can be broken; whole again after the test."""
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    yield ground
    ground.open()


class Inside:
    """Runs Python inside a node's network."""

    def __init__(self, networks: Namespaces, folder: Path) -> None:
        self.networks = networks
        self._folder = folder

    def start(
        self, node: int, script: Path, *words: str, env: dict[str, str] | None = None, own: Own | None = None
    ) -> "subprocess.Popen[str]":
        command = self.networks.command(node, [sys.executable, str(script), *words], own or Own())
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return subprocess.Popen(
            command, env=environment(self._folder) | {"PYTHONPATH": path} | (env or {}), cwd=self._folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def look(
        self,
        node: int = 0,
        *,
        nodes: int = 2,
        head: str = "",
        env: dict[str, str] | None = None,
        own: Own | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        """The findings about the network by check, as a node of a job of so many nodes makes
        them.
        """
        request = (
            {"nodes": str(nodes), "node_rank": node, "head": head or f"{self.networks.address(0)}:29411"}
            if nodes > 1
            else {}
        )
        child = self.start(
            node, Path(__file__).parent / "network_findings.py", json.dumps(request), env=env, own=own
        )
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        found: dict[str, list[dict[str, Any]]] = {}
        for finding in json.loads(out):
            found.setdefault(finding["id"], []).append(finding)
        return found


@pytest.fixture
def inside(networks: Namespaces, tmp_path: Path) -> Inside:
    """A way into the nodes' networks."""
    return Inside(networks, tmp_path)
