"""Many streams at once. Run: pytest tests/front/serve/test_load.py"""

from tests.front.serve.conftest import Served

STREAMS = 256
TOKENS = 24


def test_256_streams_at_once_get_the_answers_that_one_request_alone_gets(server: Served) -> None:
    beginning = "call me on tuesday, what day is it today? " * 12  # more tokens than the cache needs
    prompts = [f"{beginning}{number}" for number in range(4)]
    alone = [server.post(prompt=prompt, max_tokens=TOKENS).body["choices"][0]["text"] for prompt in prompts]
    streams = [
        server.stream(prompt=prompts[number % 4], max_tokens=TOKENS, stream_options={"include_usage": True})
        for number in range(STREAMS)
    ]
    texts, tokens = [], []
    for stream in streams:
        *pieces, usage = stream.events()
        texts.append("".join(piece["choices"][0]["text"] for piece in pieces))
        tokens.append(usage["usage"]["completion_tokens"])
    assert len(set(alone)) == len(prompts)
    assert texts == [alone[number % 4] for number in range(STREAMS)]
    assert tokens == [TOKENS] * STREAMS
