"""Pictures that are fetched from allowed hosts, and read from allowed folders.

Run: pytest tests/front/serve/test_picture_addresses.py
"""

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from unisono.base.errors import UsageError
from unisono.front.serve import picture_addresses
from unisono.front.serve.picture_addresses import PictureAddresses
from unisono.front.serve.protocol import ApiError

BYTES = b"the bytes of a picture"


class _Host(BaseHTTPRequestHandler):
    released = threading.Event()

    def do_GET(self) -> None:
        port = self.connection.getsockname()[1]
        to = {
            "/moved": "/a.png",
            "/away": f"http://localhost:{port}/a.png",
            "/file": "file:///etc/passwd",
            "/circle": "/circle",
        }
        if self.path in to:
            self.send_response(302)
            self.send_header("location", to[self.path])
            self.end_headers()
        elif self.path == "/never":
            self.released.wait()
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BYTES * (10 if self.path == "/large" else 1))

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def host() -> Iterator[int]:
    """The port of a server on 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Host)
    _Host.released.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    _Host.released.set()
    server.shutdown()
    server.server_close()


def fetched(addresses: PictureAddresses, url: str) -> bytes:
    part = {"type": "image_url", "image_url": {"url": url}}
    asyncio.run(addresses.fill([part]))
    return base64.b64decode(part["image_url"]["url"].partition(";base64,")[2])  # type: ignore[index]


def why(addresses: PictureAddresses, url: str) -> str:
    with pytest.raises(ApiError) as caught:
        fetched(addresses, url)
    assert caught.value.status == 400
    return caught.value.message


def test_pictures_of_named_hosts_are_fetched_and_redirects_to_others_are_not_followed(host: int) -> None:
    named = PictureAddresses.of(f"127.0.0.1:{host},localhost:{host}", None)

    assert fetched(named, f"http://127.0.0.1:{host}/a.png?x=1") == BYTES
    assert fetched(named, f"http://127.0.0.1:{host}/moved") == BYTES
    assert "redirects to localhost, another host" in why(named, f"http://127.0.0.1:{host}/away")
    assert "redirects to a file URL" in why(named, f"http://127.0.0.1:{host}/file")
    assert "redirects more than 3 times" in why(named, f"http://127.0.0.1:{host}/circle")
    assert "status 404" in why(named, f"http://127.0.0.1:{host}/missing")


def test_hosts_ports_and_users_that_are_not_named_are_refused(host: int) -> None:
    named = PictureAddresses.of("127.0.0.1", None)

    assert f"127.0.0.1:{host} is not among the hosts" in why(named, f"http://127.0.0.1:{host}/a.png")
    assert "localhost is not among the hosts" in why(named, "http://localhost/a.png")
    assert "a user or a password" in why(named, "http://me:secret@127.0.0.1/a.png")
    assert "--image-hosts allows them" in why(PictureAddresses(), "http://127.0.0.1/a.png")


def test_a_name_whose_address_is_private_is_refused_unless_the_address_is_named_too(host: int) -> None:
    url = f"http://localhost:{host}/a.png"

    assert "which is not public" in why(PictureAddresses.of(f"localhost:{host}", None), url)
    both = PictureAddresses.of(f"localhost:{host},127.0.0.1:{host},[::1]:{host}", None)
    assert fetched(both, url) == BYTES


def test_a_picture_that_is_too_large_or_too_slow_is_refused(
    host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = PictureAddresses.of(f"127.0.0.1:{host}", None)
    monkeypatch.setattr(picture_addresses, "MOST_BYTES", 100)
    monkeypatch.setattr(picture_addresses, "DEADLINE_S", 0.3)

    assert "have more than" in why(named, f"http://127.0.0.1:{host}/large")
    assert "within 0.3 s" in why(named, f"http://127.0.0.1:{host}/never")


def test_only_files_inside_of_named_folders_are_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a picture.png").write_bytes(BYTES)
    (inside / "link.png").symlink_to(outside / "a picture.png")
    named = PictureAddresses.of(None, str(inside))

    assert fetched(named, f"file://{inside}/a%20picture.png") == BYTES
    for odd in (
        f"{outside}/a%20picture.png", f"{inside}/../outside/a%20picture.png", f"{inside}/link.png",
        f"{inside}/none.png", f"{inside}", "/dev/zero",
    ):  # fmt: skip
        assert "no such file in the folders" in why(named, f"file://{odd}")
    assert "has no host" in why(named, f"file://elsewhere{inside}/a%20picture.png")
    assert "--image-folders allows them" in why(PictureAddresses(), f"file://{inside}/a%20picture.png")


def test_flags_that_name_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        PictureAddresses.of("http://a.example", None)
    with pytest.raises(UsageError, match="is not a directory"):
        PictureAddresses.of(None, str(tmp_path / "none"))
