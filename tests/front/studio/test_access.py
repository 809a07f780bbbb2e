"""Where browsers reach the server: loopback, or a line that is encrypted.

Run: .venv/bin/python -m pytest tests/front/studio/test_access.py
"""

import http.client
import json
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.front.studio.studios import studio_of
from tests.front_server import run as run_front
from tests.needs import need


def refusal(root: Path, *options: str) -> str:
    """What a server says that is not started."""
    words = [sys.executable, "-m", "unisono", "studio", "--no-open", "--root", str(root), *options]
    refused = run_front(words)
    assert refused.returncode == 2, refused
    return str(refused.stderr)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2", "::"])
def test_an_address_of_others_needs_encryption(tmp_path: Path, host: str) -> None:
    assert "would not be encrypted" in refusal(tmp_path, "--host", host)


@pytest.mark.parametrize(
    "url",
    [
        "http://studio.example.org",
        "studio.example.org",
        "https://",
        "https://a b",
        "https://a/b",
        "https://u:p@a",
    ],
)
def test_a_proxy_has_the_address_of_a_server_with_tls(tmp_path: Path, url: str) -> None:
    assert "is not the address of a proxy" in refusal(tmp_path, "--proxy", url)


def test_files_that_are_not_a_certificate_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    cert = str(tmp_path / "cert.pem")
    assert "cannot be used" in refusal(tmp_path, "--tls-cert", cert)
    assert "is not a file" in refusal(tmp_path, "--tls-cert", str(tmp_path / "none.pem"))
    assert "has no certificate" in refusal(tmp_path, "--tls-key", cert)


@pytest.mark.slow
def test_with_a_certificate_the_line_is_encrypted(tmp_path: Path) -> None:
    need("openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.2",
    ]
    words += ["-addext", "subjectAltName=IP:127.0.0.2", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(words, check=True, capture_output=True)
    root = tmp_path / "root"
    root.mkdir()
    options = ["--host", "127.0.0.2", "--tls-cert", str(cert), "--tls-key", str(key)]
    with studio_of(root, *options) as studio:
        assert studio.url.startswith(f"https://127.0.0.2:{studio.port}/?token=")
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.2", studio.port, timeout=60, context=context)
        connection.request("GET", f"/?token={studio.token}")
        answer = connection.getresponse()
        cookie = str(answer.getheader("Set-Cookie"))
        assert (answer.status, "Secure" in cookie) == (200, True)
        answer.read()
        origin = f"https://127.0.0.2:{studio.port}"
        headers = {
            "Authorization": f"Bearer {studio.token}",
            "Content-Type": "application/json",
            "Origin": origin,
        }
        connection.request("POST", "/api/studio/draft", json.dumps({"text": "seed: 3\n"}), headers)
        assert connection.getresponse().status == 200
        connection.close()
        plain = http.client.HTTPConnection("127.0.0.2", studio.port, timeout=60)
        plain.request("GET", f"/?token={studio.token}")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        plain.close()


@pytest.mark.slow
def test_behind_a_proxy_it_answers_to_that_name(tmp_path: Path) -> None:
    with studio_of(tmp_path, "--proxy", "https://studio.example.org") as studio:
        assert studio.url.startswith("https://studio.example.org/?token=")
        sent = {"Authorization": f"Bearer {studio.token}", "Content_Type": "application/json"}
        here = {"Host": "studio.example.org", "Origin": "https://studio.example.org"}
        body = json.dumps({"text": "seed: 3\n"}).encode()
        assert studio.send("POST", "/api/studio/draft", body, **sent, **here).status == 200
        there = {"Host": "studio.example.org", "Origin": "https://evil.example"}
        assert studio.send("POST", "/api/studio/draft", body, **sent, **there).status == 403
        assert studio.send("POST", "/api/studio/draft", body, **sent, Host="evil.example").status == 421
