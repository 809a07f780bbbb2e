"""Log-probabilities, echoes, several answers, and what changes how tokens are chosen; against
transformers on the same model.

Run: pytest tests/front/serve/test_scores.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, Served

pytestmark = pytest.mark.slow
TEXT = "what day is it, call me"
CLOSE = 2e-4  # of log-probabilities in float32, computed in other batches
MESSAGES: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def reference(endless: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(endless).eval()


@pytest.fixture(scope="module")
def tokenizer(endless: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(endless)


def log_probs(reference: Any, ids: list[int]) -> torch.Tensor:
    """(L, V) of the next token after each."""
    with torch.no_grad():
        return torch.as_tensor(reference(torch.tensor([ids])).logits[0].float().log_softmax(-1))


def complete(served: Served, prompt: Any = TEXT, **options: Any) -> Any:
    settings: Any = {"temperature": 0, "max_tokens": 6} | options
    return served.client.completions.create(model=served.model, prompt=prompt, **settings)


def chat(served: Served, messages: Any = MESSAGES, **options: Any) -> Any:
    settings: Any = {"temperature": 0, "max_tokens": 6} | options
    return served.client.chat.completions.create(model=served.model, messages=messages, **settings)


def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(
    server: Served, reference: Any, tokenizer: Any
) -> None:
    prompts = [tokenizer(text)["input_ids"] for text in (TEXT, "me", TEXT + " on tuesday" * 40)]
    for most in (0, 3):
        answer = complete(server, prompts, max_tokens=most, echo=True, logprobs=2)
        for choice, ids in zip(answer.choices, prompts, strict=True):
            shown = choice.logprobs
            assert choice.text.startswith(tokenizer.decode(ids))
            assert len(shown.tokens) == len(shown.text_offset) == len(ids) + most
            assert shown.token_logprobs[0] is shown.top_logprobs[0] is None
            wanted = log_probs(reference, ids)
            for place, token in enumerate(ids[1:], 1):
                assert abs(shown.token_logprobs[place] - float(wanted[place - 1, token])) < CLOSE
                assert abs(max(shown.top_logprobs[place].values()) - float(wanted[place - 1].max())) < CLOSE
                assert shown.tokens[place] in shown.top_logprobs[place]
            for place in range(len(ids), len(ids) + most):  # greedy: the most likely ones
                assert shown.token_logprobs[place] == max(shown.top_logprobs[place].values())
        assert answer.usage.completion_tokens == most * len(prompts)


def test_echoes_give_the_loss_of_eval(server: Served, tokenizer: Any, tmp_path: Path) -> None:
    """As lm-eval asks over local-completions: tokens, one more token, and log-probabilities."""
    rows = [("what day is it", "tuesday"), ("call me", "on tuesday, call me"), ("me", "what")]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in rows)
    )
    command = [
        sys.executable,
        "-m",
        "unisono",
        "eval",
        server.model,
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--json",
    ]
    done = front_server.run(command, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    evaluated = json.loads(done.stdout)
    total, count = 0.0, 0
    for one, other in rows:
        context = tokenizer(f"<|user|>{one}<|end|><|assistant|>")["input_ids"]
        answer = tokenizer(other + "<|end|>")["input_ids"]
        choice = complete(server, [context + answer], max_tokens=1, logprobs=1, echo=True).choices[0]
        values = choice.logprobs.token_logprobs[len(context) : -1]
        total, count = total - sum(values), count + len(values)
    assert count == evaluated["loss_tokens"]
    assert total / count == pytest.approx(evaluated["loss"], rel=1e-5)


def test_an_echoed_text_is_the_text(server: Served) -> None:
    plain, echoed = complete(server), complete(server, echo=True)
    assert echoed.choices[0].text == TEXT + plain.choices[0].text
    chunks = list(complete(server, echo=True, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text
    whole = complete(server, echo=True, logprobs=1).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)


def test_a_chat_has_log_probabilities_whole_and_streamed(
    server: Served, reference: Any, tokenizer: Any
) -> None:
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    answer = chat(server, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    ids = list(prompt)
    for token in content:
        wanted = log_probs(reference, ids)[-1]
        best = wanted.topk(3)
        assert abs(token.logprob - float(best.values[0])) < CLOSE
        for one, value in zip(token.top_logprobs, best.values.tolist(), strict=True):
            assert abs(one.logprob - value) < CLOSE
        assert bytes(token.bytes).decode() == token.token
        ids.append(int(best.indices[0]))
    assert len(content) == 6
    chunks = list(chat(server, logprobs=True, top_logprobs=3, stream=True))
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content or ()]
    assert streamed == content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
    assert chat(server).choices[0].logprobs is None


def test_biases_and_penalties_move_the_choice(server: Served, reference: Any, tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    greedy: list[int] = []
    seen = torch.zeros(len(tokenizer))
    for _ in range(12):  # presence and frequency as OpenAI defines them, of the answer's tokens
        logits = log_probs(reference, ids + greedy)[-1] - 1.5 * seen - 1.0 * (seen > 0)
        greedy.append(int(logits.argmax()))
        seen[greedy[-1]] += 1
    answer = complete(server, max_tokens=12, presence_penalty=1.0, frequency_penalty=1.5)
    assert answer.choices[0].text == tokenizer.decode(greedy)
    letter = tokenizer.convert_tokens_to_ids("Q")
    only = complete(server, logit_bias={str(letter): 100}, logprobs=0)
    assert only.choices[0].text == "Q" * 6
    assert only.choices[0].logprobs.token_logprobs[0] < -1  # of the model, not of the bias
    first = complete(server, max_tokens=1, logprobs=1).choices[0]
    (best,) = log_probs(reference, ids)[-1].topk(1).indices.tolist()
    without = complete(server, max_tokens=1, logit_bias={str(best): -100}, logprobs=0).choices[0]
    assert without.logprobs.tokens != first.logprobs.tokens


def test_min_p_leaves_likely_tokens(server: Served, reference: Any, tokenizer: Any) -> None:
    """With 1 only the most likely token is left, at any temperature."""
    wanted = complete(server, max_tokens=12).choices[0].text
    options: Any = {"max_tokens": 12, "temperature": 2, "seed": 1}
    assert complete(server, extra_body={"min_p": 1.0}, **options).choices[0].text == wanted
    assert complete(server, **options).choices[0].text != wanted
    least = 0.1
    drawn = complete(
        server, n=16, max_tokens=1, temperature=1, seed=2, extra_body={"min_p": least}, logprobs=0
    )
    values = [choice.logprobs.token_logprobs[0] for choice in drawn.choices]
    top = float(log_probs(reference, tokenizer(TEXT)["input_ids"])[-1].max())
    assert all(value >= top + torch.tensor(least).log() - CLOSE for value in values)
    assert len(set(values)) > 1


def test_several_answers_are_numbered_and_differ(server: Served) -> None:
    options: Any = {"n": 3, "temperature": 1, "seed": 5}
    answer = chat(server, **options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens == chat(server).usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in chat(server, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    raw = complete(server, [TEXT, "me"], **options)
    assert [choice.index for choice in raw.choices] == [*range(6)]


def test_the_best_of_several_is_the_most_likely(server: Served) -> None:
    options: Any = {"temperature": 1, "seed": 5, "logprobs": 0}
    every = complete(server, n=8, **options).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) / 6 for choice in every}
    best = complete(server, n=2, best_of=8, **options).choices
    assert [choice.text for choice in best] == sorted(means, key=lambda text: -means[text])[:2]
    assert complete(server, best_of=8, temperature=1, seed=5).choices[0].logprobs is None


def test_a_prefilled_answer_is_continued(server: Served, tokenizer: Any) -> None:
    whole = chat(server, logprobs=True)
    begun = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False) + "call"
    wanted = complete(server, begun, max_tokens=6).choices[0].text
    continued = chat(
        server,
        [*MESSAGES, {"role": "assistant", "content": "call"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert continued.choices[0].message.content == wanted
    assert wanted != whole.choices[0].message.content


@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        ("completions", {"suffix": "end"}, "suffix"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"n": 3, "best_of": 2}, "best_of"),
        ("completions", {"best_of": 2, "stream": True}, "best_of"),
        ("completions", {"prompt": ["a"] * 9, "n": 2}, "n"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logit_bias": {"99999": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"min_p": 1.5}, "min_p"),
        ("completions", {"presence_penalty": 3}, "presence_penalty"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("chat", {"continue_final_message": True}, "messages"),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("chat", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_has_no_meaning_is_refused_with_its_parameter(
    server: Served, path: str, options: dict[str, Any], param: str
) -> None:
    if path == "chat":
        reply = server.post("/v1/chat/completions", **{"messages": MESSAGES, **options})
    else:
        reply = server.post(**options)
    assert (reply.status, reply.body["error"]["param"]) == (400, param), reply.body
