"""A hub that takes connections and says nothing: asked once, and what is in the cache is used.

A real socket, the real client.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.hub.standin import Repo, running_hub

_LOCATE = """
import sys
from unisono.base.errors import UnisonoError
from unisono.trainer.model.directory import locate_model
try:
    print(locate_model("nobody/thing", *sys.argv[1:]))
except UnisonoError as error:
    print(*error.problems, sep="\\n")
"""
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def located(cache: Path, endpoint: str, *revision: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _LOCATE, *revision],
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


@pytest.mark.parametrize(
    ("described", "headers"),
    [({"sha": "../../../x"}, {}), ({}, {"ETag": '"../../../x"'})],
    ids=["sha", "etag"],
)
def test_a_hub_that_gives_a_path_out_of_the_cache_is_refused(
    described: dict[str, str], headers: dict[str, str], tmp_path: Path
) -> None:
    with running_hub() as hub:
        hub.repos["nobody/thing"] = Repo()
        hub.repos["nobody/thing"].commit({"config.json": b"{}"})
        hub.described, hub.headers = described, headers
        printed = located(tmp_path / "cache/hub", hub.url, HF_HUB_DISABLE_XET="1")
    assert "the hub gives a name that cannot be a file in the cache" in printed
    assert "'../../../x' is not a relative path" in printed
    assert not list(tmp_path.rglob("x*"))


def test_a_revision_that_is_a_path_out_of_the_cache_is_refused(tmp_path: Path, silent: str) -> None:
    printed = located(tmp_path / "hub", silent, "../../x", HF_HUB_OFFLINE="1")
    assert "nobody/thing has no revision '../../x'" in printed
