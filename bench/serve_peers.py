"""Measures `unisono serve` beside `transformers serve`, and llama.cpp, on the same model, prompts and
answer lengths: tokens a second of 1, 16, 64 and 256 requests at once.

python bench/serve_peers.py [m15|m135|MODEL ...] --peer-python PYTHON [--node DIR]
    [--streams 1 16 64 256] [--rounds 2] [--tokens 32] [--threads 1] [--out bench/results/serve_peers.json]

PYTHON has transformers[serving]; DIR has node_modules/node-llama-cpp. Both servers answer the same
chats at temperature 0, in turn in each round; each ratio is that of the medians of one run. The peer
is measured as it starts by default, and with --continuous-batching. llama.cpp computes in one process
of Node without HTTP, from a GGUF file in float32 of the same model, with a cache of float16, its
default. All have the same number of threads; one by default, since threads that wait for each other
measure the machine's load, if it has other work.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from peers import machine  # type: ignore[import-not-found]  # beside this script
from workload import MODELS, Writer, make  # type: ignore[import-not-found]  # beside this script

READY_S = 300.0
NODE_SCRIPT = Path(__file__).with_name("serve_peers_llama.mjs")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def prompts(count: int) -> list[str]:
    """Questions of 5 to 25 words, all different."""
    writer = Writer(7)
    return [writer.text(5 + number % 21) for number in range(count)]


def ask(port: int, model: str, prompt: str, tokens: int) -> int:
    """The number of tokens of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=3_600)
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    count: int = answer["usage"]["completion_tokens"]
    return count


def rate(port: int, model: str, streams: int, tokens: int) -> float:
    """Tokens a second of so many requests at once."""
    texts = prompts(streams)
    since = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        counts = list(pool.map(lambda text: ask(port, model, text, tokens), texts))
    return sum(counts) / (time.perf_counter() - since)


@contextlib.contextmanager
def running(command: list[str], port: int, path: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A server that answers at a path, in a process group of its own; it ends with the context."""
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            limit = time.monotonic() + READY_S
            while not answers(port, path):
                assert server.poll() is None, log.read_text()[-2_000:]
                assert time.monotonic() < limit, f"{command[0]} is not ready"
                time.sleep(0.5)
            yield server
        finally:
            os.killpg(server.pid, signal.SIGCONT)
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


@contextlib.contextmanager
def alone(
    server: "subprocess.Popen[bytes] | None", others: Iterable["subprocess.Popen[bytes]"]
) -> Iterator[None]:
    """A context in which only one of the servers has the CPU: an idle one may poll."""
    stopped = [other for other in others if other is not server]
    for other in stopped:
        os.killpg(other.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in stopped:
            os.killpg(other.pid, signal.SIGCONT)


def answers(port: int, path: str) -> bool:
    """Whether a server answers with 200."""
    with contextlib.suppress(OSError):
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    return False


def llama_rate(file: Path, node: Path, streams: int, *, tokens: int, threads: int) -> float | None:
    """Tokens a second of llama.cpp with so many sequences in a batch; None if it fails."""
    job = json.dumps({"file": str(file), "prompts": prompts(streams), "tokens": tokens, "threads": threads})
    command = ["node", str(NODE_SCRIPT), str(node)]
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"llama.cpp, {streams}: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return float(json.loads(done.stdout)["rate"])


def measure(model: Path, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The figures of a model."""
    name = str(model)
    ours, plain, batched = free_port(), free_port(), free_port()
    peer = [arguments.peer_python, "-m", "transformers.cli.transformers", "serve", name, "--port"]
    servers = {
        "unisono": (
            [sys.executable, "-m", "unisono", "serve", name, "--port", str(ours)],
            ours,
            "/v1/models",
        ),
        "transformers": ([*peer, str(plain)], plain, "/health"),
        "transformers --continuous-batching": (
            [*peer, str(batched), "--continuous-batching"],
            batched,
            "/health",
        ),
    }
    gguf = work / "gguf" / "model-f32.gguf"
    if arguments.node:
        export = [sys.executable, "-m", "unisono", "export", name, str(work / "gguf"), "--format", "gguf"]
        subprocess.run([*export, "--quantize", "f32"], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        started = {}
        for kind, (command, port, path) in servers.items():
            started[kind] = stack.enter_context(running(command, port, path, work / f"{kind}.log"))
            with alone(started[kind], started.values()):
                ask(port, name, "warm up", 4)
        for streams in arguments.streams:
            rates: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                for kind, (_, port, _) in servers.items():
                    with alone(started[kind], started.values()):
                        rates.setdefault(kind, []).append(rate(port, name, streams, arguments.tokens))
                if arguments.node:
                    with alone(None, started.values()):
                        measured = llama_rate(
                            gguf, arguments.node, streams, tokens=arguments.tokens, threads=arguments.threads
                        )
                    if measured is not None:
                        rates.setdefault("llama.cpp", []).append(measured)
            found[str(streams)] = rates
            print(model.name, streams, json.dumps(rates), file=sys.stderr, flush=True)
    return {
        "model": model.name,
        "tokens_per_second": found,
        "ratios": {n: ratios(r) for n, r in found.items()},
    }


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Ours over each of the others, by medians."""
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {kind: medians["unisono"] / median for kind, median in medians.items() if kind != "unisono"}


def main() -> None:
    """Measures, prints, and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["m15", "m135"], metavar="MODEL")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--node", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    models = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as work:
            if name in MODELS:
                make(Path(work), rows=1, shapes={name: MODELS[name]})
            models.append(measure(Path(work) / name if name in MODELS else Path(name), arguments, Path(work)))
    found = {
        "schema": 1, "machine": machine(), "tokens_of_an_answer": arguments.tokens,
        "threads": arguments.threads, "rounds": arguments.rounds,
        "models": models,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
