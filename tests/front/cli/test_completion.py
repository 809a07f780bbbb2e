"""The Tab key in real shells, and the words that are offered.

Run: pytest tests/front/cli/test_completion.py
"""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.needs import need
from unisono.front.cli.completion import shown, split, words_for

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(unisono completion bash)"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -D -u; source <(unisono completion zsh)"),
    "fish": (["fish", "--no-config", "-i"], "unisono completion fish | source"),
}
TYPED = [
    ("unisono trai", "unisono train"),
    ("unisono checkpoint ver", "unisono checkpoint verify"),
    ("unisono train x.yaml optim.weight_d", "unisono train x.yaml optim.weight_decay="),
    ("unisono train x.yaml objective=pret", "unisono train x.yaml objective=pretrain"),
    ("unisono train x.yaml --launcher sl", "unisono train x.yaml --launcher slurm"),
    ("unisono train my", "unisono train my-config.yaml"),
    ("unisono logs runs/de", "unisono logs runs/demo"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config and a run."""
    (tmp_path / "my-config.yaml").write_text("model: builtin:tiny\n")
    (tmp_path / "my-notes.txt").write_text("no config\n")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[int]:
    """A shell that runs in a terminal of its own; gives the other end."""
    env = {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "xterm", "LANG": "C.UTF-8"}  # fmt: skip
    near, far = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=far, stdout=far, stderr=far, cwd=folder, env=env
    )
    os.close(far)
    try:
        yield near
    finally:
        process.kill()
        process.wait()
        os.close(near)


def wait_for(file: Path, near: int) -> str:
    """The content of a file that a shell writes whole; what it prints meanwhile is read away."""
    printed, end = b"", time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, printed.decode(errors="replace")
        if select.select([near], [], [], 0.05)[0]:
            printed += os.read(near, 4096)
    return file.read_text()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes_in_a_real_shell(shell: str, folder: Path) -> None:
    need(shell, "setsid")
    say = folder / "say"
    say.write_text('#!/bin/sh\nprintf "%s" "$*" > "$HOME/part" && mv "$HOME/part" "$HOME/said"\n')
    say.chmod(0o755)
    command, load = SHELLS[shell]
    with terminal(command, folder) as near:
        os.write(near, f"{load}; say ready\r".encode())
        assert wait_for(folder / "said", near) == "ready"
        for typed, want in TYPED:
            (folder / "said").unlink()
            os.write(near, f"{typed}\t\x01say \r".encode())  # Tab; then, at the start of the line: say
            assert wait_for(folder / "said", near).rstrip(" /") == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("unisono checkpoint ", ["export", "verify", "ls", "prune"]),
        ("unisono --json expl", ["explain"]),
        ("unisono train my", ["my-config.yaml"]),
        ("unisono train x.yaml optim.l", ["optim.lr=", "optim.lora_b_ratio=", "optim.label_smoothing=", "optim.loss_weight="]),
        ("unisono train x.yaml op", ["optim."]),
        ("unisono train x.yaml nonsense.l", []),
        ("unisono train x.yaml data.packing=", ["data.packing=true", "data.packing=false"]),
        ("unisono train x.yaml output_dir=ru", ["output_dir=runs/"]),
        ("unisono train x.yaml --fr", ["--fresh"]),
        ("unisono train x.yaml --no-reh", []),
        ("unisono train x.yaml --js", ["--json"]),
        ("unisono train x.yaml --launcher=s", ["--launcher=slurm"]),
        ("unisono train --nproc 2 my", ["my-config.yaml"]),
        ("unisono train --nproc ", []),
        ("unisono logs ", ["runs/demo"]),
        ("unisono chat runs/d", ["runs/demo"]),
        ("unisono explain nan_l", ["nan_loss"]),
        ("unisono drill sigk", ["sigkill"]),
        ("unisono init pre", ["pretrain"]),
        ("unisono run -- my-n", ["my-notes.txt"]),
        ("unisono nonsense x", []),
        ("", ["train"]),
    ],
)  # fmt: skip
def test_what_is_offered(line: str, want: list[str], folder: Path) -> None:
    found = [word for word, _ in words_for(line)]
    assert found == want if line.strip() not in ("", "unisono logs") else set(want) <= set(found)


def test_bash_gets_what_follows_its_word_breaks() -> None:
    found = [("objective=dpo", "")]
    line = "unisono train x.yaml objective=d"
    assert list(shown(found, line, shell="bash", breaks=" =:")) == [("dpo", "")]
    assert list(shown(found, line, shell="bash", breaks=" ")) == found
    assert list(shown(found, line, shell="fish", breaks="=")) == found


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("unisono train 'a b", (["train"], "a b")),
        ('unisono train "a b" ', (["train", "a b"], "")),
        ("unisono train a\\ b", (["train"], "a b")),
        ("unisono train a\\", (["train"], "a")),
        ("unisono", ([], "")),
    ],
)
def test_a_command_line_is_split_as_a_shell_does(line: str, want: tuple[list[str], str]) -> None:
    assert split(line) == want


def test_an_unknown_shell_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "completion", "tcsh"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash, zsh, fish" in done.stderr
