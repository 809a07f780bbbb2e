"""Measures `unisono serve` beside `transformers serve`, and llama.cpp, on the same model, prompts and
answer lengths: tokens a second of 1, 16, 64 and 256 requests at once.

python bench/serve_peers.py [m15|m135|MODEL ...] --peer-python PYTHON [--node DIR]
    [--streams 1 16 64 256] [--rounds 3] [--tokens 32] [--threads 1] [--out bench/results/serve_peers.json]

PYTHON has transformers[serving]; DIR has node_modules/node-llama-cpp. Both servers answer the same
chats at temperature 0, in turn in each round, and only one of them has the CPU at a time; each ratio is
that of the medians of one run. Since other programs may be at work, whose number (the load) is noted,
the CPU seconds of a server's processes are measured, too. The peer is measured as it starts by default,
and with --continuous-batching. A server that ends is named with the end of its log, and started again.
For one request, the time of the model's forward is measured in a process of its own. llama.cpp computes in one process
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil
from peers import machine  # type: ignore[import-not-found]  # beside this script
from workload import MODELS, Writer, make  # type: ignore[import-not-found]  # beside this script

READY_S = 300.0
CACHE = ("--cb-max-memory-percent", "0.1")
"""By default its cache has most of the memory (14 of 24 GB), and the kernel killed it when other
programs needed some."""
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


def cpu_seconds(server: "subprocess.Popen[bytes]") -> float:
    """CPU seconds of a server and its children so far."""
    front = psutil.Process(server.pid)
    times = [process.cpu_times() for process in (front, *front.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def forward_ms(model: str, arguments: argparse.Namespace) -> float:
    """Milliseconds of the model's forward for a token of one answer, computed as by the server."""
    import torch
    import transformers

    from unisono.trainer.model.engine import Engine, GeneratedAnswer
    from unisono.trainer.model.generate import GREEDY
    from unisono.trainer.model.packed_layers import packed_layers

    torch.set_num_threads(arguments.threads)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    forward, times = loaded.forward, []

    def timed(**inputs: Any) -> Any:
        since = time.perf_counter()
        outputs = forward(**inputs)
        times.append(time.perf_counter() - since)
        return outputs

    engine = Engine(loaded, stop_ids=set(), pad_id=0, rows=1)
    loaded.forward = timed
    with engine.ready(), packed_layers(loaded), torch.inference_mode():
        for _ in range(arguments.rounds):
            engine.add(GeneratedAnswer([*range(10, 40)], arguments.tokens, GREEDY))
            while not engine.is_idle:
                engine.step()
    return 1_000 * statistics.median(times)


def send(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Sends a signal to a server's process group, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


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
            send(server, signal.SIGCONT)
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                send(server, signal.SIGKILL)


@contextlib.contextmanager
def alone(
    server: "subprocess.Popen[bytes] | None", others: Iterable["subprocess.Popen[bytes]"]
) -> Iterator[None]:
    """A context in which only one of the servers has the CPU: an idle one may poll."""
    stopped = [other for other in others if other is not server]
    for other in stopped:
        send(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in stopped:
            send(other, signal.SIGCONT)


def answers(port: int, path: str) -> bool:
    """Whether a server answers with 200."""
    with contextlib.suppress(OSError):
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    return False


def llama_rate(file: Path, arguments: argparse.Namespace, streams: int) -> float | None:
    """Tokens a second of llama.cpp with so many sequences in a batch; None if it fails."""
    job = {"file": str(file), "prompts": prompts(streams), "tokens": arguments.tokens}
    command = ["node", str(NODE_SCRIPT), str(arguments.node)]
    text = json.dumps(job | {"threads": arguments.threads})
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"llama.cpp, {streams}: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return float(json.loads(done.stdout)["rate"])


class Servers:
    """The servers of a model, all running; they end with the context."""

    def __init__(self, name: str, arguments: argparse.Namespace, work: Path) -> None:
        peer = [arguments.peer_python, "-m", "transformers.cli.transformers", "serve", name]
        self._commands = {
            "unisono": ([sys.executable, "-m", "unisono", "serve", name], "/v1/models"),
            "transformers": (peer, "/health"),
            "transformers --continuous-batching": ([*peer, "--continuous-batching", *CACHE], "/health"),
        }
        self._name, self._work, self._tokens = name, work, arguments.tokens
        self._stack = contextlib.ExitStack()
        self._running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self.kinds = tuple(self._commands)
        self.ended: list[str] = []

    def __enter__(self) -> "Servers":
        for kind in self.kinds:
            self._start(kind)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stopped(self) -> "contextlib.AbstractContextManager[None]":
        """A context in which none of them has the CPU."""
        return alone(None, [server for server, _ in self._running.values()])

    def rates(self, kind: str, streams: int) -> tuple[float, float] | None:
        """Tokens a second, and a CPU second, of so many requests at once; None if the server ended."""
        server, port = self._running[kind]
        with alone(server, [one for one, _ in self._running.values()]):
            used, since = cpu_seconds(server), time.perf_counter()
            try:
                measured = rate(port, self._name, streams, self._tokens)
                seconds = time.perf_counter() - since
                return measured, measured * seconds / (cpu_seconds(server) - used)
            except (OSError, HTTPException, psutil.Error) as error:
                log = (self._work / f"{kind}.log").read_text()[-500:]
                self.ended.append(f"{kind}, {streams} requests: {error!r}; exit {server.poll()}; {log}")
                print(self.ended[-1], file=sys.stderr, flush=True)
        self._start(kind)
        return None

    def _start(self, kind: str) -> None:
        command, path = self._commands[kind]
        port = free_port()
        log = self._work / f"{kind}.log"
        server = self._stack.enter_context(running([*command, "--port", str(port)], port, path, log))
        self._running[kind] = server, port
        with alone(server, [one for one, _ in self._running.values()]):
            ask(port, self._name, "warm up", 4)


def measure(
    model: Path, arguments: argparse.Namespace, work: Path, publish: Callable[[dict[str, Any]], None]
) -> None:
    """Publishes the figures of a model, after each number of requests."""
    name = str(model)
    gguf = work / "gguf" / "model-f32.gguf"
    if arguments.node:
        export = [sys.executable, "-m", "unisono", "export", name, str(work / "gguf"), "--format", "gguf"]
        subprocess.run([*export, "--quantize", "f32"], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = {"model": model.name}
    with Servers(name, arguments, work) as servers:
        with servers.stopped():
            found["forward_ms_of_a_token_of_one_answer"] = forward_ms(name, arguments)
        for streams in map(str, arguments.streams):
            rates: dict[str, list[float]] = {}
            cpu: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                found.setdefault("load", {}).setdefault(streams, []).append(os.getloadavg()[0])
                for kind in servers.kinds:
                    measured = servers.rates(kind, int(streams))
                    if measured is not None:
                        rates.setdefault(kind, []).append(measured[0])
                        cpu.setdefault(kind, []).append(measured[1])
                if arguments.node:
                    with servers.stopped():
                        llama = llama_rate(gguf, arguments, int(streams))
                    if llama is not None:
                        rates.setdefault("llama.cpp", []).append(llama)
            found.setdefault("tokens_per_second", {})[streams] = rates
            found.setdefault("tokens_per_cpu_second", {})[streams] = cpu
            found.setdefault("ratios", {})[streams] = ratios(rates)
            found.setdefault("cpu_ratios", {})[streams] = ratios(cpu)
            found["servers_that_ended"] = servers.ended
            publish(found)


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    models: dict[str, Any] = {}
    found = {
        "schema": 1, "machine": machine(), "tokens_of_an_answer": arguments.tokens,
        "threads": arguments.threads, "rounds": arguments.rounds,
    }  # fmt: skip

    def publish(one: dict[str, Any]) -> None:
        models[one["model"]] = one
        text = json.dumps(found | {"models": [*models.values()]}, indent=1)
        print(text, flush=True)
        if arguments.out:
            arguments.out.write_text(text + "\n")

    for name in arguments.models:
        with tempfile.TemporaryDirectory() as work:
            if name in MODELS:
                make(Path(work), rows=1, shapes={name: MODELS[name]})
            measure(Path(work) / name if name in MODELS else Path(name), arguments, Path(work), publish)


if __name__ == "__main__":
    main()
