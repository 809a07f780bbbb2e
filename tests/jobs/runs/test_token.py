"""The job's secret comes from a private file, stdin or the environment, and shows nowhere.

Run: pytest tests/jobs/runs/test_token.py
"""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unisono.base.errors import UsageError
from unisono.guard.rendezvous.party import HOW_TO_MAKE_ONE, make_token, read_token, watch_lifeline

SECRET = "a-secret-of-more-than-16-bytes"


def private(path: Path, text: str = SECRET + "\n", mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_one_node_needs_none() -> None:
    assert read_token(None, None, nodes=1) is None
    assert read_token(None, SECRET, nodes=1) is None


def test_several_nodes_without_one_are_reported_how_to_make_it() -> None:
    with pytest.raises(UsageError) as caught:
        read_token(None, None, nodes=3)
    assert caught.value.exit_code == 2
    text = "\n".join(caught.value.lines())
    assert HOW_TO_MAKE_ONE in text
    assert "--token-file ~/.unisono-token" in text


def test_the_line_that_makes_one_works_as_it_is_printed(tmp_path: Path) -> None:
    subprocess.run(["sh", "-c", HOW_TO_MAKE_ONE], check=True, env={**os.environ, "HOME": str(tmp_path)})
    made = tmp_path / ".unisono-token"
    assert made.stat().st_mode & 0o777 == 0o600
    token = read_token(str(made), None, nodes=2)
    assert token is not None
    assert len(token.secret) >= 32


def test_the_file_beats_the_environment(tmp_path: Path) -> None:
    token = read_token(private(tmp_path / "token"), "another-secret-of-16-bytes", nodes=2)
    assert token is not None
    assert token.secret == SECRET.encode()
    from_environment = read_token(None, SECRET, nodes=2)
    assert from_environment is not None
    assert (from_environment.secret, from_environment.origin) == (SECRET.encode(), "UNISONO_TOKEN")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_file_open_to_others_is_refused_with_the_command_that_fixes_it(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "token", mode=mode)
    with pytest.raises(UsageError) as caught:
        read_token(path, None, nodes=2)
    assert f"chmod 600 {path}" in "\n".join(caught.value.lines())


@pytest.mark.parametrize("text", ["", "\n", "short\n", "x" * 15 + "\n", "x" * 5_000 + "\n"])
def test_what_can_be_guessed_or_is_not_a_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_token(private(tmp_path / "token", text), None, nodes=2)
    assert "short\n" not in str(caught.value)
    assert "xxxxx" not in "\n".join(caught.value.lines())


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError):
            read_token(str(path), None, nodes=2)


def test_a_token_does_not_show_in_what_is_printed() -> None:
    token = read_token(None, SECRET, nodes=2)
    assert SECRET not in f"{token!r} {token}"
    assert len(make_token().secret) > 32
    assert make_token().secret != make_token().secret


def test_the_first_line_of_stdin_is_the_token_and_its_end_is_the_end() -> None:
    read_end, write_end = os.pipe()
    ended = threading.Event()
    with os.fdopen(read_end, "rb") as stdin:
        os.write(write_end, SECRET.encode() + b"\n")
        token = read_token("-", None, nodes=2, stdin=stdin)
        assert token is not None
        assert (token.secret, token.from_stdin) == (SECRET.encode(), True)
        watch_lifeline(ended.set, stdin=stdin)
        os.write(write_end, b"more\n")
        assert not ended.wait(0.2)
        os.close(write_end)
        assert ended.wait(10)


def test_an_empty_stdin_is_refused() -> None:
    with pytest.raises(UsageError, match="stdin is empty"):
        read_token("-", None, nodes=2, stdin=io.BytesIO())


_ENDS_BY_ITSELF = """
import sys, threading
from unisono.guard.rendezvous.party import read_token, watch_lifeline
read_token("-", None, nodes=2)
watch_lifeline()
watching = next(thread for thread in threading.enumerate() if thread.name == "lifeline")
while not open(f"/proc/self/task/{watching.native_id}/syscall").read().startswith("0 0x0 "):
    pass  # it does not read yet
sys.exit(3)
"""


def test_front_that_ends_with_an_open_lifeline_has_its_own_exit_code() -> None:
    """Python aborts (SIGABRT) where a thread still holds the lock of sys.stdin's buffer."""
    with subprocess.Popen([sys.executable, "-c", _ENDS_BY_ITSELF], stdin=subprocess.PIPE) as front:
        assert front.stdin is not None
        front.stdin.write(b"a-secret-of-more-than-sixteen-bytes\n")
        front.stdin.flush()
        assert front.wait(60) == 3
