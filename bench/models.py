"""Tries every architecture that transformers can load as a causal language model, with tiny random
weights, and keeps what came of it: docs/reference/models.md is made from the results.

python bench/models.py [--types llama,gpt2] [--cells merge,quantized] [--again] [--workers 2]

Each worker tries one after the other; if it dies, another continues with the next. Results are kept
after each architecture; one that has been tried with the same versions is left out unless --again,
so that an interrupted run continues. --cells tries these again, and leaves the others as they are.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "models.json"
_LIMIT_S = 600.0  # for one architecture
_MARK = "tried: "
_WRITING = threading.Lock()


def main() -> int:
    """Tries what has not been tried, prints a line for each, and keeps the outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", help="model types, with commas between; all without")
    parser.add_argument("--cells", default="", help="names of cells, with commas between; all without")
    parser.add_argument("--again", action="store_true", help="try those with a result, too")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.worker:
        _work()
        return 0
    from tests.session_server import SessionServer
    from tests.trainer.architectures.tiny_models import model_types

    results = _kept()
    chosen = arguments.types.split(",") if arguments.types else model_types()
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in chosen:
        if arguments.again or arguments.cells or name not in results["types"]:
            left.put(f"{name} {arguments.cells}")
    server = SessionServer()  # forks ranks without their imports
    server.start()
    try:
        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(lambda _: _serve(left, results), range(arguments.workers)))
    finally:
        server.close()
    return 0


def _serve(left: "queue.SimpleQueue[str]", results: dict[str, Any]) -> None:
    """Has workers try what is left, one after the other."""
    worker: Worker | None = None
    while not left.empty():
        line = left.get()
        name, only = line.split(" ")
        worker = worker or Worker()
        tried = worker.attempt(line)
        if worker.process.poll() is not None:
            worker = None
        with _WRITING:
            if only:
                tried["cells"] = results["types"][name]["cells"] | tried["cells"]
            results["types"] = dict(sorted({**results["types"], name: tried}.items()))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{left.qsize()} left; {name}: {_summary(tried)}", flush=True)
    if worker is not None:
        worker.close()


class Worker:
    """A process that tries the types on its standard input."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def attempt(self, line: str) -> dict[str, Any]:
        """The outcome of one type, or of the cells that follow its name."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        limit = threading.Timer(_LIMIT_S, self.process.kill)
        limit.start()
        for line in self.process.stdout:
            if line.startswith(_MARK):
                limit.cancel()
                tried: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return tried
        limit.cancel()
        code = self.process.wait()
        return {"cells": {"lora": {"outcome": "crashed", "reason": f"the process ended with {code}"}}}

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _work() -> None:
    for line in sys.stdin:
        print(_MARK + json.dumps(_attempt(*line.removesuffix("\n").split(" "))), flush=True)


def _kept() -> dict[str, Any]:
    """The results that were measured with the installed versions."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("transformers", "peft", "torch")}
    empty: dict[str, Any] = {"command": "python bench/models.py", "versions": versions, "types": {}}
    if not RESULTS.exists():
        return empty
    kept: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return kept if kept["versions"] == versions else empty


def _attempt(name: str, only: str) -> dict[str, Any]:
    from tests.trainer.architectures.cells import Architecture, cells, to_json

    with tempfile.TemporaryDirectory() as folder:
        architecture = Architecture(name, Path(folder))
        return {
            "class": architecture.class_name,
            "cells": {
                cell: to_json(outcome)
                for cell, outcome in cells(architecture, [n for n in only.split(",") if n])
            },
        }


def _summary(tried: dict[str, Any]) -> str:
    bad = {n: c["reason"][:110] for n, c in tried["cells"].items() if c["outcome"] in ("crashed", "wrong")}
    words = " ".join(f"{name} {cell['outcome']}" for name, cell in tried["cells"].items())
    return f"{words}{''.join(f'; {name}: {reason}' for name, reason in bad.items())}"


if __name__ == "__main__":
    sys.exit(main())
