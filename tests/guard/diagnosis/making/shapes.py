"""The same logs as other tools hand them on: prefixes, colours, cuts, pieces on one line; derived
from real cases.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable

Case = dict[str, object]
Change = Callable[[dict[str, str], random.Random], dict[str, str] | None]


def kubectl(files: dict[str, str], r: random.Random) -> dict[str, str]:
    """Time stamps and streams as container runtimes write them."""
    return {
        n: "".join(
            f"2025-09-14T07:{20 + i // 60 % 40:02d}:{i % 60:02d}.{r.randrange(10**9):09d}Z"
            f" {'stderr' if 'rank' in x else 'stdout'} F {x}\n"
            for i, x in enumerate(t.splitlines())
        )
        for n, t in files.items()
    }


def compose(files: dict[str, str], r: random.Random) -> dict[str, str]:
    """All files in one, each line after its service's name."""
    rows = [
        [f"\x1b[3{2 + k}mtrainer-{k}  |\x1b[0m {x}" for x in t.splitlines()]
        for k, t in enumerate(files.values())
    ]
    return {"compose.log": "\n".join(shuffled(rows, r)) + "\n"}


def shuffled(rows: list[list[str]], r: random.Random) -> list[str]:
    """Lines of several writers, each writer's in its own order."""
    rows, out = [list(x) for x in rows if x], []
    while rows:
        source = r.choice(rows)
        some = r.randrange(1, 4)
        out += source[:some]
        del source[:some]
        rows = [x for x in rows if x]
    return out


def one_file(files: dict[str, str], r: random.Random) -> dict[str, str] | None:
    """A file per rank becomes one, as `srun -l` mixes them."""
    named = [(re.search(r"(\d+)\D*$", n.rsplit(".", 1)[0]), t) for n, t in files.items()]
    if len(files) < 2 or not all(m for m, _ in named):
        return None
    return {
        "slurm-51233.out": (
            "\n".join(
                shuffled([[f"{int(m.group(1))}: {x}" for x in t.splitlines()] for m, t in named if m], r)
            )
            + "\n"
        )
    }


def mpirun(files: dict[str, str], r: random.Random) -> dict[str, str] | None:
    """A file per rank becomes one, as `mpirun --tag-output` mixes them."""
    named = [(re.search(r"rank\D?(\d+)", n), t) for n, t in files.items()]
    if len(files) < 2 or not all(m for m, _ in named):
        return None
    return {
        "mpi.log": (
            "\n".join(
                shuffled(
                    [[f"[1,{int(m.group(1))}]<stderr>:{x}" for x in t.splitlines()] for m, t in named if m], r
                )
            )
            + "\n"
        )
    }


def crlf(files: dict[str, str], r: random.Random) -> dict[str, str]:
    """As a Windows terminal saves it."""
    return {n: "\ufeff" + t.replace("\r", "").replace("\n", "\r\n") for n, t in files.items()}


def indented(files: dict[str, str], r: random.Random) -> dict[str, str]:
    """Copied into an issue."""
    return {n: "```\n" + "".join(f"> {x}\n" for x in t.splitlines()) + "```\n" for n, t in files.items()}


def tail(files: dict[str, str], r: random.Random) -> dict[str, str]:
    """Without the beginning."""
    return {n: "\n".join(t.split("\n")[len(t.split("\n")) // 4 :]) for n, t in files.items()}


def warned(files: dict[str, str], r: random.Random) -> dict[str, str]:
    """With warnings that mean nothing, before and after."""
    noise = [
        (
            "/usr/lib/python3/dist-packages/requests/__init__.py:87: RequestsDependencyWarning: urllib3"
            " (2.2.1) or chardet (4.0.0) doesn't match a supported version!"
        ),
        (
            "2025-09-14 07:20:11.118 E tensorflow: Unable to register cuDNN factory: Attempting to register"
            " factory for plugin cuDNN when one has already been registered"
        ),
        (
            "[W socket.cpp:697] [c10d] The client socket has failed to connect to [localhost]:29500 (errno:"
            " 99 - Cannot assign requested address)."
        ),
        "wandb: ERROR Error while calling W&B API: project not found (<Response [404]>)",
        (
            "huggingface/tokenizers: The current process just got forked, after parallelism has already been"
            " used. Disabling parallelism to avoid deadlocks..."
        ),
        "WARNING: failed to remove /var/cache/tmp: retrying with error code 2",
        "sh: 1: nvidia-smi: not found",
        (
            "Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared"
            " object file: No such file or directory"
        ),
    ]
    return {
        n: "\n".join(r.sample(noise, 5)) + "\n" + t + "\n".join(r.sample(noise[:1] + noise[3:6], 2)) + "\n"
        for n, t in files.items()
    }


CHANGES: dict[str, Change] = {
    c.__name__: c for c in (kubectl, compose, one_file, mpirun, crlf, indented, tail, warned)
}


def derived(case: Case, change: str) -> Case | None:
    """The case in another shape, or None where the shape does not fit or hides what has to be
    found.
    """
    r = random.Random(f"{case['id']}/{change}")
    files = CHANGES[change](dict(case["files"]), r)  # type: ignore[call-overload]
    word = str(case["evidence_substring"])
    cut = change == "tail" and not word  # who is silent can be told only from the beginning
    if (
        cut
        or files is None
        or (word and not any(word in t for t in files.values()))
        or sum(map(len, files.values())) > 24_000
    ):
        return None
    return case | {
        "id": f"{case['id']}~{change}",
        "files": files,
        "source": f"{case['source']}; shape: {change}",
    }


def of(cases: list[Case]) -> list[Case]:
    """A shape or two of each case that was really run."""
    names = list(CHANGES)
    out: list[Case] = []
    for case in cases:
        if str(case["source"]).startswith("made"):
            number = int(hashlib.sha256(str(case["id"]).encode()).hexdigest()[:8], 16)
            for change in sorted({names[number % len(names)], names[number // len(names) % len(names)]}):
                new = derived(case, change)
                if new is not None:
                    out.append(new)
    return out
