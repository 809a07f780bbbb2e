"""A server with the routes of vLLM that a sampler uses, which computes with transformers and peft:
for drills and tests, where there is no vLLM.

    python -m unisono.trainer.worker.sampling_server --model DIR [--port N] [--parent PID]

It writes its port to stdout when it is ready. `POST /fault {"kind": "older-version"}` has the next
adapters be those before them.
"""

import argparse
import json
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from unisono.base.child import end_with_front
from unisono.trainer.model.directory import locate_model
from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.plan.task_requests import SamplingParams

BASE = "base"
OLDER_VERSION = "older-version"


class Refusal(Exception):  # noqa: N818 - named for what happens
    """A request is refused.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass
class ServedModel:
    """The base model with all adapters that were loaded since the start.

    Attributes:
        base: of transformers.
        max_length: tokens of prompt and answer.
        log_probs_mode: `raw`, or `processed`: after the temperature.
        served: the adapter that a name gives; None: that of the base model.
    """

    base: Any
    max_length: int = 256
    log_probs_mode: str = "raw"
    served: dict[str, str | None] = field(default_factory=dict)
    _with_adapter: Any = None
    _loads: int = 0

    def load(self, name: str, path: str, fault: str = "") -> None:
        """Loads an adapter under a name.

        Args:
            name: that requests use.
            path: its directory.
            fault: OLDER_VERSION: the name gives the one before.
        """
        if name in self.served:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        self._loads += 1
        inner = f"adapter{self._loads}"
        try:
            self._add(inner, path)
        except (OSError, ValueError) as error:
            raise Refusal(404, f"Loading lora {name} failed: No adapter found for {path}") from error
        older = next(reversed(self.served.values()), inner)
        self.served[name] = older if fault == OLDER_VERSION else inner

    def _add(self, inner: str, path: str) -> None:
        from peft import PeftModel

        if self._with_adapter is None:
            self._with_adapter = PeftModel.from_pretrained(self.base, path, adapter_name=inner)
        else:
            self._with_adapter.load_adapter(path, inner)
        self._with_adapter.eval()

    def unload(self, name: str) -> None:
        """Forgets a name."""
        if name not in self.served:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")
        del self.served[name]

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of a request for completions."""
        name = body["model"]
        if name != BASE and name not in self.served:
            raise Refusal(404, f"The model `{name}` does not exist.")
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        inner = None if name == BASE else self.served[name]
        if self._with_adapter is not None and inner is not None:
            self._with_adapter.set_adapter(inner)
        is_bare = self._with_adapter is not None and inner is None
        with self._with_adapter.disable_adapter() if is_bare else nullcontext(), torch.no_grad():
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


class Handler(BaseHTTPRequestHandler):
    """Requests, one at a time; `model` and `fault` are those of the process."""

    model: ServedModel
    fault = ""
    lock = threading.Lock()

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""
        del args

    def do_GET(self) -> None:
        """A request without a body."""
        self.respond({})

    def do_POST(self) -> None:
        """A request with JSON."""
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body: dict[str, Any]) -> None:
        """Replies."""
        if self.path == "/fault":
            type(self).fault = body["kind"]
            self.reply(200, {})
            return
        try:
            with self.lock:
                self.reply(200, self.answer(body, self.fault))
        except Refusal as refusal:
            self.reply(refusal.status, {"error": {"message": str(refusal)}})

    def answer(self, body: dict[str, Any], fault: str) -> Any:
        """What a route gives."""
        model = self.model
        if self.path == "/v1/models":
            base = {"id": BASE, "parent": None, "max_model_len": model.max_length}
            return {"data": [base, *({"id": name, "parent": BASE} for name in model.served)]}
        if self.path == "/v1/completions":
            return {"choices": model.complete(body)}
        if self.path == "/health":
            return {}
        if not body["lora_name"]:
            raise Refusal(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if self.path == "/v1/load_lora_adapter":
            model.load(body["lora_name"], body["lora_path"], fault)
        elif self.path == "/v1/unload_lora_adapter":
            model.unload(body["lora_name"])
        return "Success"

    def reply(self, status: int, body: Any) -> None:
        """Sends JSON, or bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def load_base(directory: str) -> Any:
    """The model of a directory, in float32, for one thread."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def serve(handler: type[Handler], port: int) -> None:
    """Answers for ever; prints the port first."""
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def main() -> None:
    """Serves a model, until its parent ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args()
    end_with_front(options.parent)
    Handler.model = ServedModel(load_base(str(locate_model(options.model))))
    serve(Handler, options.port)


if __name__ == "__main__":
    main()
