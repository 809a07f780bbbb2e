"""A healthy third-party program under `unisono run`, with long pauses on a busy machine: is any
warning false?

    python bench/soak_programs.py --minutes 60   writes bench/results/soak_programs.json; no stall may be reported
    nohup python bench/soak_programs.py --minutes 60 > /tmp/soak.log 2>&1 &

torchrun, two ranks, DDP, gloo, steps of 50 ms. About every second one rank, or all of them, does
something that takes long and is not a stall: it evaluates, compiles in a separate process, saves
slowly, downloads from a slow server (into a file, or into memory), reads its rows through slow
loader processes, or collects garbage. The other ranks wait in their next collective. Other
processes want as many cores again as there are, in turn.
"""

import argparse
import gc
import http.server
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
STEP_S = 0.05
STEPS_BETWEEN = 20
LONG_S = (5.0, 45.0)
RATES = (8_000, 200_000)  # bytes a second of a slow server
_BURN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


class Slow(http.server.BaseHTTPRequestHandler):
    """Sends zeros for as long, and as slowly, as its path says: /SECONDS/BYTES_PER_SECOND."""

    def do_GET(self) -> None:
        """Answers for so many seconds."""
        seconds, rate = map(float, self.path.strip("/").split("/"))
        self.send_response(200)
        self.end_headers()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wfile.write(bytes(int(rate / 5)))
            time.sleep(0.2)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Pauses:
    """What healthy ranks do for long."""

    def __init__(self, folder: Path, server: str) -> None:
        self._folder = folder
        self._server = server

    def evaluate(self, seconds: float) -> None:
        """Uses its processor."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))

    def compile(self, seconds: float) -> None:
        """Waits for a process that works."""
        subprocess.run([sys.executable, "-c", _BURN, str(seconds)], check=True)

    def save(self, seconds: float) -> None:
        """Writes a file in small parts, with a sync after each."""
        end = time.monotonic() + seconds
        with (self._folder / f"saved-{os.getpid()}").open("wb") as file:
            while time.monotonic() < end:
                file.write(bytes(200_000))
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.3)

    def download(self, seconds: float) -> None:
        """Reads a slow answer into a file."""
        with (
            urllib.request.urlopen(f"{self._server}/{seconds}/{random.choice(RATES)}") as answer,
            (self._folder / f"got-{os.getpid()}").open("wb") as file,
        ):
            while part := answer.read(1 << 14):
                file.write(part)

    def fetch(self, seconds: float) -> None:
        """Reads a slow answer as a whole."""
        with urllib.request.urlopen(f"{self._server}/{seconds}/{random.choice(RATES)}") as answer:
            answer.read()

    def load(self, seconds: float) -> None:
        """Waits for a loader's processes, which compute."""
        import torch

        loader = torch.utils.data.DataLoader(Rows(seconds / 4), batch_size=1, num_workers=2)
        list(loader)

    def collect(self, _: float) -> None:
        """Collects garbage of many objects."""
        many = [[number] for number in range(2_000_000)]
        gc.collect()
        del many


class Rows:
    """Eight rows; each takes some seconds of a processor."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        subprocess.run([sys.executable, "-c", _BURN, str(self._seconds)], check=True)
        return index


KINDS = ("evaluate", "compile", "save", "download", "fetch", "load", "collect")


def rank_main(folder: str, server: str, seconds: str, seed: str) -> None:
    """The program: a pause after every few steps, drawn in the same way on all ranks."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, chance = dist.get_rank(), random.Random(int(seed))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pauses, began = Pauses(Path(folder), server), time.monotonic()
    over = torch.zeros(1)
    with (Path(folder) / f"pauses-{rank}.jsonl").open("a") as file:
        while not over.item():
            for _ in range(STEPS_BETWEEN):
                time.sleep(STEP_S)
                optimizer.zero_grad()
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
            kind, long_s = chance.choice(KINDS), chance.uniform(*LONG_S)
            who = chance.choice([(0,), (1,), (0, 1)])
            if rank in who:
                file.write(json.dumps({"kind": kind, "seconds": round(long_s, 1), "who": who}) + "\n")
                file.flush()
                getattr(pauses, kind)(long_s)
            over.fill_(float(time.monotonic() - began > float(seconds)))
            dist.broadcast(over, 0)
    dist.destroy_process_group()


def run(minutes: float, seed: int, out: Path) -> int:
    """Runs the program under the guard; returns 1 if a warning or a verdict came."""
    from soak import burners  # type: ignore[import-not-found]  # beside this script

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as name, burners(os.cpu_count() or 1):
        address = f"http://127.0.0.1:{server.server_address[1]}"
        program = [*torchrun, str(HERE), "rank", name, address, str(60 * minutes), str(seed)]
        words = [
            sys.executable,
            "-m",
            "unisono",
            "run",
            "--json",
            "--output-dir",
            f"{name}/run",
            "--",
            *program,
        ]
        began = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        front = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True)
        assert front.stdout is not None
        messages: list[dict[str, Any]] = []
        for line in front.stdout:
            messages.append(json.loads(line))
            if messages[-1]["kind"] in ("warning", "verdict", "result"):
                write(out, minutes, seed, Path(name), messages, time.monotonic() - began, None)
                print(line, end="", flush=True)
        code = front.wait()
        result = write(out, minutes, seed, Path(name), messages, time.monotonic() - began, code)
    print(json.dumps({name: value for name, value in result.items() if name != "lines"}))
    return int(code != 0 or bool(result["warnings"]))


def write(
    out: Path, minutes: float, seed: int, folder: Path, messages: list[dict[str, Any]], seconds: float, code: int | None
) -> dict[str, Any]:  # fmt: skip
    """Keeps what is known so far."""
    lines = [line for path in sorted(folder.glob("pauses-*.jsonl")) for line in path.read_text().splitlines()]
    told = [one for one in messages if one["kind"] in ("warning", "verdict")]
    result = {
        "schema": 1,
        "what": "a healthy program of two ranks under `unisono run` with long pauses, on a busy machine",
        "command": f"python bench/soak_programs.py --minutes {minutes:g} --seed {seed}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 1),
        "minutes": round(seconds / 60, 1),
        "exit_code": code,
        "pauses": dict(sorted(Counter(json.loads(line)["kind"] for line in lines).items())),
        "investigations": sum("investigating" in str(one.get("text")) for one in messages),
        "warnings": len(told),
        "lines": [one.get("text") or one.get("summary") for one in told],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


def main() -> int:
    """Returns 1 if anything was reported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "soak_programs.json")
    options = parser.parse_args()
    return run(options.minutes, options.seed, options.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
