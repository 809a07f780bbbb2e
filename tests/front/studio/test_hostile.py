"""Requests of strangers, of other sites and of hostile texts: none has an effect.

Run: .venv/bin/python -m pytest tests/front/studio/test_hostile.py
"""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.front.studio.studios import TINY, RunningStudio, studio_of, write_rows
from unisono.base.errors import UsageError
from unisono.front.studio.folders import Folders

START = json.dumps({"text": f"{TINY}output_dir: runs/one\n"}).encode()
JSON = {"Content_Type": "application/json"}
ACTIONS = (
    "start", "steer", "load", "unload", "export", "evaluate", "compare", "push", "stop-task", "diagnose", "plan", "preview", "draft"
)  # fmt: skip


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStudio]:
    """A studio whose directory has rows, a run of somebody else and a link that leads out."""
    folder = tmp_path_factory.mktemp("studio")
    root, outside = folder / "root", folder / "outside"
    root.mkdir()
    outside.mkdir()
    write_rows(root)
    write_rows(outside)
    (root / "link").symlink_to(outside)
    hostile = root / "runs" / "theirs"
    hostile.mkdir(parents=True)
    (hostile / "plan.json").write_text('{"schema": 1, "config": {"model": "/etc"}}')
    (hostile / "config.yaml").write_text(
        f"model: {{path: builtin:tiny, trust_remote_code: true}}\ndata: {{train: {outside / 'rows.jsonl'}}}\noutput_dir: {hostile}\n"
    )
    with studio_of(root) as made:
        yield made


def effects(studio: RunningStudio) -> tuple[list[str], str]:
    """Every file below the directory and beside it, and what was logged."""
    folder = studio.root.parent
    files = [str(path) for path in folder.rglob("*") if path.is_file()]
    return sorted(
        one for one in files if "server.lock" not in one and "queue.json" not in one
    ), studio.audit()


def bearer(studio: RunningStudio) -> dict[str, str]:
    return {"Authorization": f"Bearer {studio.token}", **JSON}


def cookie_of(studio: RunningStudio) -> str:
    """The cookie that a browser sends by itself."""
    connection = http.client.HTTPConnection("127.0.0.1", studio.port)
    with contextlib.closing(connection):
        connection.request("GET", f"/?token={studio.token}")
        with connection.getresponse() as answer:
            return str(answer.getheader("Set-Cookie")).partition(";")[0]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_change_needs_the_token_in_a_header(studio: RunningStudio, action: str) -> None:
    before, path = effects(studio), f"/api/studio/{action}"
    assert studio.send("POST", path, START, **JSON).status == 401
    assert studio.send("POST", path, START, Authorization="Bearer wrong", **JSON).status == 401
    assert studio.send("POST", f"{path}?token={studio.token}", START, **JSON).status == 401
    assert studio.send("POST", path, START, Cookie=cookie_of(studio), **JSON).status == 403
    assert effects(studio) == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Host": "evil.example"}, 421), ({"Origin": "http://["}, 400),
        ({"Sec_Fetch_Site": "cross-site"}, 403), ({"Sec_Fetch_Site": "same-site"}, 403), ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415), ({"Content_Type": "multipart/form-data"}, 415), ({"Content_Type": ""}, 415),
    ],
)  # fmt: skip
def test_another_site_changes_nothing(studio: RunningStudio, headers: dict[str, str], status: int) -> None:
    before = effects(studio)
    sent = {**bearer(studio), **headers}
    assert studio.send("POST", "/api/studio/start", START, **sent).status == status
    assert studio.send("POST", "/api/studio/uploads?name=x", b"x", **{**sent, **headers}).status in (
        status,
        415,
    )
    assert effects(studio) == before


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(studio: RunningStudio, method: str) -> None:
    assert studio.send(method, "/api/studio/start", START, **bearer(studio)).status == 405


@pytest.mark.parametrize("action", ACTIONS)
def test_a_get_changes_nothing(studio: RunningStudio, action: str) -> None:
    before = effects(studio)
    assert studio.send("GET", f"/api/studio/{action}", **bearer(studio)).status == 405
    assert effects(studio) == before


@pytest.mark.parametrize(
    "lines",
    [
        "data: {train: /etc/passwd}", "data: {train: ../outside/rows.jsonl}", "data: {train: link/rows.jsonl}", "data: {train: [rows.jsonl, {path: ../outside/rows.jsonl}]}",
        "data: {train: '../outside/*.jsonl'}", "data: {train: 'file:///etc/passwd'}", "data: {train: 'simplecache::file:///etc/passwd'}", "data: {train: rows.jsonl, eval: /etc/passwd}",
        "data: {train: rows.jsonl, template: /etc/passwd}", "model: /etc", "model: {path: builtin:tiny, tokenizer: /etc}", "model: {path: builtin:tiny, trust_remote_code: true}",
        "objective: own.py:Objective", "optim: {kind: own.py:Optimizer}", "adapter: {from: /etc}", "adapter: {merge: [link]}", "output_dir: ../outside/run", "output_dir: /tmp/run", "output_dir: link/run",
        "checkpoint: {storage: /tmp/store}", "checkpoint: {storage: 'file:///tmp/store'}", "output_dir: ~/run",
    ],
)  # fmt: skip
def test_a_config_reads_and_writes_only_below_the_directories(studio: RunningStudio, lines: str) -> None:
    before = effects(studio)
    key = lines.partition(":")[0]
    parts = {
        "model": "model: builtin:tiny",
        "data": "data: {train: rows.jsonl}",
        "output_dir": "output_dir: runs/x",
    }
    text = "\n".join([lines, *(line for name, line in parts.items() if name != key)])
    for action in ("start", "plan", "preview"):
        answer = studio.post(action, text=text)
        assert answer.status == 400, answer
        assert answer.json["problems"], answer
    assert studio.post("draft", text=text).json["problems"], "the form shows it, too"
    assert effects(studio) == before


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("steer", {"action": "resume", "name": "theirs"}), ("steer", {"action": "fresh", "name": "theirs"}), ("steer", {"action": "stop", "name": "theirs"}),
        ("steer", {"action": "extend", "name": "theirs", "duration": "2 steps output_dir=/tmp/x"}), ("steer", {"action": "rm", "name": "theirs"}), ("steer", {"action": "stop", "name": "../../outside"}),
        ("steer", {"action": "cancel", "id": "../x"}), ("steer", {"action": ["stop"], "name": {}}), ("export", {"name": "theirs", "what": "--merge"}),
        ("export", {"name": "nobody", "what": "adapter"}), ("export", {"name": "theirs", "what": "gguf", "quantize": "; rm -rf"}), ("evaluate", {"name": "theirs", "data": "/etc/passwd"}),
        ("evaluate", {"name": "theirs", "data": "link/rows.jsonl"}), ("load", {"name": "nobody"}), ("load", {}), ("start", {}), ("start", {"text": 3}), ("start", {"text": "- a\n- b"}),
        ("start", {"text": "a: &a [*a]"}), ("start", {"text": "[" * 5000}), ("start", {"text": "!!python/object/apply:os.system ['true']"}), ("diagnose", {"text": ""}), ("stop-task", {"id": "1"}),
        ("start", {"text": f"{TINY}output_dir: runs/x\n", "launcher": "slurm"}), ("start", {"text": f"{TINY}output_dir: runs/x\n", "launcher": ["ray"]}),
        ("plan", {"text": f"{TINY}output_dir: runs/x\n", "launcher": "--hosts=evil"}), ("load", {"name": "theirs", "base": True}),
        ("push", {"name": "theirs", "repo": "a/b", "token": "hf_x"}), ("compare", {"sides": [{"name": "theirs", "base": True}], "data": "rows.jsonl"}),
        ("compare", {"sides": [{"name": "theirs"}], "data": "../outside/rows.jsonl"}), ("compare", {"sides": [], "data": "rows.jsonl"}),
    ],
)  # fmt: skip
def test_hostile_bodies_are_refused(studio: RunningStudio, action: str, body: dict[str, Any]) -> None:
    before = effects(studio)
    answer = studio.post(action, **body)
    assert (answer.status, bool(answer.json["problems"])) == (400, True), answer
    assert effects(studio) == before


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b"{", b'{"a":' * 100_000, b"\xff"])
def test_bodies_that_are_not_objects_are_refused(studio: RunningStudio, body: bytes) -> None:
    assert studio.send("POST", "/api/studio/start", body, **bearer(studio)).status == 400


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "%2e%2e%2fx", "a%00b", "a%0ab", "x" * 400, "C:x", "a%5cb"]
)
def test_hostile_names_of_uploads_are_refused(studio: RunningStudio, name: str) -> None:
    before = effects(studio)
    sent = {**bearer(studio), "Content_Type": "application/octet-stream"}
    assert studio.send("POST", f"/api/studio/uploads?name={name}", b"x", **sent).status == 400
    assert effects(studio) == before


@pytest.mark.parametrize("path", ["/etc", "..", "../outside", "link", "/", "%00", "link/..%2f..%2f.."])
def test_only_the_directories_are_listed(studio: RunningStudio, path: str) -> None:
    answer = studio.send("GET", f"/api/studio/files?path={path}", **bearer(studio))
    assert answer.status == 400
    names = [one["name"] for one in studio.get("/api/studio/files?path=")["folders"]]
    assert "link" not in names, "it leads out"


@pytest.mark.parametrize(
    "path",
    ["/api/studio/session", "/api/studio/form", "/api/studio/runs", "/board", "/api/studio/downloads/1"],
)
def test_strangers_read_nothing(studio: RunningStudio, path: str) -> None:
    assert studio.send("GET", path).status == 401
    assert studio.send("GET", path, Cookie=f"unisono-board-{studio.port}=x").status == 401


def test_an_upload_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    async def chunks() -> Any:
        for _ in range(4):
            yield b"x" * 100

    folders = Folders([tmp_path])
    with pytest.raises(UsageError, match="has more than"):
        asyncio.run(folders.take_upload("a.jsonl", chunks(), most=300))
    assert list((tmp_path / "studio" / "uploads").iterdir()) == []
