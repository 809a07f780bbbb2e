"""Measures `unisono serve` on this machine: tokens a second of eight requests at once, against the
same requests one after the other.

python bench/serve.py [m15|m135|RUN|MODEL ...] [--rounds 3] [--out bench/results/serve.json]

Both are measured in turn, on the same server; the ratio is that of the medians. Answers at
temperature 0 are compared, too. `longest_gap_s` is the longest time between two tokens of a running
stream: alone, and while prompts of 1,500 tokens come in. m15 and m135 are the random models of
bench/workload.py, in float32; builtin:tiny computes in bfloat16 where the CPU can, so its answers
may differ.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from peers import machine  # type: ignore[import-not-found]  # beside this script
from workload import MODELS, make  # type: ignore[import-not-found]  # beside this script

CLIENTS = 8
TOKENS = 64
LONG_TOKENS = 1_500
PROMPTS = [f"{'tell me about day ' * (1 + i % 3)}{i}" for i in range(CLIENTS)]


def ask(port: int, model: str, prompt: str | list[int], tokens: int = TOKENS) -> tuple[str, int]:
    """The text of an answer, and its number of tokens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def timed(port: int, model: str, *, workers: int) -> tuple[float, list[str]]:
    """Tokens a second of all prompts with so many clients, and the texts."""
    since = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(lambda prompt: ask(port, model, prompt), PROMPTS))
    seconds = time.perf_counter() - since
    return sum(tokens for _, tokens in answers) / seconds, [text for text, _ in answers]


def gaps(port: int, model: str, rounds: int) -> dict[str, list[float]]:
    """The longest seconds between two tokens of a stream, alone and while a long prompt comes in;
    one of each a round.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": model, "prompt": [11], "max_tokens": 1_900, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    stream = connection.getresponse()
    stream.readline()
    found: dict[str, list[float]] = {"alone": [], "beside_a_long_prompt": []}
    with ThreadPoolExecutor(1) as pool:
        for number in range(rounds):
            found["alone"].append(longest_gap(stream, is_over=ready_after(3.0)))
            prompt = [10 + (number * 7 + i) % 900 for i in range(LONG_TOKENS)]
            pending = pool.submit(ask, port, model, prompt, 1)
            found["beside_a_long_prompt"].append(longest_gap(stream, is_over=pending.done))
            pending.result()
    connection.close()
    return found


def longest_gap(stream: HTTPResponse, *, is_over: Callable[[], bool]) -> float:
    """The longest seconds between two events of a stream, until something is over."""
    longest, last = 0.0, time.perf_counter()
    while not is_over():
        line = stream.readline()
        assert line, "the stream ended too early"
        if line.startswith(b"data:"):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    return longest


def ready_after(seconds: float) -> Callable[[], bool]:
    """A function that says whether the time has passed."""
    limit = time.perf_counter() + seconds
    return lambda: time.perf_counter() > limit


def measure(model: str, rounds: int, work: Path) -> dict[str, Any]:
    """The figures of a model."""
    if model in MODELS:
        if not (work / model).exists():
            make(work, rows=1)
        model = str(work / model)
    command = [sys.executable, "-m", "unisono", "serve", model, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
        timed(port, model, workers=CLIENTS)  # warms up
        alone, at_once, equal = [], [], True
        for _ in range(rounds):
            rate, texts = timed(port, model, workers=1)
            alone.append(rate)
            rate, others = timed(port, model, workers=CLIENTS)
            at_once.append(rate)
            equal = equal and texts == others
        longest = (
            gaps(port, model, rounds) if Path(model).exists() else None
        )  # the built-in model reads 512 tokens
        server.terminate()
        ended = server.wait()
    return {
        "model": Path(model).name,
        "tokens_per_second": {"one_after_the_other": alone, "at_once": at_once},
        "ratio": statistics.median(at_once) / statistics.median(alone),
        "answers_equal": equal,
        "longest_gap_s": longest,
        "exit_code": ended,
    }


def main() -> None:
    """Measures, prints, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=["builtin:tiny", "m15", "m135"], metavar="RUN|MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        models = [measure(model, arguments.rounds, Path(work)) for model in arguments.models]
    found = {
        "schema": 1, "machine": machine(), "clients": CLIENTS, "tokens_of_an_answer": TOKENS, "models": models,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
