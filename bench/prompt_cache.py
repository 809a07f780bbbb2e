"""Measures what `unisono serve --prompt-cache` is worth: the time of chats with a long system prompt,
and of the turns of a chat, with and without it.

python bench/prompt_cache.py [m15|m135|MODEL ...] [--rounds 3] [--out bench/results/prompt_cache.json]

Two servers of the same model, one with --prompt-cache 0, answer the same chats at temperature 0, in
turn. The system prompt has about 1,000 tokens and is different in each round; each ratio is that of
the medians. Answers are compared, too.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from peers import machine  # type: ignore[import-not-found]  # beside this script
from workload import MODELS, Writer, make  # type: ignore[import-not-found]  # beside this script

TOKENS = 16
CHATS = 8
Messages = list[dict[str, str]]


def ask(port: int, model: str, messages: Messages) -> str:
    """The text of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    text: str = json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
    connection.close()
    return text


def at_once(port: int, model: str, writer: Writer) -> list[str]:
    """The answers to chats with the same system prompt that come together."""
    system = {"role": "system", "content": writer.text(450)}
    chats = [[system, {"role": "user", "content": writer.text(12)}] for _ in range(CHATS)]
    with ThreadPoolExecutor(CHATS) as pool:
        return list(pool.map(lambda chat: ask(port, model, chat), chats))


def turns(port: int, model: str, writer: Writer) -> list[str]:
    """The answers of one chat, each after the one before."""
    messages: Messages = [{"role": "system", "content": writer.text(450)}]
    for _ in range(CHATS):
        messages.append({"role": "user", "content": writer.text(12)})
        messages.append({"role": "assistant", "content": ask(port, model, messages)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def measure(model: str, rounds: int) -> dict[str, Any]:
    """The figures of a model."""
    seconds: dict[str, dict[str, list[float]]] = {}
    equal = True
    with contextlib.ExitStack() as stack:
        ports = {}
        for name, megabytes in (("without", "0"), ("with", "256")):
            command = [sys.executable, "-m", "unisono", "serve", model, "--json", "--prompt-cache", megabytes]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.terminate)
            assert server.stdout is not None
            ports[name] = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
            at_once(ports[name], model, Writer(99))
        for kind in (at_once, turns):
            for number in range(rounds):
                texts = {}
                for name, port in ports.items():
                    since = time.perf_counter()
                    texts[name] = kind(port, model, Writer(number))
                    taken = time.perf_counter() - since
                    seconds.setdefault(kind.__name__, {}).setdefault(name, []).append(taken)
                equal = equal and texts["with"] == texts["without"]
    ratios = {
        kind: statistics.median(taken["without"]) / statistics.median(taken["with"])
        for kind, taken in seconds.items()
    }
    return {"model": Path(model).name, "seconds": seconds, "ratios": ratios, "answers_equal": equal}


def main() -> None:
    """Measures, prints, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="*", default=["m15", "m135"], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        if set(arguments.models) & set(MODELS):
            make(Path(work), rows=1)
        models = [
            measure(str(Path(work) / name) if name in MODELS else name, arguments.rounds)
            for name in arguments.models
        ]
    found = {
        "schema": 1,
        "machine": machine(),
        "tokens_of_an_answer": TOKENS,
        "chats": CHATS,
        "models": models,
    }
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
