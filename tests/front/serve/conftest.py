"""Servers as real processes, and clients of all kinds."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests import front_server
from tests.session_server import cache_with_kernels

if TYPE_CHECKING:
    import openai

LIMIT_S = 120.0
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool['function'] | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights whose answers never end by themselves, and whose template writes
    tools.
    """
    directory = tmp_path_factory.mktemp("endless")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["what day is it today, call me on tuesday"] * 4, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=SPECIAL[2:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    torch.set_rng_state(state)
    with torch.no_grad():
        model.get_input_embeddings().weight[: len(SPECIAL)] = 0.0  # their logits are 0, never the largest
    model.save_pretrained(directory)
    return directory


@dataclass
class Served:
    """A running server."""

    process: "subprocess.Popen[str]"
    url: str
    model: str
    key: str = "none"
    opened: "list[socket.socket | openai.OpenAI]" = field(default_factory=list)

    @property
    def client(self) -> "openai.OpenAI":
        """A client, closed with the test: one that is dropped leaves its connection to the garbage
        collector.
        """
        import openai  # two seconds, which only tests of a server should take

        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=LIMIT_S)
        self.opened.append(made)
        return made

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def post(self, path: str = "/v1/completions", **body: Any) -> "Reply":
        """The response to a request."""
        defaults = {} if {"messages", "input"} & body.keys() else {"prompt": "what"}
        return self.send(path, json.dumps({"model": self.model, "temperature": 0, **defaults, **body}))

    def send(self, path: str, body: str, *, method: str = "POST", **headers: str) -> "Reply":
        """The response to any request."""
        sent = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(HTTPConnection(*self.address, timeout=LIMIT_S)) as connection:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.getheader("content-type") == "application/json"
            return Reply(
                response.status,
                response.getheader("retry-after"),
                json.loads(text) if is_json else {"text": text},
            )

    def stream(self, **body: Any) -> "Stream":
        """A request for a stream, sent but not read."""
        text = json.dumps({"model": self.model, "prompt": "what", "temperature": 0, "stream": True, **body})
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self.key}\r\n"
        )
        return Stream(self.connect(f"{head}content-length: {len(text)}\r\n\r\n{text}"))

    def connect(self, text: str = "") -> socket.socket:
        """A connection, closed with the test, on which a text has been sent."""
        made = socket.create_connection(self.address, timeout=LIMIT_S)
        self.opened.append(made)
        made.sendall(text.encode())
        return made

    def task(self) -> psutil.Process:
        """The process of the model; the one that reads prompts is its child, with the same command
        line.
        """
        front = str(self.process.pid)
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if (
                    "unisono.task" in words
                    and "serve" in words
                    and words[words.index("--front-pid") + 1] == front
                ):
                    found[process.pid] = (process, process.ppid())
        (task,) = (process for process, parent in found.values() if parent not in found)
        return task

    def close(self) -> None:
        """Closes what has been opened to the server."""
        while self.opened:
            self.opened.pop().close()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


@dataclass(frozen=True)
class Reply:
    """A response and its JSON."""

    status: int
    retry_after: str | None
    body: dict[str, Any]


class Stream:
    """A connection on which server-sent events arrive."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def events(self) -> Iterator[dict[str, Any]]:
        """The objects of the events that have not been read, to the end of the stream."""
        while True:
            line, found, self._rest = self._rest.partition(b"\n")
            if not found:
                data = self.connection.recv(1 << 16)
                if not data:
                    return
                self._rest = line + data
            elif line.startswith(b"data: [DONE]"):
                return
            elif line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self.connection.close()


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.setenv("XDG_CACHE_HOME", str(cache_with_kernels(tmp_path_factory.mktemp("cache"))))
        yield


def start(target: object, *options: object, env: dict[str, str] | None = None) -> Served:
    """A server that is ready."""
    command = [sys.executable, "-m", "unisono", "serve", str(target), "--json", *map(str, options)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = front_server.start(command, text=True, env=env, **pipes)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    first = json.loads(line)
    assert first == {"kind": "serve", "schema": 1, "url": first["url"], "model": str(target)}
    return Served(process, first["url"], first["model"])


@pytest.fixture
def serve(own_cache: None) -> Iterator[Serve]:
    """Starts servers, which end with the test."""
    started: list[Served] = []

    def start_one(target: object, *options: object, env: dict[str, str] | None = None) -> Served:
        started.append(start(target, *options, env=env))
        return started[-1]

    yield start_one
    for one in started:
        one.close()
        one.process.kill()
        one.process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="session")
def kept_server(endless: Path, own_cache: None) -> Iterator[Served]:
    one = start(endless)
    yield one
    assert one.end() == 0
    one.process.communicate()


@pytest.fixture
def server(kept_server: Served) -> Iterator[Served]:
    """A server of the endless model, for tests that leave it as it is."""
    yield kept_server
    kept_server.close()


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits for something to become true."""
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)
