"""What the studio's server does: starts, the queue, its own end, and runs that outlive it.

Run: .venv/bin/python -m pytest tests/front/studio/test_server.py
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.front.studio.studios import TINY, RunningStudio, steps_of, studio_of, until, write_rows
from tests.front_server import run as run_front
from tests.jobs.nodes.network_namespaces import Loopback, Own
from tests.ports import free_port
from unisono.front.studio.form import FIRST, FIRST_OF, form
from unisono.guard.control.protocol import new_token
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import all_keys

CHEAP = "batch: {global: 2}\ncheckpoint: {every: 3 steps, read_back: false}\noptim: {lr: 1.0e-2}\n"


def config(name: str, duration: str) -> str:
    return f"{TINY}{CHEAP}duration: {duration}\noutput_dir: runs/{name}\n"


def state_of(studio: RunningStudio, name: str) -> str:
    return str(studio.row(name).get("state"))


def test_the_first_line_has_the_address_and_sigterm_ends_it_with_0(tmp_path: Path) -> None:
    with studio_of(tmp_path) as studio:
        assert set(studio.line) == {"kind", "schema", "url", "port", "roots"}
        assert studio.line["kind"] == "studio"
        assert studio.url.startswith(f"http://127.0.0.1:{studio.port}/?token=")
        assert studio.send("GET", "/api/runs").status == 401
        assert studio.get("/api/runs")["runs"] == [], "an empty directory is not a run"
        assert studio.end() == 0


def test_one_directory_has_one_studio(tmp_path: Path) -> None:
    with studio_of(tmp_path):
        second = run_front([sys.executable, "-m", "unisono", "studio", "--no-open", "--root", str(tmp_path)])
        assert second.returncode == 2
        assert "is running in" in second.stderr


def test_the_form_has_every_key_of_the_schema() -> None:
    keys = {field["key"] for field in form()["fields"]}
    sections = {key for key in all_keys(RunConfig) if any(other.startswith(f"{key}.") for other in keys)}
    inside_lists = tuple(f"{key}." for key in ("data.train", "data.eval", "rewards", "eval.metrics"))
    assert {key for key in all_keys(RunConfig) if not key.startswith(inside_lists)} == keys | (
        sections - keys
    )
    assert {*FIRST, *(key for more in FIRST_OF.values() for key in more)} <= keys
    assert all(
        field["help"]["en"] and field["help"]["zh"] for field in form()["fields"] if field["help"]["en"]
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_outlives_its_server_and_the_next_one_goes_on_with_the_queue(tmp_path: Path) -> None:
    write_rows(tmp_path)
    with studio_of(tmp_path) as studio:
        assert studio.post("start", text=config("one", "40 steps")).json["state"] == "running"
        assert studio.post("start", text=config("two", "2 steps")).json["state"] == "queued"
        third = studio.post("start", text=config("three", "2 steps")).json
        assert third["state"] == "queued"
        again = studio.post("start", text=config("two", "2 steps"))
        assert again.whats == ["two is queued or running already"]
        until(lambda: len(steps_of(tmp_path, "one")) > 2)
        assert state_of(studio, "two") == "queued"
        cancelled = studio.post("steer", action="cancel", id=studio.row("three")["start_id"])
        assert cancelled.json["state"] == "cancelled"
        os.kill(studio.process.pid, signal.SIGKILL)
        studio.process.wait(60)
    seen = len(steps_of(tmp_path, "one"))
    until(lambda: len(steps_of(tmp_path, "one")) > seen, limit_s=60)
    with studio_of(tmp_path) as studio:
        until(lambda: state_of(studio, "two") == "completed")
        assert state_of(studio, "one") == "completed"
        assert steps_of(tmp_path, "one") == list(range(1, 41)), "no gap"
        assert not (tmp_path / "runs" / "three").exists()
        actions = [line.split(" ")[1] for line in studio.audit().splitlines()]
        assert actions == ["start", "start", "start", "cancel"], "what was refused did nothing"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_is_stopped_resumed_and_extended(tmp_path: Path) -> None:
    write_rows(tmp_path)
    with studio_of(tmp_path) as studio:
        studio.post("start", text=config("one", "400 steps"))
        until(lambda: len(steps_of(tmp_path, "one")) > 1)
        assert studio.post("steer", action="stop", name="one").json == {"state": "stopping"}
        until(lambda: state_of(studio, "one") == "interrupted" and studio.row("one")["start"] == "ended")
        stopped = len(steps_of(tmp_path, "one"))
        assert studio.post("steer", action="extend", name="one", duration="soon").status == 400
        goal = stopped + 3
        extended = studio.post("steer", action="extend", name="one", duration=f"{goal} steps")
        if extended.status != 200:
            raise AssertionError(extended.data)
        until(
            lambda: state_of(studio, "one") != "interrupted" and studio.row("one").get("start") != "running"
        )
        assert (state_of(studio, "one"), studio.row("one")["problems"]) == ("completed", [])
        assert steps_of(tmp_path, "one") == list(range(1, goal + 1))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_launcher_of_the_owner_starts_a_run_on_two_nodes(tmp_path: Path) -> None:
    write_rows(tmp_path)
    token, head = tmp_path / "token", f"127.0.0.1:{free_port()}"
    token.write_text(new_token())
    token.chmod(0o600)
    options = ["--nodes=2", f"--head={head}", f"--token-file={token}", "--nproc=1"]
    launchers = {"pair": {"node-rank": 0, **dict(one.removeprefix("--").split("=", 1) for one in options)}}
    (tmp_path / "launchers.yaml").write_text(json.dumps(launchers))
    with studio_of(tmp_path, "--launchers", str(tmp_path / "launchers.yaml")) as studio:
        assert studio.get("/api/studio/session")["launchers"] == ["pair"]
        text = config("one", "4 steps")
        assert studio.post("start", text=text, launcher="slurm").whats == [
            "this studio has no launcher 'slurm'"
        ]
        assert "--nodes=2" in studio.post("draft", text=text, launcher="pair").json["command"]
        assert studio.post("start", text=text, launcher="pair").status == 200

        def join(*words: str) -> None:
            """The second node, started by hand."""
            typed = [sys.executable, "-m", "unisono", "train", *words, "--node-rank=1", *options]
            command = Loopback().command(1, typed, Own())
            with subprocess.Popen(
                command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as node:
                said = node.communicate(timeout=240)[0]
            assert node.returncode == 0, said

        join("studio/configs/one-1.yaml")
        until(lambda: state_of(studio, "one") == "completed" and studio.row("one")["start"] == "ended")
        assert json.loads((tmp_path / "runs" / "one" / "plan.json").read_text())["world_size"] == 2
        assert studio.post("steer", action="extend", name="one", duration="6 steps").status == 200
        assert "--nodes=2" in studio.audit().splitlines()[-1], "it goes on where it was"
        join("runs/one/config.yaml", "--resume", "duration=6 steps")
        until(lambda: studio.row("one")["start"] == "ended")
        assert steps_of(tmp_path, "one") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "text",
    ["pair: {output_dir: x}", "pair: {resume: 1}", "pair: 3", "pair: {launcher: {a: b}}", "[", "pair: {}"],
)
def test_a_file_of_launchers_has_only_options_that_say_where_ranks_are(tmp_path: Path, text: str) -> None:
    (tmp_path / "launchers.yaml").write_text(text)
    words = ["studio", "--no-open", "--root", str(tmp_path), "--launchers", str(tmp_path / "launchers.yaml")]
    refused = run_front([sys.executable, "-m", "unisono", *words])
    assert refused.returncode == 2
    assert "launchers.yaml" in refused.stderr


@pytest.mark.slow
def test_a_start_that_is_refused_says_why(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with studio_of(tmp_path) as studio:
        studio.post("start", text=config("one", "2 steps"))
        row = until(lambda: (row := studio.row("one")).get("state") == "refused" and row)
        assert row["problems"][0]["what"]["en"]
        assert row["problems"][0]["what"]["zh"] != row["problems"][0]["what"]["en"]


@pytest.mark.slow
def test_an_upload_never_replaces_a_file(tmp_path: Path) -> None:
    with studio_of(tmp_path) as studio:
        headers = {"Authorization": f"Bearer {studio.token}", "Content_Type": "application/octet-stream"}
        paths = [
            studio.send("POST", "/api/studio/uploads?name=a.jsonl", data, **headers).json["path"]
            for data in (b"1", b"2")
        ]
        assert paths == ["studio/uploads/a.jsonl", "studio/uploads/a-2.jsonl"]
        assert [(tmp_path / path).read_text() for path in paths] == ["1", "2"]


def test_the_port_is_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    with studio_of(tmp_path) as studio:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        local = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        mine = [address for address in local if int(address.split(":")[1], 16) == studio.port]
        assert mine == [f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}:{studio.port:04X}"]
