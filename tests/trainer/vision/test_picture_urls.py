"""Pictures that rows name by URL are fetched once, before training, from named hosts.

Run: pytest tests/trainer/vision/test_picture_urls.py
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainer.vision.broken import PNG
from tests.trainer.vision.conftest import Gallery
from unisono.base.errors import DataError
from unisono.trainer.config.data_sections import DataSection
from unisono.trainer.data.pictures import kept_bytes
from unisono.trainer.data.pictures.store import read_pictures

pytestmark = pytest.mark.processes  # pictures are decoded in them


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[str] = []
        self.released = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        port = self.server.server_address[1]
        moved = {
            "/moved": "/red.png",
            "/away": f"http://localhost:{port}/red.png",
            "/file": "file:///etc/passwd",
        }
        if self.path in moved:
            self.send_response(302)
            self.send_header("location", moved[self.path])
            self.end_headers()
        elif self.path == "/never":
            self.server.released.wait()
        elif self.path == "/missing.png":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html></html>" if self.path == "/page" else PNG)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def _rows(folder: Path, *urls: str) -> str:
    file = folder / "rows.jsonl"
    turns = [
        {"role": "user", "content": "<image>what is this?"},
        {"role": "assistant", "content": "a square"},
    ]
    file.write_text("".join(f"{json.dumps({'messages': turns, 'images': [url]})}\n" for url in urls))
    return str(file)


def _sections(file: str, hosts: list[str], **data: Any) -> dict[str, Any]:
    data |= {"train": file, "image_hosts": hosts}
    return {"data": data, "duration": "1 steps", "batch": {"global": 1, "micro": 1}}


def _why(gallery: Gallery, folder: Path, url: str, hosts: list[str]) -> str:
    with pytest.raises(DataError) as caught:
        gallery.plan("llava", **_sections(_rows(folder, url), hosts))
    (problem,) = caught.value.problems
    return f"{problem.where}: {problem.why}; {problem.fix}"


def test_a_picture_is_fetched_once_for_all_rows_and_runs_and_never_by_training(
    gallery: Gallery, tmp_path: Path, server: _Server
) -> None:
    url = f"http://{server.host}/red.png"
    file = _rows(tmp_path, url, url, f"http://{server.host}/moved")

    plan = gallery.plan("llava", **_sections(file, [server.host]))
    (picture,) = read_pictures(Path(plan.data.cache_dir))
    assert Path(picture.file).read_bytes() == PNG
    assert sorted(server.asked) == ["/moved", "/red.png", "/red.png"]  # one of them redirected

    server.shutdown()
    gallery.alone(plan)
    again = gallery.plan("llava", **_sections(file, [server.host], max_length=200))
    assert again.data.ledger["pictures"] == 3
    assert len(server.asked) == 3


def test_each_failing_url_is_a_bad_row_with_its_line_and_the_reason(
    gallery: Gallery, tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_bytes, "DEADLINE_S", 0.5)
    reasons = {
        "/missing.png": "answers with status 404",
        "/page": "it is an HTML page",
        "/file": "it redirects to a file URL",
        "/away": "localhost:PORT is not among the hosts of data.image_hosts",
        "/never": "it could not be fetched within 0.5 s",
        "/red.png?x=1": "",
    }
    file = _rows(tmp_path, *(f"http://{server.host}{path}" for path in reasons))

    plan = gallery.plan("llava", **_sections(file, [server.host], on_bad_row="skip"))

    notes = json.loads((Path(plan.output_dir) / "data.json").read_text())
    said = {note["line"]: note["why"] for note in notes["rows"]}
    port = server.host.partition(":")[2]
    for line, (path, why) in enumerate(reasons.items(), 1):
        assert (line in said) == bool(why), path
        if why:
            assert why.replace("PORT", port) in said[line]
            assert f"http://{server.host}{path}" in said[line]
    assert notes["total"]["pictures"]["broken"] == 5

    before = server.asked.count("/page")
    gallery.plan("llava", **_sections(file, [server.host], on_bad_row="skip", max_length=200))
    assert server.asked.count("/page") == before + 1, "an error page is not kept"
    assert server.asked.count("/red.png?x=1") == 1


def test_redirects_between_named_hosts_are_followed(
    gallery: Gallery, tmp_path: Path, server: _Server
) -> None:
    port = server.server_address[1]
    hosts = [server.host, f"localhost:{port}", f"[::1]:{port}"]

    plan = gallery.plan("llava", **_sections(_rows(tmp_path, f"http://{server.host}/away"), hosts))

    assert plan.data.ledger["pictures"] == 1


def test_hosts_that_are_not_named_and_names_of_private_addresses_are_not_asked(
    gallery: Gallery, tmp_path: Path, server: _Server
) -> None:
    url, port = f"http://{server.host}/red.png", server.server_address[1]

    why = _why(gallery, tmp_path, url, [])
    assert "rows.jsonl:1: " in why
    assert f"{server.host} is not among the hosts of data.image_hosts" in why
    assert "add its host to data.image_hosts" in why
    assert "which is not public" in _why(
        gallery, tmp_path, f"http://localhost:{port}/red.png", [f"localhost:{port}"]
    )
    with_user = f"http://me:secret@{server.host}/red.png"
    assert "a user or a password is refused" in _why(gallery, tmp_path, with_user, [server.host])
    assert "secret" not in _why(gallery, tmp_path, with_user, [server.host])
    assert "not http or https" in _why(gallery, tmp_path, "s3://bucket/a.png", [server.host])
    assert not server.asked


def test_a_picture_with_too_many_bytes_is_refused(
    gallery: Gallery, tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_bytes, "MOST_BYTES", 100)

    assert "it has more than" in _why(gallery, tmp_path, f"http://{server.host}/red.png", [server.host])


def test_a_host_that_is_silent_is_not_asked_for_ever(
    gallery: Gallery, tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_bytes, "DEADLINE_S", 0.05)
    monkeypatch.setattr(kept_bytes, "_SILENT", 4)
    monkeypatch.setattr(kept_bytes, "_AT_ONCE", 2)
    urls = [f"http://{server.host}/red.png", *(f"http://{server.host}/never?{i}" for i in range(20))]
    monkeypatch.setattr(_Answers, "do_GET", lambda answers: answers.server.released.wait())

    with pytest.raises(DataError) as caught:
        gallery.plan("llava", **_sections(_rows(tmp_path, *urls), [server.host]))

    reasons = [problem.why for problem in caught.value.problems if problem.where]
    assert sum("4 other pictures" in why for why in reasons) >= 10


def test_what_is_not_a_host_is_refused() -> None:
    with pytest.raises(ValidationError, match="is not a host"):
        DataSection.model_validate({"train": "a.jsonl", "image_hosts": ["http://pictures.example.org"]})
