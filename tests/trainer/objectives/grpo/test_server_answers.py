"""Answers of a server over HTTP: each has a deadline and a limit, and nothing in them is trusted.

Run: pytest tests/trainer/objectives/grpo/test_server_answers.py
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.objectives.samplers.http_client import HttpClient, NoAnswer, Reply, TooLong
from unisono.trainer.objectives.samplers.vllm_server import BadAnswer, SamplingRequest, parse_answers
from unisono.trainer.plan.task_requests import SamplingParams

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
REQUEST = SamplingRequest("m", [[5, 6], [7]], 2, 3, SamplingParams(temperature=1.0, seed=4), frozenset({1}))


@contextmanager
def server(*, sends: bytes, drips: bool = False) -> Iterator[str]:
    """The address of a server that sends bytes to its first client, and then a byte now and then, or
    nothing.
    """
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                client.sendall(sends)
                while not over.wait(0.05):
                    if drips:
                        try:
                            client.sendall(b"x")
                        except OSError:
                            return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("sends", "drips"),
    [(b"", False), (_HEAD, False), (_HEAD, True), (b"HTTP/1.1 200 OK\r\nA: ", True)],
    ids=["nothing", "no body", "a body that drips", "headers that drip"],
)
def test_a_deadline_is_that_of_the_whole_answer(sends: bytes, *, drips: bool) -> None:
    with server(sends=sends, drips=drips) as url:
        client = HttpClient(url, None)
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="no answer within 3 s") as refusal:
            client.start("GET", "/", deadline_s=3, most_bytes=1 << 20).result()
        assert time.monotonic() - began < 20
        assert refusal.value.waited_s == 3
        client.close()


def test_an_answer_is_read_up_to_its_limit() -> None:
    with server(sends=_HEAD + b"x" * 2000) as url:
        client = HttpClient(url, None)
        with pytest.raises(TooLong, match="more than 1,000 bytes"):
            client.start("GET", "/", deadline_s=30, most_bytes=1000).result()
        client.close()


def test_requests_that_are_given_up_end_at_once() -> None:
    with server(sends=_HEAD) as url:
        client = HttpClient(url, None)
        future = client.start("GET", "/", deadline_s=60, most_bytes=1 << 20)
        began = time.monotonic()
        while not future.done() and time.monotonic() - began < 30:
            client.abort()
        with pytest.raises(NoAnswer):
            future.result()
        client.close()


def choice(index: int, tokens: list[int], **changes: Any) -> dict[str, Any]:
    values = {"token_logprobs": [-0.5] * len(tokens)}
    ended = "stop" if tokens[-1:] == [1] else "length"
    return {"index": index, "token_ids": tokens, "logprobs": values, "finish_reason": ended} | changes


GOOD = [choice(0, [3, 4, 5]), choice(1, [3, 1]), choice(2, [1]), choice(3, [9, 9, 1])]


def parsed(choices: Any) -> list[Any]:
    return list(parse_answers(Reply(200, json.dumps({"choices": choices}).encode()), REQUEST, vocabulary=10))


def test_answers_come_in_the_order_of_the_prompts_whatever_that_of_the_reply() -> None:
    answers = parsed(GOOD[::-1])
    assert [answer.tokens for answer in answers] == [[3, 4, 5], [3, 1], [1], [9, 9, 1]]
    assert [answer.ended for answer in answers] == ["length", "stop", "stop", "stop"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": [3, 4, 10]}, "not in the vocabulary"),
        ({"token_ids": [3, True, 4]}, "not in the vocabulary"),
        ({"token_ids": [3, 4]}, "3 log-probabilities of 2 tokens"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan"), -1.0]}}, "above 0, NaN or missing"),
        ({"logprobs": {"token_logprobs": [-1.0, 0.5, -1.0]}}, "above 0, NaN or missing"),
        ({"logprobs": {"token_logprobs": [-1.0, None, -1.0]}}, "above 0, NaN or missing"),
        ({"token_ids": [3, 1, 4]}, "continues after a stop token"),
        ({"finish_reason": "abort"}, "it ended with 'abort'"),
        ({"finish_reason": "stop"}, "without a stop token"),
        (choice(0, [3, 4], finish_reason="length"), "before the maximum length"),
        (choice(0, [3, 4, 5, 6]), "4 tokens; the limit is 3"),
        (choice(0, []), "0 tokens"),
        ({"prompt_token_ids": [5]}, "answers a different prompt"),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_fit_is_refused_with_what_is_wrong(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadAnswer, match=words):
        parsed([GOOD[0] | changes, *GOOD[1:]])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["index", "token_ids", "logprobs", "token_logprobs", "finish_reason"]), inner
        )
    ),
    max_leaves=12,
)


@given(
    _JSON, st.sampled_from(["index", "token_ids", "logprobs", "finish_reason", "prompt_token_ids", "choices"])
)
def test_nothing_that_a_server_sends_is_an_exception_of_ours(value: Any, key: str) -> None:
    choices = value if key == "choices" else [GOOD[0] | {key: value}, *GOOD[1:]]
    try:
        answers = parsed(choices)
    except BadAnswer:
        return
    assert all(0 <= token < 10 for answer in answers for token in answer.tokens)
