"""`unisono serve` as clients see it: answers, errors, keys.

Run: pytest tests/front/serve/test_serve.py
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, Serve, Served

QUESTIONS = ["what day is it", "call me", "today", "is it tuesday or not", "me", "on", "day day day", "what"]
TOOL = {"type": "function", "function": {"name": "find_day", "description": "of the week", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
pytestmark = pytest.mark.slow


def unisono(*words: object, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "unisono", *map(str, words)]
    return front_server.run(command, timeout=LIMIT_S, env=env)


def chat(served: Served, question: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    settings: Any = {"temperature": 0, "max_tokens": 24} | options
    return served.client.chat.completions.create(model=served.model, messages=messages, **settings)


def generated(served: Served, tmp_path: Path, *options: object) -> list[str]:
    """The answers of `unisono generate`."""
    (tmp_path / "prompts.txt").write_text("\n".join(QUESTIONS) + "\n")
    done = unisono(
        "generate", served.model, "--file", tmp_path / "prompts.txt", "--max-tokens", 24, "--json", *options
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["answer"] for line in done.stdout.splitlines()]


def test_answers_alone_at_once_and_streamed_are_those_of_generate(server: Served, tmp_path: Path) -> None:
    wanted = generated(server, tmp_path)
    assert len(set(wanted)) > 4
    assert [chat(server, q).choices[0].message.content for q in QUESTIONS] == wanted
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda q: chat(server, q), QUESTIONS))
    assert [answer.choices[0].message.content for answer in at_once] == wanted
    assert {answer.choices[0].finish_reason for answer in at_once} == {"length"}
    for question, text in zip(QUESTIONS[:2], wanted, strict=False):
        chunks = list(chat(server, question, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 24
    raw = server.client.completions.create(model=server.model, prompt=QUESTIONS, max_tokens=24, temperature=0)
    assert [choice.text for choice in raw.choices] == generated(server, tmp_path, "--raw")
    assert raw.usage is not None
    assert raw.usage.completion_tokens == 24 * len(QUESTIONS)


def test_stop_texts_seeds_and_content_parts_mean_what_they_mean_elsewhere(server: Served) -> None:
    whole = chat(server, "what day is it").choices[0].message.content
    stop = whole[9:12]
    assert stop.strip()
    for stream in (False, True):
        cut = chat(server, "what day is it", stop=[stop, "never in it"], stream=stream)
        if stream:
            chunks = list(cut)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = cut.choices[0].message.content, cut.choices[0].finish_reason
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"
    drawn = [
        chat(server, "call me", temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "call "}, {"type": "text", "text": "me"}]}
    ]
    same = server.client.chat.completions.create(
        model=server.model, messages=parts, temperature=0, max_tokens=24
    )
    assert same.choices[0].message.content == chat(server, "call me").choices[0].message.content


def test_tools_reach_the_template(server: Served) -> None:
    with_tools = chat(server, "call me", tools=[TOOL])
    without = chat(server, "call me", tools=[TOOL], tool_choice="none")
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 10
    assert without.usage.prompt_tokens == chat(server, "call me").usage.prompt_tokens


def test_the_model_is_listed(server: Served) -> None:
    assert [model.id for model in server.client.models.list()] == [server.model]
    assert server.client.models.retrieve(server.model).id == server.model


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"model": "gpt-4"}, 404, "model"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"top_p": "high"}, 400, "top_p"),
        ({"n": 17}, 400, "n"),
        ({"stop": [""]}, 400, "stop"),
        ({"extra_body": {"beams": 4}}, 400, "beams"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "Zx?" * 4000}]}, 413, "messages"),
    ],
)
def test_a_bad_request_is_refused_with_its_parameter(
    server: Served, options: dict[str, Any], status: int, param: str
) -> None:
    import openai

    request: Any = {"model": server.model, "messages": [{"role": "user", "content": "hello"}]} | options
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            server.client.chat.completions.create(**request, stream=stream)
        assert caught.value.status_code == status
        assert caught.value.param == param
        assert caught.value.body["message"]  # type: ignore[index]


def test_what_is_no_request_is_refused_in_the_same_form(server: Served) -> None:
    for path, body, status in (
        ("/v1/completions", {"prompt": [10_000]}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/embeddings", {}, 404),
        ("/v1/models", {}, 405),
    ):
        reply = server.post(path, **body)
        assert reply.status == status
        assert reply.body["error"]["type"] == "invalid_request_error"
    assert "--adapter" in server.post("/v1/load_lora_adapter").body["error"]["message"]


# Of OpenAI's and vLLM's clients: the status decides which exception they raise.
STATUSES = [
    ("POST", "/v1/completions", "{", {}, 400, None),
    ("POST", "/v1/completions", "[]", {}, 400, None),
    ("POST", "/v1/completions", "{}", {}, 400, "model"),
    ("POST", "/v1/completions", '{"model": "MODEL"}', {}, 400, "prompt"),
    ("POST", "/v1/completions", '{"model": "MODEL", "prompt": "a", "max_tokens": -1}', {}, 400, "max_tokens"),
    (
        "POST",
        "/v1/completions",
        '{"model": "MODEL", "prompt": "a", "max_tokens": "x"}',
        {},
        400,
        "max_tokens",
    ),
    ("POST", "/v1/completions", '{"model": "MODEL", "prompt": "a", "unknown": 1}', {}, 400, "unknown"),
    ("POST", "/v1/completions", '{"model": "MODEL", "prompt": "a", "n": 17}', {}, 400, "n"),
    ("POST", "/v1/chat/completions", '{"model": "MODEL"}', {}, 400, "messages"),
    ("POST", "/v1/chat/completions", '{"model": "MODEL", "messages": []}', {}, 400, "messages"),
    (
        "POST",
        "/v1/chat/completions",
        '{"model": "MODEL", "messages": [{"role": "judge"}]}',
        {},
        400,
        "messages",
    ),
    ("POST", "/v1/completions", '{"model": "other", "prompt": "a"}', {}, 404, "model"),
    ("GET", "/v1/models/other", "", {}, 404, "model"),
    ("GET", "/v1/nothing", "", {}, 404, None),
    ("POST", "/v1/embeddings", "{}", {}, 404, None),
    ("POST", "/v1/score", "{}", {}, 404, None),
    ("POST", "/v1/load_lora_adapter", "{}", {}, 404, None),
    ("GET", "/v1/completions", "", {}, 405, None),
    ("DELETE", "/v1/models", "", {}, 405, None),
    ("POST", "/v1/completions", '{"model": "MODEL", "prompt": "LONG"}', {}, 413, "prompt"),
    (
        "POST",
        "/v1/completions",
        '{"model": "MODEL", "prompt": "a"}',
        {"content_type": "text/plain"},
        415,
        None,
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "param"), STATUSES)
def test_an_error_has_its_status_and_openais_form(
    server: Served, method: str, path: str, body: str, headers: dict[str, str], status: int, param: str | None
) -> None:
    text = body.replace("MODEL", server.model).replace("LONG", "day " * 9_000)
    reply = server.send(path, text, method=method, **headers)
    assert reply.status == status, reply
    error = reply.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


def test_curl_gets_an_answer_and_a_stream(server: Served) -> None:
    assert shutil.which("curl"), "needed by this test"
    body = json.dumps({"model": server.model, "prompt": "what", "max_tokens": 3, "temperature": 0})
    words = ["curl", "--silent", "--show-error", "--json"]
    done = subprocess.run(
        [*words, body, f"{server.url}/v1/completions"], capture_output=True, text=True, check=True
    )
    text = json.loads(done.stdout)["choices"][0]["text"]
    streamed = subprocess.run(
        [*words, body.replace("{", '{"stream": true, ', 1), f"{server.url}/v1/completions"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *events, last = [line for line in streamed.stdout.splitlines() if line]
    assert last == "data: [DONE]"
    assert "".join(json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events) == text
    broken = subprocess.run(
        [*words, "{", f"{server.url}/v1/completions"], capture_output=True, text=True, check=True
    )
    assert "not valid JSON" in json.loads(broken.stdout)["error"]["message"]


def test_a_web_page_reaches_no_server_without_a_key(server: Served) -> None:
    for header in ("Host: evil.example", "Origin: https://evil.example"):
        done = subprocess.run(
            ["curl", "--silent", "--header", header, f"{server.url}/v1/models"],
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout)["error"]["code"] == "origin_refused"


def test_each_loopback_address_is_served_without_a_key(serve: Serve, endless: Path) -> None:
    one = serve(endless, "--host", "127.0.0.2")
    assert one.url.startswith("http://127.0.0.2:")
    chat(one, "call me")


def test_only_a_valid_key_is_served_and_the_model_does_not_see_it(
    serve: Serve, endless: Path, tmp_path: Path
) -> None:
    import openai

    file = tmp_path / "keys"
    file.write_text("# of two clients\nfirst-key\nsecond-key\n")
    file.chmod(0o600)
    one = serve(endless, "--key-file", file, "--host", "0.0.0.0")
    one.url = one.url.replace("0.0.0.0", "127.0.0.1")
    for key in ("", "first", "# of two clients"):
        with pytest.raises(openai.AuthenticationError) as caught:
            replace(one, key=key or "x").client.models.list()
        assert caught.value.code == "invalid_api_key"
    for key in ("first-key", "second-key"):
        chat(replace(one, key=key), "call me")
    assert one.end() == 0
    other = serve(endless, env={**os.environ, "UNISONO_SERVE_KEY": "of-the-environment"})
    chat(replace(other, key="of-the-environment"), "call me")
    assert "UNISONO_SERVE_KEY" not in other.task().environ()
    with pytest.raises(openai.AuthenticationError):
        chat(other, "call me")


def test_a_start_that_cannot_be_is_refused_before_the_model_is_loaded(
    server: Served, endless: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("\n")
    for words, said in (
        ([endless, "--host", "0.0.0.0"], "no key for the address 0.0.0.0"),
        ([endless, "--port", server.address[1]], f"process {server.process.pid}"),
        ([endless, "--key-file", tmp_path / "empty"], "there is no key in"),
        ([endless, "--key-file", tmp_path / "missing"], "cannot be read"),
        ([tmp_path / "nothing"], "nothing"),
    ):
        done = unisono("serve", *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "fix: " in done.stderr
        assert "Traceback" not in done.stderr


def test_without_the_extra_the_command_says_how_to_install_it() -> None:
    script = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'uvicorn' else find(name, *rest)\n"
        "from unisono.front.cli.app import main; main(['serve', 'builtin:tiny'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'unisono[board]'" in done.stderr
