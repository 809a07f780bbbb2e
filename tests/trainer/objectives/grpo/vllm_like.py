"""The server of drills with more faults: a program for tests.

    python -m tests.trainer.objectives.grpo.vllm_like --model DIR [--port N] [--state JSON]

It writes its port to stdout when it is ready. `POST /fault` with a state of DEFAULTS changes it.
"""

import argparse
import json
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

from unisono.trainer.worker import sampling_server
from unisono.trainer.worker.sampling_server import BASE, Refusal, ServedModel, load_base, serve

__all__ = ["BASE", "DEFAULTS"]
DEFAULTS = {"kind": "", "after": 0, "lora": True, "max_length": 256, "log_probs": "raw", "key": ""}
"""Of a server's state: a fault, after how many answers it begins, and what the server can do."""


@dataclass
class Model(ServedModel):
    """A model whose adapters may bind nothing."""

    def load(self, name: str, path: str, fault: str = "") -> None:
        super().load(name, path, fault)
        if fault == "binds-nothing":
            self.served[name] = None


def spoiled(kind: str, choices: list[dict[str, Any]], vocabulary: int) -> Any:
    """The body of an answer with a fault."""
    first = choices[0]
    values = first["logprobs"]["token_logprobs"]
    if kind == "wrong-log-probs":
        for choice in choices:
            inner = choice["logprobs"]
            inner["token_logprobs"] = [value - 0.5 for value in inner["token_logprobs"]]
    elif kind == "nan":
        values[0] = float("nan")
    elif kind == "unknown-token":
        first["token_ids"][0] = vocabulary + 7
    elif kind == "other-prompt":
        first["prompt_token_ids"] = [1, 2, 3]
    elif kind == "fewer-answers":
        choices = choices[:-1]
    elif kind == "no-log-probs":
        first["logprobs"] = None
    elif kind == "too-long":
        first["text"] = "x" * (32 << 20)
    elif kind == "html":
        return b"<html><body>welcome to the gateway</body></html>"
    return {"choices": choices}


class Handler(sampling_server.Handler):
    """Requests; `state` is that of the process."""

    state: dict[str, Any]

    def respond(self, body: dict[str, Any]) -> None:
        if self.path == "/fault":
            self.state.update(DEFAULTS | body)
            self.reply(200, {})
            return
        key = self.state["key"]
        if key and self.path != "/health" and self.headers["Authorization"] != f"Bearer {key}":
            self.reply(401, {"error": "Unauthorized"})
            return
        with self.lock:
            due = self.state["kind"] if self.state["after"] <= 0 else ""
            self.state["after"] -= self.path == "/v1/completions"
        if due == "hangs":
            threading.Event().wait()
        if due == "killed" and self.path == "/v1/completions":
            os.kill(os.getpid(), signal.SIGKILL)
        self.fault = due  # of this request
        super().respond(body)

    def answer(self, body: dict[str, Any], fault: str) -> Any:
        model, state = self.model, self.state
        model.log_probs_mode, model.max_length = state["log_probs"], state["max_length"]
        if self.path.endswith("_lora_adapter") and not state["lora"]:
            raise Refusal(404, "Not Found")
        given = super().answer(body, fault)
        if self.path == "/v1/completions":
            return spoiled(fault, given["choices"], model.base.config.vocab_size)
        return given


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--state", type=json.loads, default={})
    options = parser.parse_args()
    Handler.model, Handler.state = Model(load_base(options.model)), DEFAULTS | options.state
    serve(Handler, options.port)


if __name__ == "__main__":
    main()
