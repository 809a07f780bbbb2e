"""Run a program that fails, and keep what it printed as a case.

A case is a line of JSON: `files` (name -> text), `class` (cause), `culprit_rank`, `culprit_host`,
what must be
cited and what the remedy must name.  Paths, hosts and users become neutral ones before anything is
kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
LONGEST_BYTES = 20_000
# What a remedy has to name, by cause; `a|b` is either.
REMEDY = json.loads((HERE / "remedies.json").read_text())
# Homes that the logs are moved to: (python's lib folder, the program's folder, host)
PLACES = [
    ("/home/ubuntu/.venv/lib/python3.11", "/home/ubuntu/finetune", "gpu-node-07"),
    ("/opt/conda/envs/llm/lib/python3.11", "/workspace/sft", "trainer-0"),
    ("/home/mila/miniconda3/envs/ft/lib/python3.11", "/scratch/mila/ft", "cn-a004"),
    ("/usr/local/lib/python3.11", "/app", "worker-3"),
    ("/data/envs/train/lib/python3.11", "/data/code/posttrain", "ip-10-4-1-17"),
]

Files = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Want:
    """What a diagnosis has to say."""

    cause: str
    rank: int | None = None
    host: str | None = None
    evidence: str = ""
    also: tuple[str, ...] = ()
    fix: tuple[str, ...] | None = None


def case(name: str, want: Want, files: Mapping[str, str], source: str) -> dict[str, object]:
    """A case in the format of the case files; raises ValueError where it contradicts itself."""
    if want.evidence and not any(want.evidence in text for text in files.values()):
        raise ValueError(f"{name}: nothing says {want.evidence!r}")
    size = sum(len(text) for text in files.values())
    if size > LONGEST_BYTES:
        raise ValueError(f"{name}: {size} characters")
    fix = list(want.fix) if want.fix is not None else REMEDY.get(want.cause, [])
    return {
        "id": name,
        "files": dict(files),
        "class": want.cause,
        "also_accept": list(want.also),
        "culprit_rank": want.rank,
        "culprit_host": want.host,
        "evidence_substring": want.evidence,
        "fix_must_mention": fix,
        "source": source,
    }


def neutral(text: str, place: int, work: Path, program: str) -> str:
    """The text with other paths and hosts."""
    lib, code, host = PLACES[place % len(PLACES)]
    home = lib.rsplit("/lib/", 1)[0]
    venv = Path(sys.prefix)
    text = text.replace(str(venv / "lib/python3.11"), lib).replace(str(venv), home)
    text = re.sub(r"/[^\s\"']*/\.pyenv/versions/[^/\s]+", "/usr", text)
    text = text.replace(str(PROGRAMS), code).replace(str(work), code)
    if os.uname().nodename != "localhost":
        text = text.replace(os.uname().nodename, host)
    text = text.replace(f"{Path.home()}/", "/home/ubuntu/")
    text = re.sub(r"(host +: )localhost", rf"\1{host}", text)
    text = re.sub(r"/[\w/.-]*/\.\./\w+/bin/", f"{home}/bin/", text)  # as it was started
    return text.replace("pretrain.py", program)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """A small, known environment."""
    keep = {k: os.environ[k] for k in ("HOME", "LANG", "TERM") if k in os.environ}
    path = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    base = {"PATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return (
        keep
        | base
        | {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
        | dict(more)
    )


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    work: Path,
    limit_s: float = 90,
    during: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> str:
    """What the command printed on both of its outputs, in the order in which it came; its group is
    ended after `limit_s`.
    """
    work.mkdir(parents=True, exist_ok=True)
    out = work / "stdout"
    with out.open("wb") as sink:
        child = subprocess.Popen(
            argv,
            cwd=work,
            env=environment(env),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if during:
            during(child)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return out.read_text(errors="replace")


def when(file: Path, words: str, limit_s: float = 60) -> None:
    """Wait until a file holds these words."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if file.exists() and words in file.read_text(errors="replace"):
            return
        time.sleep(0.05)


def squeeze(text: str, most: int = LONGEST_BYTES) -> str:
    """A text that is too long keeps its head and its tail, cut at line ends."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[-most // 2 :]
    return head[: head.rfind("\n") + 1] + tail[tail.find("\n") + 1 :]
