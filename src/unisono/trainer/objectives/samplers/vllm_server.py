"""The routes of a vLLM server that a sampler uses, and its answers, checked.

Tokens go in and tokens come out: nothing is tokenised again. Tried with vLLM 0.32.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal

from unisono.base.text import one_line
from unisono.trainer.objectives.samplers.http_client import HttpClient, NoAnswer, Reply, TooLong
from unisono.trainer.plan.task_requests import SamplingParams

_TICK_S = 0.5  # between looks at an answer that one waits for
_QUICK_S = 10.0  # for what a server answers at once
_LOAD_S = 120.0  # for an adapter
_CONTROL_BYTES = 4 << 20
_BYTES_PER_TOKEN = 1_024  # of an answer, in JSON
_ROUNDING = 1e-3  # by which a log-probability may exceed 0
_BUSY = (429, 502, 503, 504)


class ServerAway(Exception):  # noqa: N818 - named for what happened
    """The server does not answer now, or has lost an adapter: it may answer later.

    Attributes:
        waited_s: for its answer.
    """

    def __init__(self, words: str, *, waited_s: float = 0.0) -> None:
        super().__init__(words)
        self.waited_s = waited_s


class ServerRefused(Exception):  # noqa: N818 - named for what happened
    """The server answers that it does not do it.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class BadAnswer(Exception):  # noqa: N818 - named for what happened
    """The server answers with something that cannot be an answer of the model."""


@dataclass(frozen=True)
class ServedModel:
    """What a server says about its models.

    Attributes:
        name: of the base model.
        max_length: tokens of prompt and answer; None: not told.
        adapters: names of those that are loaded.
    """

    name: str
    max_length: int | None
    adapters: frozenset[str]


@dataclass(frozen=True)
class SamplingRequest:
    """Answers to prompts that are sampled alike.

    Attributes:
        model: the name of the base model, or of an adapter.
        prompts: tokens of each.
        number: answers to each; the server gives answer i the seed of the sampling plus i.
        max_tokens: of an answer.
        sampling: how tokens are chosen; without beams.
        stop_ids: tokens that end an answer.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    number: int
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]

    def body(self) -> dict[str, object]:
        """The request as JSON.

        All settings of sampling are given: others would be those of the model's
        generation_config.json.
        """
        sampling = self.sampling
        return {
            "model": self.model,
            "prompt": [list(prompt) for prompt in self.prompts],
            "n": self.number,
            "max_tokens": self.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.seed,
            "ignore_eos": True,  # only these tokens end an answer
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }

    @property
    def most_bytes(self) -> int:
        """Of an answer that fits the request."""
        tokens = sum(len(prompt) + self.max_tokens for prompt in self.prompts)
        return _CONTROL_BYTES + _BYTES_PER_TOKEN * tokens * self.number


@dataclass(frozen=True)
class ServerAnswer:
    """An answer of a server.

    Attributes:
        tokens: with the stop token that ended it.
        log_probs: of each of them.
        ended: by a stop token, or by the maximum length.
    """

    tokens: list[int]
    log_probs: list[float]
    ended: Literal["stop", "length"]


class VllmServer:
    """The server at a URL."""

    def __init__(
        self, client: HttpClient, *, answer_s: float, vocabulary: int, on_wait: Callable[[], None]
    ) -> None:
        """Nothing is sent yet.

        Args:
            client: of its URL.
            answer_s: time for sampled answers.
            vocabulary: number of tokens of the model.
            on_wait: called about twice a second while one waits.
        """
        self._client, self._answer_s = client, answer_s
        self._vocabulary, self._on_wait = vocabulary, on_wait

    def models(self) -> ServedModel:
        """The models that it serves.

        Raises:
            ServerAway: if it does not answer.
            ServerRefused: if it refuses, e.g. the key.
            BadAnswer: if it is not such a server.
        """
        reply = self._call("GET", "/v1/models", deadline_s=_QUICK_S)
        try:
            cards = reply.json()["data"]
            bases = [card for card in cards if card.get("parent") is None]
            adapters = frozenset(str(card["id"]) for card in cards if card.get("parent") is not None)
            length = bases[0].get("max_model_len")
            return ServedModel(str(bases[0]["id"]), None if length is None else int(length), adapters)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise BadAnswer(f"GET /v1/models: {reply.words}") from None

    def can_load(self) -> bool:
        """Whether it has the routes that load adapters."""
        try:
            self._call(
                "POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}, deadline_s=_QUICK_S
            )
        except ServerRefused as error:
            return error.status not in (404, 405)
        return True

    def load(self, name: str, path: str) -> None:
        """Loads an adapter from a directory that the server sees.

        Raises:
            ServerAway: if it does not answer.
            ServerRefused: if it cannot load it.
        """
        self._call(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, deadline_s=_LOAD_S
        )

    def unload(self, name: str) -> None:
        """Unloads an adapter; nothing happens if it is not loaded.

        Raises:
            ServerAway: if it does not answer.
            ServerRefused: if it refuses.
        """
        try:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, deadline_s=_QUICK_S)
        except ServerRefused as error:
            if error.status != 404:
                raise

    def start(self, request: SamplingRequest) -> Future[Reply]:
        """Begins to sample; `answers` takes what comes."""
        return self._client.start(
            "POST",
            "/v1/completions",
            request.body(),
            deadline_s=self._answer_s,
            most_bytes=request.most_bytes,
        )

    def answers(self, request: SamplingRequest, future: Future[Reply]) -> list[ServerAnswer]:
        """The answers to the prompts of a request that has ended, those to a prompt after each
        other.

        Raises:
            ServerAway: if there are none, or the adapter is not loaded.
            ServerRefused: if it refuses.
            BadAnswer: if they are not answers to that request.
        """
        reply = _reply_of(future)
        if reply.status == 404:
            raise ServerAway(reply.words)  # restarted: it has lost the adapter
        if reply.status >= 500:
            raise ServerAway(f"HTTP {reply.status}: {reply.words}")
        return parse_answers(_accepted(reply), request, vocabulary=self._vocabulary)

    def complete(self, request: SamplingRequest) -> list[ServerAnswer]:
        """The answers to a request, see `answers`."""
        return self.answers(request, self._wait(self.start(request)))

    def start_look(self) -> Future[Reply]:
        """Begins to look whether the server lives; `lives` takes what comes."""
        return self._client.start("GET", "/health", deadline_s=_QUICK_S, most_bytes=_CONTROL_BYTES)

    def lives(self, look: Future[Reply]) -> None:
        """Takes the end of a look.

        Raises:
            ServerAway: if it does not live.
        """
        reply = _reply_of(look)
        if reply.status >= 500:
            raise ServerAway(f"HTTP {reply.status}: {reply.words or 'its engine is dead'}")

    def abort(self, requests: Sequence[Future[Reply]]) -> None:
        """Ends requests without their answers."""
        left = [one for one in requests if not one.cancel()]
        while wait(left, timeout=0.0).not_done:
            self._client.abort()  # also those that have just connected
            self.pause(_TICK_S)

    def pause(self, seconds: float) -> None:
        """Waits."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._on_wait()
            time.sleep(min(left, _TICK_S))

    def _call(
        self, method: str, path: str, body: dict[str, object] | None = None, *, deadline_s: float
    ) -> Reply:
        future = self._client.start(method, path, body, deadline_s=deadline_s, most_bytes=_CONTROL_BYTES)
        return _accepted(_reply_of(self._wait(future)))

    def _wait(self, future: Future[Reply]) -> Future[Reply]:
        while not wait([future], timeout=_TICK_S).done:
            self._on_wait()
        return future


def _reply_of(future: Future[Reply]) -> Reply:
    try:
        reply = future.result()
    except NoAnswer as error:
        raise ServerAway(str(error), waited_s=error.waited_s) from None
    except TooLong as error:
        raise BadAnswer(str(error)) from None
    if reply.status in _BUSY:
        raise ServerAway(f"HTTP {reply.status}: {reply.words}")
    return reply


def _accepted(reply: Reply) -> Reply:
    if reply.status != 200:
        raise ServerRefused(reply.status, f"HTTP {reply.status}: {reply.words}")
    return reply


def parse_answers(reply: Reply, request: SamplingRequest, *, vocabulary: int) -> list[ServerAnswer]:
    """The answers of a reply; they are from another program, so all of them is checked.

    Args:
        reply: with status 200.
        request: that it answers.
        vocabulary: number of tokens of the model.

    Raises:
        BadAnswer: if they do not fit the request.
    """
    try:
        choices = reply.json()["choices"]
        by_index = {choice["index"]: choice for choice in choices}
        numbers = range(len(request.prompts) * request.number)
        if len(choices) != len(numbers) or set(by_index) != set(numbers):
            raise BadAnswer(f"{len(choices)} answers instead of {len(numbers)}")
        return [
            _answer(by_index[number], request.prompts[number // request.number], request, vocabulary)
            for number in numbers
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        words = one_line(f"{type(error).__name__}: {error}", limit=120)
        raise BadAnswer(f"POST /v1/completions: {words}: {reply.words}") from None


def _answer(
    choice: dict[str, Any], prompt: Sequence[int], request: SamplingRequest, vocabulary: int
) -> ServerAnswer:
    tokens, log_probs, ended = (
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        choice["finish_reason"],
    )
    stops = [token in request.stop_ids for token in tokens]
    echoed = choice.get("prompt_token_ids")
    rules = [
        (echoed is not None and list(echoed) != list(prompt), "it answers a different prompt"),
        (
            not all(type(token) is int and 0 <= token < vocabulary for token in tokens),
            "a token is not in the vocabulary",
        ),
        (len(tokens) != len(log_probs), f"{len(log_probs)} log-probabilities of {len(tokens)} tokens"),
        (not all(_is_log_prob(value) for value in log_probs), "a log-probability is above 0, NaN or missing"),
        (
            not 1 <= len(tokens) <= request.max_tokens,
            f"{len(tokens)} tokens; the limit is {request.max_tokens}",
        ),
        (any(stops[:-1]), "it continues after a stop token"),
        (ended not in ("stop", "length"), f"it ended with {ended!r}"),
        (ended == "stop" and not any(stops), "it ended without a stop token"),
        (ended == "length" and len(tokens) < request.max_tokens, "it ended before the maximum length"),
    ]
    for is_wrong, text in rules:
        if is_wrong:
            raise BadAnswer(one_line(text, limit=200))
    return ServerAnswer(
        list(tokens), [float(value) for value in log_probs], "stop" if stops[-1] else "length"
    )


def _is_log_prob(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= _ROUNDING
