"""A hub that takes connections and says nothing: asked once, and what is in the cache is used. A real socket, the real client."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_LOCATE = """
import sys
from unisono.errors import UnisonoError
from unisono.model.directory import locate_model
try:
    print(locate_model("nobody/thing"))
except UnisonoError as error:
    print(*error.problems, sep="\\n")
"""
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def located(cache: Path, endpoint: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _LOCATE],
        env={**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **env},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return done.stdout


def cached(cache: Path) -> Path:
    folder = cache / "models--nobody--thing"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(_COMMIT)
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_hub_that_is_silent_is_named_and_not_waited_for(tmp_path: Path, silent: str) -> None:
    printed = located(tmp_path, silent)  # its own client would try for minutes: the time-out here is the test
    assert "neither a directory on this machine nor available from the hub" in printed
    assert f"{silent} does not answer" in printed
    assert "HF_ENDPOINT" in printed


def test_what_was_downloaded_is_used_where_the_hub_is_silent(tmp_path: Path, silent: str) -> None:
    snapshot = cached(tmp_path)
    assert located(tmp_path, silent).strip() == str(snapshot)


def test_the_variable_that_forbids_to_ask_is_named(tmp_path: Path, silent: str) -> None:
    assert "HF_HUB_OFFLINE turns access to the hub off" in located(tmp_path, silent, HF_HUB_OFFLINE="1")
