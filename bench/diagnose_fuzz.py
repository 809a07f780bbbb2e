"""Damages logs in every way that files are damaged, and diagnoses them.

Run: python bench/diagnose_fuzz.py; writes bench/results/diagnose_fuzz.json.

    python bench/diagnose_fuzz.py --seconds 120 --cases FILE.jsonl ...

Cases are those of tests/guard/diagnosis/cases, and more where files are given (one object a line, with
`files`: name → text), and the recordings of flight recorders. Each round takes one, changes it a
few times, and reads it as the command does. A round fails where there is an exception, where it
takes longer than LIMIT_S of this process's time, or where a secret that was put in comes out.
"""

import argparse
import gzip
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench/results/diagnose_fuzz.json"
CASES = ROOT / "tests/guard/diagnosis/cases"
RECORDED = ROOT / "tests/guard/diagnosis/recorded"
LIMIT_S = 10.0
SECRET = "hf_" + "Zq7Rw2Xk9Lm4Tn8Vb3Yc6Hd1"
MOST_BYTES = 4 << 20

Change = Callable[[random.Random, bytes], bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    found = fuzz(load([*sorted(CASES.glob("*.jsonl")), *arguments.cases]), arguments.seed, arguments.seconds)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["failures"]))


def load(files: list[Path]) -> list[dict[str, bytes]]:
    """The files of each case."""
    cases = [json.loads(line)["files"] for file in files for line in file.read_text().splitlines()]
    found = [{name: text.encode() for name, text in case.items()} for case in cases]
    return found + [
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in RECORDED.iterdir()
        if folder.is_dir()
    ]


def fuzz(cases: list[dict[str, bytes]], seed: int, seconds: float) -> dict[str, Any]:
    """Rounds until the time is over."""
    began, rounds, slowest = time.monotonic(), 0, (0.0, "")
    causes: Counter[str] = Counter()
    failures: list[str] = []
    while time.monotonic() - began < seconds and len(failures) < 20:
        number = seed * 1_000_000 + rounds
        chance = random.Random(number)
        with tempfile.TemporaryDirectory() as folder:
            names = write(chance, Path(folder), chance.choice(cases), chance.choice(cases))
            before = time.process_time()
            try:
                said, cause = diagnosed(folder)
                causes[cause] += 1
                if SECRET in said:
                    failures.append(f"round {number} ({names}): a secret came out")
            except Exception:  # noqa: BLE001 - that is what is looked for
                failures.append(f"round {number} ({names}): {traceback.format_exc()[-1500:]}")
            took = time.process_time() - before
        slowest = max(slowest, (took, f"round {number}: {names}"))
        if took > LIMIT_S:
            failures.append(f"round {number} ({names}): {took:.1f} s")
        rounds += 1
    return {
        "schema": 1, "command": "python bench/diagnose_fuzz.py --seconds " + str(round(seconds)), "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "cases": len(cases), "rounds": rounds, "seconds": round(time.monotonic() - began), "slowest_cpu_s": round(slowest[0], 2), "slowest": slowest[1], "limit_s": LIMIT_S,
        "failures": failures, "causes": dict(causes.most_common()),
    }  # fmt: skip


def diagnosed(folder: str) -> tuple[str, str]:
    """All that the command would print, and the cause."""
    from unisono.guard.diagnosis.lines import redacted, redacted_json
    from unisono.guard.diagnosis.reading import diagnose_logs, find_sources, read_all
    from unisono.guard.diagnosis.timeline import draw

    read = read_all(find_sources([folder]))
    found = diagnose_logs(read.scanned, read.recordings)
    drawn = draw(
        found.facts,
        first=found.verdict.evidence[0].where if found.verdict.evidence else "",
        ranks=found.verdict.ranks,
        width=100,
    )
    verdicts = [found.verdict, *found.alternatives]
    body = [
        *(verdict.to_json() for verdict in verdicts),
        *(link.model_dump() for link in found.chain),
        read.refused,
        drawn,
    ]
    said = json.dumps(redacted_json(body)) + "\n".join(
        redacted(line) for verdict in verdicts for line in verdict.lines()
    )
    return said, found.verdict.cause


def write(chance: random.Random, folder: Path, case: dict[str, bytes], other: dict[str, bytes]) -> str:
    """The files of a case, changed; gives what was done."""
    done = []
    for name, original in case.items():
        data = original
        for _ in range(chance.randrange(4)):
            change = chance.choice(CHANGES)
            data = change(chance, data)[:MOST_BYTES]
            done.append(change.__name__)
        if chance.random() < 0.1:
            data += chance.choice(list(other.values()))
            done.append("spliced")
        path = folder / Path(name).name[-100:]
        if chance.random() < 0.1:
            data = gzip.compress(data)[: chance.choice((None, chance.randrange(1, 2000)))]
            path = path.with_name(path.name + ".gz")
            done.append("gz")
        path.write_bytes(data)
    extra = chance.random()
    if extra < 0.05:
        os.mkfifo(folder / "pipe.log")
    elif extra < 0.1:
        (folder / "loop").symlink_to(folder)
        (folder / "nowhere.log").symlink_to(folder / "missing")
    elif extra < 0.12:
        shutil.copy(sys.executable, folder / "core.1234")
    return " ".join(done)


def cut(chance: random.Random, data: bytes) -> bytes:
    begin, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    return data[begin:end]


def drop_lines(chance: random.Random, data: bytes) -> bytes:
    return b"\n".join(line for line in data.split(b"\n") if chance.random() < 0.8)


def shuffle(chance: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    chance.shuffle(lines)
    return b"\n".join(lines)


def repeat(chance: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    return b"\n".join(lines + [chance.choice(lines)] * chance.randrange(3000) + lines)


def junk(chance: random.Random, data: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.randbytes(chance.randrange(3000)) + data[place:]


def flip(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(min(len(changed), 40)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def carriage_returns(chance: random.Random, data: bytes) -> bytes:
    return data.replace(b"\n", chance.choice((b"\r", b"\r\n", b"", b"\x1b[A", b"\x00", "\u2028".encode())))


def endless(chance: random.Random, data: bytes) -> bytes:
    unit = chance.choice(
        (
            b"x",
            b"0 ",
            b"[rank0]:",
            b"Error: ",
            b"it/s]",
            b"\xff",
            b"a=",
            b"rank 1 ",
            b'File "',
            b"://",
            data[:200],
        )
    )
    return data + unit * (chance.randrange(1 << 20) // max(len(unit), 1)) + data


def numbers(chance: random.Random, data: bytes) -> bytes:
    return data.replace(
        str(chance.randrange(10)).encode(), str(chance.choice((0, 999999, 10**30, -1))).encode()
    )


def encode(chance: random.Random, data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode(
        chance.choice(("utf-16", "utf-16-be", "utf-32", "cp1252", "ascii")), "replace"
    )


def colours(_: random.Random, data: bytes) -> bytes:
    return data.replace(b" ", b"\x1b[31m \x1b[0m").replace(b":", b"\x1b]0;t\x07:")


def secrets(chance: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    return b"\n".join(line + b" " + SECRET.encode() if chance.random() < 0.5 else line for line in lines)


def merged(chance: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    return b"\n".join(a + b for a, b in zip(lines[::2], lines[1::2], strict=False)) + chance.choice(
        (b"", b"\n")
    )


CHANGES: tuple[Change, ...] = (
    cut,
    drop_lines,
    shuffle,
    repeat,
    junk,
    flip,
    carriage_returns,
    endless,
    numbers,
    encode,
    colours,
    secrets,
    merged,
)


if __name__ == "__main__":
    main()
