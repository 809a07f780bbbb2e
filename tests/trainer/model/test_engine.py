"""Continuous batching: what an answer is does not depend on what is computed beside it.

Run: pytest tests/trainer/model/test_engine.py
"""

import random
from typing import Any

import pytest
import torch
import transformers

from unisono.trainer.model.engine import Engine, GeneratedAnswer, answer_prompts
from unisono.trainer.model.generate import draw_tokens, generate
from unisono.trainer.plan.task_requests import SamplingParams
from unisono.trainer.task.prompts import describe_failure

SHAPE: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "initializer_range": 0.3}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=8),
    "mistral with a sliding window": transformers.MistralConfig(**SHAPE, sliding_window=6),
    "gemma3 with sliding windows": transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6),
    "gpt2": transformers.GPT2Config(vocab_size=120, eos_token_id=None, bos_token_id=None, **GPT2),
    "gpt-neox": transformers.GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
}
STOP = {7, 8, 9}


def make_model(name: str) -> Any:
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    torch.set_rng_state(state)
    return model


def make_prompts(count: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(10, 120) for _ in range(draw.randint(1, 30))] for _ in range(count)]


def alone(model: Any, prompt: list[int], *, limit: int, sampling: SamplingParams) -> list[int]:
    (answer,) = generate(model, [prompt], max_new_tokens=limit, stop_ids=STOP, pad_id=0, sampling=sampling)
    return answer


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("together", "part"), [(True, None), (True, 7), (False, None)])
def test_answers_that_join_and_leave_are_those_that_generate_gives_alone(
    name: str, *, together: bool, part: int | None
) -> None:
    model, draw = make_model(name), random.Random(2)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_p=0.9, seed=4),
        SamplingParams(repetition_penalty=1.3),
    ]
    answers = [
        GeneratedAnswer(prompt, draw.randint(1, 25), draw.choice(samplings)) for prompt in make_prompts(12)
    ]
    engine = Engine(model, stop_ids=STOP, pad_id=0, rows=5, together=together, part_tokens=part)
    left = list(answers)
    with engine.ready():
        while left or not engine.is_idle:
            for _ in range(draw.randint(0, 3)):
                if left:
                    engine.add(left.pop())
            moved = engine.step()
            assert len(moved) <= 5 or not together
    for answer in answers:
        wanted = alone(model, list(answer.prompt), limit=answer.max_new_tokens, sampling=answer.sampling)
        assert answer.tokens == wanted
        assert answer.ended == ("length" if len(wanted) == answer.max_new_tokens else "stop")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("part", [None, 40])
def test_answers_to_the_same_prompt_read_it_once(name: str, part: int | None) -> None:
    model, prompts = make_model(name), make_prompts(4)
    samplings = [SamplingParams(temperature=0.9, seed=seed) for seed in range(3)]
    answers = [GeneratedAnswer(prompt, 12, one, place=2) for prompt in prompts for one in samplings]
    dropped = answers[4]
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    engine = Engine(model, stop_ids=STOP, pad_id=0, rows=32, part_tokens=part, with_log_probs=True)
    with engine.ready():
        for answer in answers:
            engine.add(answer)
        engine.step()
        dropped.ended = "dropped"
        while not engine.is_idle:
            engine.step()
    read = len(prompts) * max(map(len, prompts))
    assert sum(sizes) <= read + sum(len(answer.tokens) for answer in answers)
    for answer in (one for one in answers if one is not dropped):
        numbers = GeneratedAnswer(answer.prompt, 12, answer.sampling, place=2)
        single = Engine(model, stop_ids=STOP, pad_id=0, rows=1, with_log_probs=True)
        with single.ready():
            single.add(numbers)
            while not single.is_idle:
                single.step()
        assert (answer.tokens, answer.ended) == (numbers.tokens, numbers.ended)
        assert answer.log_probs == pytest.approx(numbers.log_probs, abs=1e-4)


def test_an_answer_that_is_dropped_leaves_its_place_before_the_next_token() -> None:
    model = make_model("llama")
    prompts = make_prompts(3)
    answers = [GeneratedAnswer(prompt, 40, SamplingParams()) for prompt in prompts]
    engine = Engine(model, stop_ids=set(), pad_id=0, rows=2)
    with engine.ready():
        for answer in answers:
            engine.add(answer)
        for _ in range(5):
            engine.step()
        answers[0].ended = "dropped"
        moved = engine.step()
        assert moved == [answers[1], answers[2]]
        assert len(answers[0].tokens) == 5
        while not engine.is_idle:
            engine.step()
    for answer in answers[1:]:
        assert answer.tokens == greedy(model, list(answer.prompt), 40)


def test_long_prompt_is_read_in_parts_between_tokens_of_a_running_answer() -> None:
    model = make_model("llama")
    running, other = (
        GeneratedAnswer([11, 12], 100, SamplingParams()),
        GeneratedAnswer([13] * 3, 100, SamplingParams()),
    )
    long, short = (
        GeneratedAnswer([10 + i % 100 for i in range(60)], 3, SamplingParams()),
        GeneratedAnswer([15], 3, SamplingParams()),
    )
    engine = Engine(model, stop_ids=set(), pad_id=0, rows=8, part_tokens=8)
    with engine.ready():
        engine.add(running)
        while not running.tokens:
            engine.step()
        engine.add(long)
        counts = []
        while not long.tokens:
            before = len(running.tokens)
            engine.step()
            counts.append(len(running.tokens) - before)
            if len(counts) == 3:  # one that comes meanwhile does not wait for the rest of the prompt
                engine.add(short)
            if len(counts) == 5:
                assert short.tokens
        assert counts[:-1] == [1] * (len(counts) - 1)
        assert len(counts) >= 60 // 8
        engine.add(other)  # and one that is dropped while its prompt is read takes nothing with it
        engine.add(again := GeneratedAnswer(list(long.prompt), 3, SamplingParams()))
        engine.step()
        other.ended = "dropped"
        while not again.ended:
            engine.step()
    for answer in (long, short, again):
        assert answer.tokens == greedy(model, list(answer.prompt), 3)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=2), SamplingParams(beams=2)]
)
def test_many_prompts_get_the_answers_that_generate_gives(sampling: SamplingParams) -> None:
    model, prompts = make_model("llama"), make_prompts(70)
    wanted = generate(model, prompts, max_new_tokens=20, stop_ids=STOP, pad_id=0, sampling=sampling)
    options: Any = {"stop_ids": STOP, "pad_id": 0, "sampling": sampling}
    counts: list[int] = []
    assert answer_prompts(model, prompts, limits=[20] * 70, on_answers=counts.append, **options) == wanted
    assert counts[-1] == 70
    if sampling.beams == 1:
        limits = [place % 4 for place in range(70)]
        found = answer_prompts(model, prompts, limits=limits, **options)
        assert found == [answer[:limit] for answer, limit in zip(wanted, limits, strict=True)]
        cut = answer_prompts(
            model, prompts, limits=[20] * 70, is_done=lambda place, ids: len(ids) == 5 + place % 2, **options
        )
        assert cut == [answer[: 5 + place % 2] for place, answer in enumerate(wanted)]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    (answer,) = generate(model, [prompt], max_new_tokens=count, stop_ids=set(), pad_id=0)
    return answer


class RefusedError(Exception):
    """Raised by a model for a prompt with the token 99."""


def refuse_99(_: Any, __: Any, inputs: dict[str, Any]) -> None:
    if (inputs["input_ids"] == 99).any():
        raise RefusedError


@pytest.mark.parametrize("together", [True, False])
def test_an_exception_ends_the_answer_that_it_came_from_and_no_other(*, together: bool) -> None:
    model = make_model("llama")
    wanted = greedy(model, [11, 12, 13], 12)  # without the token 99
    assert 99 not in wanted
    model.register_forward_pre_hook(refuse_99, with_kwargs=True)
    good, bad, later = (
        GeneratedAnswer(prompt, 12, SamplingParams()) for prompt in ([11, 12, 13], [14, 99], [11, 12, 13])
    )
    failed: list[tuple[list[GeneratedAnswer], Exception]] = []
    engine = Engine(model, stop_ids=set(), pad_id=0, rows=4, together=together)
    engine.on_failure = lambda answers, error: failed.append((list(answers), error))
    with engine.ready():
        engine.add(good)
        for answer in (bad, later):
            engine.step()
            engine.add(answer)
        while not engine.is_idle:
            engine.step()
    ((answers, error),) = failed
    assert (answers, bad.ended, bad.tokens) == ([bad], "failed", [])
    assert isinstance(error, RefusedError)
    shown = describe_failure(1, error)
    assert shown.text.startswith("RefusedError")
    assert shown.where.startswith(f"{__file__}:"), (
        "where it was raised is not part of the text, which clients get"
    )
    assert good.tokens == later.tokens == wanted


def test_without_somebody_to_report_it_to_an_exception_is_raised() -> None:
    model = make_model("llama")
    model.register_forward_pre_hook(refuse_99, with_kwargs=True)
    engine = Engine(model, stop_ids=set(), pad_id=0, rows=4)
    engine.add(GeneratedAnswer([14, 99], 3, SamplingParams()))
    with engine.ready(), pytest.raises(RefusedError):
        engine.step()


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1e-300)]
)
def test_logits_that_are_not_finite_end_their_row_alone(sampling: SamplingParams) -> None:
    model = make_model("llama")
    wanted = [alone(model, [11, 12], limit=6, sampling=sampling), greedy(model, [11, 12, 13], 6)]
    model.register_forward_hook(lose_99, with_kwargs=True)
    answers = [
        GeneratedAnswer([11, 12], 6, sampling),
        GeneratedAnswer([14, 99], 6, sampling),
        GeneratedAnswer([11, 12, 13], 6, SamplingParams()),
    ]
    failed: list[GeneratedAnswer] = []
    engine = Engine(model, stop_ids=STOP, pad_id=0, rows=4)
    engine.on_failure = lambda answers, _: failed.extend(answers)
    with engine.ready():
        for answer in answers:
            engine.add(answer)
        while not engine.is_idle:
            engine.step()
    assert failed == [answers[1]]
    assert [answers[0].tokens, answers[2].tokens] == wanted


def lose_99(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> Any:
    """The logits of rows with the token 99 become NaN."""
    output.logits[(inputs["input_ids"] == 99).any(dim=1)] = torch.nan
    return output


def test_the_smallest_temperatures_draw_the_most_likely_token() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 1e4
    numbers = torch.rand(4, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for temperature in (5e-324, 1e-300, 1e-30):
        drawn = draw_tokens(scores, numbers, SamplingParams(temperature=temperature))
        assert drawn[:, 0].tolist() == scores.argmax(dim=-1).tolist()


def test_a_token_without_a_probability_is_never_drawn() -> None:
    """Also by the largest number below 1, whose product with the sum of probabilities is that
    sum.
    """
    scores = torch.full((1, 300), -1e9)
    scores[:, 3:5] = 0.0
    for number in (0.0, 0.4999, 0.5, 1 - 2**-53):
        drawn = draw_tokens(
            scores, torch.tensor([[number]], dtype=torch.float64), SamplingParams(temperature=1)
        )
        assert drawn.item() == (3 if number < 0.5 else 4)
