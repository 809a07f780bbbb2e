"""A server with the routes of vLLM that a sampler uses, which computes with transformers and peft: a
program for tests.

    python -m tests.trainer.objectives.grpo.vllm_like --model DIR [--port N] [--state JSON]

It writes its port to stdout when it is ready. `POST /fault` with a state of DEFAULTS changes it.
"""

import argparse
import json
import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.plan.task_requests import SamplingParams

BASE = "base"
DEFAULTS = {"kind": "", "after": 0, "lora": True, "max_length": 256, "log_probs": "raw", "key": ""}
"""Of a server's state: a fault, after how many answers it begins, and what the server can do."""


class Refusal(Exception):  # noqa: N818 - named for what happens
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass
class Model:
    """The base model with all adapters that were loaded since the start."""

    base: Any
    max_length: int = 0
    log_probs_mode: str = ""
    with_adapter: Any = None
    served: dict[str, str | None] = field(default_factory=dict)  # the adapter that a name gives
    loads: int = 0

    def load(self, name: str, path: str, fault: str) -> None:
        if name in self.served:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        self.loads += 1
        inner = f"adapter{self.loads}"
        try:
            if self.with_adapter is None:
                self.with_adapter = PeftModel.from_pretrained(self.base, path, adapter_name=inner)
            else:
                self.with_adapter.load_adapter(path, inner)
        except (OSError, ValueError) as error:
            raise Refusal(404, f"Loading lora {name} failed: No adapter found for {path}") from error
        self.with_adapter.eval()
        older = next(reversed(self.served.values()), inner)
        self.served[name] = {"binds-nothing": None, "older-version": older}.get(fault, inner)

    def unload(self, name: str) -> None:
        if name not in self.served:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
        del self.served[name]

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        name = body["model"]
        if name != BASE and name not in self.served:
            raise Refusal(404, f"The model `{name}` does not exist.")
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        inner = None if name == BASE else self.served[name]
        if self.with_adapter is not None and inner is not None:
            self.with_adapter.set_adapter(inner)
        off = self.with_adapter.disable_adapter() if self.with_adapter and inner is None else nullcontext()
        with off, torch.no_grad():
            answers = self._answers(body)
            return [self._choice(body, answer, index) for index, answer in enumerate(answers)]

    def _answers(self, body: dict[str, Any]) -> list[GeneratedAnswer]:
        engine = Engine(self.base, stop_ids=set(body["stop_token_ids"]), pad_id=0, rows=64, part_tokens=8192)
        answers = []
        for prompt in body["prompt"]:
            if len(prompt) + body["max_tokens"] > self.max_length:
                raise Refusal(400, f"This model's maximum context length is {self.max_length} tokens.")
            for number in range(body["n"]):
                sampling = SamplingParams(
                    temperature=body["temperature"],
                    top_p=body["top_p"],
                    top_k=max(0, body["top_k"]),
                    seed=body["seed"] + number,
                )
                answers.append(GeneratedAnswer(prompt, body["max_tokens"], sampling))
        with engine.ready():
            for answer in answers:
                engine.add(answer)
            while not engine.is_idle:
                engine.step()
        return answers

    def _choice(self, body: dict[str, Any], answer: GeneratedAnswer, index: int) -> dict[str, Any]:
        stop = [] if answer.stop_token is None else [answer.stop_token]
        tokens, prompt = [*answer.tokens, *stop], list(answer.prompt)
        logits = (
            self.base(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        )
        if self.log_probs_mode == "processed" and body["temperature"] > 0:
            logits /= body["temperature"]
        values = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return {
            "index": index,
            "text": "",
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": values},
            "finish_reason": answer.ended,
        }


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


class Handler(BaseHTTPRequestHandler):
    """Requests; `model` and `state` are those of the process."""

    model: Model
    state: dict[str, Any]
    lock = threading.Lock()

    def log_message(self, *args: object) -> None:
        del args

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

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
        try:
            with self.lock:
                self.reply(200, self.answer(body, due))
        except Refusal as refusal:
            self.reply(refusal.status, {"error": {"message": str(refusal)}})

    def answer(self, body: dict[str, Any], due: str) -> Any:
        model, state = self.model, self.state
        if self.path == "/v1/models":
            base = {"id": BASE, "parent": None, "max_model_len": state["max_length"]}
            return {"data": [base, *({"id": name, "parent": BASE} for name in model.served)]}
        if self.path == "/v1/completions":
            model.log_probs_mode, model.max_length = state["log_probs"], state["max_length"]
            return spoiled(due, model.complete(body), model.base.config.vocab_size)
        if self.path == "/health":
            return {}
        if not state["lora"]:
            raise Refusal(404, "Not Found")
        if not body["lora_name"]:
            raise Refusal(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if self.path == "/v1/load_lora_adapter":
            model.load(body["lora_name"], body["lora_path"], due)
        elif self.path == "/v1/unload_lora_adapter":
            model.unload(body["lora_name"])
        return "Success"

    def reply(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--state", type=json.loads, default={})
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    Handler.model, Handler.state = Model(base), DEFAULTS | options.state
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
