"""Every command of the README works after its own lines of installation, in their order.

Run: pytest -m long tests/docs/test_readme_commands.py (downloads torch for the CPU and others)
"""

import os
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAM = """\
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
_ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)\S*")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.long, pytest.mark.network, pytest.mark.timeout(3600)]


def commands() -> list[str]:
    """The lines of the README's shell blocks, without their comments."""
    lines = [
        line for language, body in _BLOCK.findall(README) if language == "bash" for line in body.splitlines()
    ]
    return [re.sub(r"\s+#.*", "", line) for line in lines]


class Reader:
    """Types commands in a shell's folder, in the environment that they have activated so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: list[str] = []

    def start(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["/bin/bash", "-ec", "\n".join([*self.before, f"exec {command}"])],
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "HF_HUB_OFFLINE": "1",
                "LANG": "C.UTF-8",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, command: str, answers: str = "") -> str:
        """What the command shows; it must end with 0."""
        with self.start(command) as process:
            shown, _ = process.communicate(answers)
        assert process.returncode == 0, f"{command}\n{shown}"
        return shown

    def type_in_shell(self, command: str) -> None:
        """A line that changes the shell, such as `cd` or `source`."""
        done = subprocess.run(
            ["/bin/bash", "-ec", "\n".join([*self.before, command])],
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        kept = command.split(" && ")[-1]
        self.before.append(kept)

    def serve(self, command: str, path: str = "") -> None:
        """A server answers at a path, else where it says that its page is, and ends when it is told to."""
        with self.start(command) as process:
            assert process.stdout
            address = next(filter(None, map(_ADDRESS.search, process.stdout)))
            try:
                with urllib.request.urlopen(address[1] + path if path else address[0], timeout=60) as answer:
                    assert answer.status == 200
            finally:
                process.send_signal(signal.SIGTERM)
            shown = process.stdout.read()
        assert process.returncode == 0, shown


def test_every_command_works_after_the_lines_of_installation(tmp_path: Path) -> None:
    """In an empty folder, as the README is read from its beginning to its end."""
    clone = tmp_path / "clone"
    subprocess.run(["/usr/bin/git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    reader = Reader(tmp_path)
    first, environment, install, *others = commands()
    assert first == "git clone <this repository> unisono && cd unisono"
    reader.type_in_shell(first.replace("<this repository>", str(clone)))
    reader.type_in_shell(environment)
    reader.type(install)

    project = tmp_path / "unisono"
    (config,) = [body for language, body in _BLOCK.findall(README) if language == "yaml"]
    (project / "first.yaml").write_text(config)
    (project / "train.py").write_text(PROGRAM)
    (project / "train.log").write_text(LOG)
    (answer,) = [body for language, body in _BLOCK.findall(README) if language == "text"]
    for command in others:
        words = command.split()
        if words[1] == "generate":
            assert reader.type(command).splitlines()[-1] == answer.strip()
        elif words[1] == "chat":
            assert answer.strip() in reader.type(command, "timer fifty minutes\n/quit\n")
        elif words[1] == "serve":
            reader.serve(command, "/v1/models")
        elif words[1] in ("board", "studio"):
            reader.serve(command)
        elif words[1] == "diagnose":
            assert "[cuda_oom]" in reader.type(command)
        else:
            reader.type(command)
    assert (project / "first-gguf").exists()
    assert shutil.which("unisono", path=str(project / ".venv" / "bin"))
