"""What happens to answers when clients go, places run out, or a process ends.

Run: pytest tests/front/serve/test_ends.py
"""

import asyncio
import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.front.serve.conftest import LIMIT_S, Serve, Served, Stream, wait_until
from unisono.base.errors import RankDied, UnisonoError
from unisono.front.serve.model_process import (
    RESTARTS,
    ROWS,
    STOPPED_S,
    WAITING,
    ModelProcess,
    ModelSilence,
    RestartLimit,
)
from unisono.front.serve.protocol import ApiError
from unisono.guard.supervise import fork_server
from unisono.guard.supervise.child_process import Programs
from unisono.trainer.plan.talk_messages import Answered, PromptRequest
from unisono.trainer.plan.task_requests import RequestedModel, SamplingParams

pytestmark = pytest.mark.slow
LONG = 6000  # tokens: longer than any of these tests takes


def text_of(event: dict[str, Any]) -> str:
    return str(event["choices"][0]["text"])


def next_event(stream: Stream) -> dict[str, Any]:
    return next(stream.events())


def test_a_client_that_goes_frees_its_place_and_a_full_queue_is_refused(serve: Serve, endless: Path) -> None:
    served = serve(endless)
    running = [served.stream(max_tokens=LONG) for _ in range(ROWS)]
    for stream in running:
        assert text_of(next_event(stream)) is not None
    waiting = [served.stream(max_tokens=LONG) for _ in range(WAITING)]
    wait_until(lambda: served.post(max_tokens=1).status == 429)
    reply = served.post(max_tokens=1)
    assert reply.status == 429
    assert int(reply.retry_after or 0) >= 1
    error = reply.body["error"]
    assert error["type"] == "rate_limit_error"
    assert f"{WAITING} requests wait" in error["message"]
    running[3].close()
    assert text_of(next_event(waiting[0])) is not None  # while the others are still being answered
    assert text_of(next_event(running[0])) is not None
    half = waiting[1].connection  # one that waits and goes frees its place in the queue
    half.shutdown(socket.SHUT_RDWR)
    for stream in (*running[:3], *running[4:], waiting[0], *waiting[2:]):
        stream.close()
    assert served.post(max_tokens=1).status == 200
    assert served.end() == 0


def test_connections_that_say_nothing_delay_nobody_and_are_dropped(serve: Serve, endless: Path) -> None:
    served = serve(endless)
    silent = [served.connect() for _ in range(5)]
    silent[0].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le")
    silent[1].sendall(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert silent[1].recv(100).startswith(b"HTTP/1.1 200")
    silent[1].sendall(b"GET /v1/mod")  # and then no more
    silent[2].sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")  # TLS
    assert served.post(max_tokens=2).status == 200
    for connection in silent[:4]:
        while connection.recv(4096):
            pass
    silent[4].close()
    served.connect(
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type:"
        " application/json\r\ncontent-length: 5000\r\n\r\n{"
    )
    assert served.end() == 0  # not delayed by the body that never comes


def test_sigterm_completes_running_answers_and_refuses_others(serve: Serve, endless: Path) -> None:
    served = serve(endless)
    stream = served.stream(max_tokens=800)
    first = next_event(stream)
    served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refused(served))
    events = list(stream.events())
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(LIMIT_S) == 0
    assert text_of(first) is not None


def refused(served: Served) -> bool:
    reply = served.post(max_tokens=1)
    if reply.status == 503:
        assert reply.body["error"]["code"] == "ending"
    return reply.status == 503


@pytest.mark.parametrize("second", [False, True])
def test_answer_beyond_the_grace_or_a_second_signal_is_cut_with_an_error(
    serve: Serve,
    endless: Path,
    second: bool,  # noqa: FBT001
) -> None:
    served = serve(endless, "--grace", 100 if second else 0.2)
    stream = served.stream(max_tokens=8000)
    next_event(stream)
    served.process.send_signal(signal.SIGTERM)
    if second:
        wait_until(lambda: refused(served))
        served.process.send_signal(signal.SIGTERM)
    *_, last = stream.events()
    assert last["error"]["code"] == "ending"
    assert served.process.wait(LIMIT_S) == 0


def kill_while_answering(served: Served) -> None:
    """Kills the process of the model in the middle of a stream, which ends with an error."""
    stream = served.stream(max_tokens=LONG)
    next_event(stream)
    served.task().kill()
    *_, last = stream.events()
    assert last["error"]["code"] == "model_lost"


def test_model_that_dies_is_restarted_and_ends_the_server_if_too_often(serve: Serve, endless: Path) -> None:
    served = serve(endless)
    wanted = served.post(max_tokens=8).body["choices"][0]["text"]
    for _ in range(RESTARTS):
        task = served.task()
        kill_while_answering(served)
        again = served.post(max_tokens=8)  # waits for the restart
        assert again.body["choices"][0]["text"] == wanted
        assert served.task().pid != task.pid
    kill_while_answering(served)
    out, err = served.process.communicate(timeout=LIMIT_S)
    assert served.process.returncode == 5
    verdict = json.loads(out.splitlines()[-1])["verdict"]
    assert verdict["cause"] == "rank_killed"
    assert "the process of the model" in verdict["summary"]
    assert "SIGKILL" in verdict["summary"]
    assert "row" not in " ".join(verdict["fix"]), "a server has no rows"
    assert err.count("WHAT ") == RESTARTS + 1
    assert err.count("loaded again") == RESTARTS


def test_deaths_of_long_ago_do_not_count() -> None:
    limit = RestartLimit(2, within_s=600.0)
    assert [limit.admit(now) for now in (0.0, 10.0, 20.0)] == [True, True, False]
    assert [limit.admit(now) for now in (605.0, 1300.0, 1301.0, 1302.0)] == [False, True, True, False]


def test_a_model_process_that_is_stopped_is_named_and_restarted(serve: Serve, endless: Path) -> None:
    served = serve(endless)
    wanted = served.post(max_tokens=8).body["choices"][0]["text"]
    served.task().send_signal(signal.SIGSTOP)  # while it waits for requests
    since = time.monotonic()
    asked = served.post(max_tokens=8)
    assert time.monotonic() - since < 5 * STOPPED_S
    assert (asked.status, asked.body["error"]["code"]) == (503, "model_lost")
    assert served.post(max_tokens=8).body["choices"][0]["text"] == wanted  # waits for the restart
    for _ in range(RESTARTS - 1):
        kill_while_answering(served)
        assert served.post(max_tokens=8).status == 200
    stream = served.stream(max_tokens=LONG)
    next_event(stream)
    task = served.task()
    task.send_signal(signal.SIGSTOP)  # while it computes
    *_, last = stream.events()
    assert last["error"]["code"] == "model_lost"
    out, err = served.process.communicate(timeout=LIMIT_S)
    assert served.process.returncode == 5
    assert not task.is_running()
    verdict = json.loads(out.splitlines()[-1])["verdict"]
    assert verdict["cause"] == "rank_stopped"
    assert STOPPED_S <= verdict["named_after_s"] < 5 * STOPPED_S
    assert err.count("WHAT ") == RESTARTS + 1
    assert "stopped (state T)" in err


HANGS = "tests.front.serve.hangs"
"""A task whose forward never returns for a prompt of one token; the session's server forks it."""


def test_a_forward_that_never_returns_is_named_with_its_stack(
    own_cache: None, endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(task=(sys.executable, "-m", HANGS))
    monkeypatch.setattr(fork_server, "_SERVED", (*fork_server._SERVED, HANGS))
    restarts: list[RankDied] = []

    async def serve_and_hang() -> UnisonoError | None:
        model = ModelProcess(
            RequestedModel(str(endless)),
            on_message=lambda _message: None,
            on_failure=lambda _failed: None,
            on_restart=restarts.append,
            programs=programs,
            patience_s=6.0,
            restarts=1,
        )
        model.start()
        try:
            await asyncio.wait_for(model.ready.wait(), LIMIT_S)
            for count in (2, 1, 2, 1):  # tokens; a prompt of one hangs
                question = PromptRequest(
                    prompt=[20] * count, max_tokens=4, sampling=SamplingParams(temperature=0.0)
                )
                (ask,) = model.submit([question])
                begun = await asyncio.wait_for(ask.begin(), LIMIT_S)
                assert begun.prompt_tokens == count
                if count == 1:
                    with pytest.raises(ApiError):
                        await asyncio.wait_for(anext(ask.pieces()), LIMIT_S)
                else:
                    pieces = [piece async for piece in ask.pieces()]
                    assert isinstance(pieces[-1], Answered)
            await asyncio.wait_for(model.ended.wait(), LIMIT_S)
            return model.failure
        finally:
            model.close()

    failure = asyncio.run(serve_and_hang())
    for error in (*restarts, failure):
        assert isinstance(error, RankDied)
        assert error.verdict is not None
        assert error.verdict.cause == "user_code_stuck"
        assert any("hangs.py:17 in step" in evidence.text for evidence in error.verdict.evidence)
    assert len(restarts) == 1


def test_patience_grows_with_the_longest_forward_but_not_with_front_stops() -> None:
    silence = ModelSilence(60.0)
    silence.pass_time(500.0)  # the front itself was stopped, or the machine slept
    assert silence.seconds <= 1.0
    for _ in range(40):
        silence.pass_time(0.5)
    silence.end()
    assert silence.seconds == 0
    assert silence.limit_s > 190
    assert ModelSilence(60.0).limit_s == 60


def test_no_process_outlives_the_server(serve: Serve, endless: Path) -> None:
    served = serve(endless)
    task = served.task()
    served.process.kill()
    served.process.wait(LIMIT_S)
    assert psutil.wait_procs([task], timeout=LIMIT_S)[1] == []


def test_the_official_client_sees_an_error_in_the_middle_of_a_stream(serve: Serve, endless: Path) -> None:
    import openai

    served = serve(endless)
    chunks = served.client.completions.create(
        model=served.model, prompt="what", max_tokens=LONG, temperature=0, stream=True
    )
    next(iter(chunks))
    served.task().kill()
    with pytest.raises(openai.APIError, match="process of the model ended"):
        list(chunks)
