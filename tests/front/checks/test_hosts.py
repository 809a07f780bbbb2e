"""One command looks at all nodes, and prints one report.

Run, as root: pytest tests/front/checks/test_hosts.py

Nodes are network namespaces; in the place of the ssh client stands a program that takes its command
line and runs the command on that node. One test has a real client and a real sshd, both ends on
this machine's loopback.
"""

import json
import os
import sys
from pathlib import Path

from tests.front.checks.doctor_process import doctor
from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.needs import need, program
from tests.sshd import as_program, ssh_server

_SSH = """#!{python}
import os, sys
ways = {ways!r}
after = sys.argv.index("--")
host, command = sys.argv[after + 1], sys.argv[after + 2]
os.environ.update({environment!r})
way = ways[host]
os.execvp(way[0], [*way, "bash", "-c", command])
"""


def typed(networks: Namespaces, job: Job, *words: str, there: dict[str, str] | None = None) -> Front:
    """Types the command with --hosts on the first node; it has no token.

    Args:
        networks: the nodes.
        job: on them.
        words: of the command line.
        there: variables that a login on the other nodes has.
    """
    need("ssh")
    hosts = [networks.host(node) for node in range(job.nodes)]
    folder = job.folder / "bin"
    folder.mkdir()
    ways = {host: networks.command(node, [], Own()) for node, host in enumerate(hosts)}
    login = job._environment(1, {"UNISONO_TOKEN": "", **(there or {})})
    (folder / "ssh").write_text(_SSH.format(python=sys.executable, ways=ways, environment=login))
    (folder / "ssh").chmod(0o755)
    client = program("ssh")
    assert client is not None
    own = Own(binds=[(folder / "ssh", Path(client))])  # and not PATH, with which nothing would be forked
    command = [sys.executable, "-m", "unisono", "doctor", *words, "--hosts", ",".join(hosts), "--json"]
    front = Front(
        command, node=0, host=hosts[0], cwd=job.home(0), environment=job._environment(0, {"UNISONO_TOKEN": ""}), json=True,
        place=networks.place(0, own), executed=networks.command(0, command, own),
    )  # fmt: skip
    job.fronts.append(front)
    return front


def test_it_goes_over_a_real_ssh_with_the_options_of_the_command(tmp_path: Path) -> None:
    keys = tmp_path / "sshd"
    keys.mkdir()
    with ssh_server(keys) as options:
        path = os.pathsep.join((str(as_program(options, keys)), os.environ["PATH"]))
        seen = doctor(tmp_path, "--hosts", "127.0.0.2", "--ladder", env={"PATH": path, "NCCL_DEBUG": "WARN"})
    # It is slow where all cores are busy, and says so.
    assert seen.status("network.ladder") in ("pass", "warn"), seen.out + seen.err
    assert "2 nodes have the same run" in seen.text("peers.agreement")
    assert str(seen.of("system.shm")[0]["where"]).startswith("nodes 0 (")


def checks(front: Front) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {}
    for finding in json.loads(front.text("out"))["checks"]:
        found.setdefault(finding["id"], []).append(finding)
    return found


def test_one_command_gives_one_report_of_all_nodes(networks: Namespaces, trio: Job) -> None:
    front = typed(networks, trio, there={"UNISONO_LAN": "en"})
    assert front.wait() == 0, front.text()
    found = checks(front)
    [agreed] = found["peers.agreement"]
    assert "3 nodes have the same run" in str(agreed["evidence"])
    assert found["system.shm"][0]["where"] == "nodes 0 (ada), 1 (bob) and 2 (cyd)"
    [misspelt] = found["settings.misspelt"]
    assert (misspelt["status"], misspelt["where"]) == ("warn", "nodes 1 (bob) and 2 (cyd)")
    trio.wait_gone()


def test_a_node_that_is_set_otherwise_ends_it_with_3_and_its_name(networks: Namespaces, pair: Job) -> None:
    front = typed(networks, pair, "c.yaml", there={"NCCL_ALGO": "Tree"})
    assert front.wait() == 3, front.text()
    [agreed] = checks(front)["peers.agreement"]
    assert agreed["status"] == "fail"
    assert "NCCL_ALGO" in str(agreed["evidence"])
    assert "bob" in str(agreed["evidence"])
    assert not pair.out.exists()
    pair.wait_gone()
