"""A real sshd on loopback, with keys of its own, for tests that start nodes over ssh."""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.needs import need, program
from tests.ports import free_port

SSHD = program("sshd")
_SSH = program("ssh")  # before a test puts one of its own into PATH
_STARTS_S = 60.0


@contextlib.contextmanager
def ssh_server(folder: Path, *, login: Mapping[str, str] | None = None) -> Iterator[tuple[str, ...]]:
    """An sshd on a free port of 127.0.0.1 and 127.0.0.2; gives the ssh command line that reaches
    it.

    Skips the test where there is none.

    Args:
        folder: for its files.
        login: all variables that a command has there, for one whose processes are to be forked by
            the session's server; None: what sshd gives.
    """
    need("sshd", "ssh", "ssh-keygen")
    assert SSHD is not None
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "authorized").chmod(0o600)
    port = free_port()
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", "ListenAddress 127.0.0.2", f"HostKey {folder / 'host'}", "UsePAM no",
        f"AuthorizedKeysFile {folder / 'authorized'}", f"PidFile {folder / 'pid'}", "StrictModes no",
        "PasswordAuthentication no", "PermitRootLogin prohibit-password",
    ]  # fmt: skip
    if login is not None:
        script = folder / "login"
        groups = ["--groups", ",".join(map(str, os.getgroups()))] if os.getgroups() else ["--clear-groups"]
        regroup = (
            ["setpriv", *groups] if shutil.which("setpriv") else []
        )  # sshd has given it those of the user
        words = shlex.join([*regroup, "env", "-i", *(f"{name}={value}" for name, value in login.items())])
        script.write_text(f'#!/bin/sh\nexec {words} sh -c "$SSH_ORIGINAL_COMMAND"\n')
        script.chmod(0o700)
        lines.append(f"ForceCommand {script}")
    (folder / "config").write_text("\n".join(lines) + "\n")
    with contextlib.suppress(OSError):
        Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=log, start_new_session=True
        )
    options = (
        "ssh", "-p", str(port), "-i", str(folder / "user"), "-o", "StrictHostKeyChecking=no", "-o", "IdentitiesOnly=yes",
        "-o", f"UserKnownHostsFile={folder / 'known'}", "-o", "LogLevel=ERROR", "-F", "none",
    )  # fmt: skip
    try:
        limit = time.monotonic() + _STARTS_S
        while subprocess.run([*options, "127.0.0.1", "true"], check=False, capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > limit:
                pytest.skip(f"needs an sshd that works: {(folder / 'log').read_text()[-300:]}")
            time.sleep(0.1)
        yield options
    finally:
        process.kill()
        process.wait()


def as_program(options: tuple[str, ...], folder: Path) -> Path:
    """A folder for PATH in which `ssh` is that command line, as a user's ~/.ssh/config would have
    it.
    """
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {_SSH} {shlex.join(options[1:])} "$@"\n')
    ssh.chmod(0o755)
    return folder
