"""A forked front is what exec would have started. Run: pytest tests/test_front_server.py"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.jobs.nodes.network_namespaces import Ground, Own
from tests.needs import lacking

FACTS = [sys.executable, "-m", "tests.jobs.runs.standins.front_facts"]
ROOT = Path(__file__).parents[1]
SCRIPT = """import sys
print(sys.argv, sys.orig_argv, sys.path, __name__, __file__, flush=True)
raise ValueError("of the script")
"""


def answer(process: "subprocess.Popen[str]", given: str = "") -> tuple[dict[str, Any], str, int]:
    """What a front prints, what it writes to stderr, and its exit code."""
    out, err = process.communicate(given, 120)
    found: dict[str, Any] = json.loads(out)
    return found, err, process.returncode


def started(environment: dict[str, str], **options: Any) -> "subprocess.Popen[str]":
    return front_server.start(
        [*FACTS, "3"], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, **options,
    )  # fmt: skip


def executed(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> "subprocess.Popen[str]":  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(front_server, "_has_server", lambda: False)
        return started(environment, **options)


def test_a_forked_front_is_as_an_executed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "UNISONO_TOKEN": "x", "TEST_OWN": "ä"}
    forked, fresh = started(environment), executed(environment, monkeypatch)
    of_forked, of_fresh = answer(forked, "words\n"), answer(fresh, "words\n")
    assert of_fresh[0]["parent"] == os.getpid() != of_forked[0]["parent"]
    assert of_forked[0]["facts"] == of_fresh[0]["facts"]
    assert of_forked[1:] == of_fresh[1:] == ("to stderr", 3)


def test_a_forked_script_is_as_an_executed_one(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "own.py"), "a", "b c"]
    forked = front_server.run(command, timeout=120, cwd=tmp_path)
    fresh = subprocess.run(command, timeout=120, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1] == "ValueError: of the script"


def test_a_forked_front_goes_to_its_place(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ground.apart:
        pytest.skip(lacking("ip", "unshare", root=True) or "needs network namespaces")
    own, environment = Own(small=[(Path("/mnt"), 1 << 20)]), dict(os.environ)
    named = {"place": ground.place(1, own), "executed": ground.command(1, [*FACTS, "3"], own)}
    found = [answer(process)[0]["facts"] for process in (started(environment, **named), executed(environment, monkeypatch, **named))]  # fmt: skip
    net, uts, _, mounts, *_ = found[0]["namespaces"]
    assert {net, uts, mounts}.isdisjoint(Path(f"/proc/self/ns/{name}").readlink().name for name in ("net", "uts", "mnt"))  # fmt: skip
    assert net == found[1]["namespaces"][0]
    assert found[0]["host"] == found[1]["host"] == ground.host(1)
    assert [one["cwd"] for one in found] == [str(ROOT)] * 2


@pytest.mark.parametrize("variables", [{"LANG": "C"}, {"PYTHONWARNINGS": "error"}])
def test_a_front_whose_interpreter_reads_something_different_is_executed(variables: dict[str, str]) -> None:
    assert answer(started({**os.environ, **variables}))[0]["parent"] == os.getpid()


def test_the_end_of_a_forked_front_is_known_as_of_any_process() -> None:
    with started(dict(os.environ)) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == process.poll() == -signal.SIGKILL
