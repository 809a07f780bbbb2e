"""Answers of a model: the same as its own greedy search, whatever is beside them.

Run: pytest tests/front/talk/test_model_generate.py
"""

import random
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import GenerationConfig

from unisono.trainer.model.attention import FLAT_ATTENTION, register
from unisono.trainer.model.generate import generate
from unisono.trainer.plan.task_requests import SamplingParams

Make = Callable[..., Any]
PROMPTS = [[5, 9, 11], [7], [20, 30, 40, 50, 60, 70], [8, 8], [100, 200, 299, 4, 5]]


def greedy_by_hand(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_greedy_answer_in_a_batch_is_the_argmax_of_each_step_alone(make_model: Make) -> None:
    model = make_model()
    wanted = [greedy_by_hand(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in wanted}) > 1
    assert generate(model, PROMPTS, max_new_tokens=12, stop_ids=set(), pad_id=0) == wanted


def test_an_answer_ends_before_its_stop_token_and_others_continue(make_model: Make) -> None:
    model = make_model()
    whole = [greedy_by_hand(model, prompt, 12) for prompt in PROMPTS]
    stop = whole[0][4]
    cut = [answer[: answer.index(stop)] if stop in answer else answer for answer in whole]
    assert generate(model, PROMPTS, max_new_tokens=12, stop_ids={stop}, pad_id=0) == cut


def test_the_same_seed_gives_the_same_answers_and_a_different_seed_others(make_model: Make) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return generate(
            model,
            PROMPTS,
            max_new_tokens=20,
            stop_ids={1},
            pad_id=0,
            sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=seed),
        )

    model = make_model()
    assert sampled(3) == sampled(3)
    assert sampled(3) != sampled(4)


def test_what_is_sampled_does_not_depend_on_what_else_is_in_the_batch(make_model: Make) -> None:
    model = make_model()
    settings: dict[str, Any] = {
        "max_new_tokens": 20,
        "stop_ids": {1},
        "pad_id": 0,
        "sampling": SamplingParams(temperature=1.2, seed=5),
    }
    together = generate(model, PROMPTS, **settings)
    for length in range(1, len(PROMPTS)):
        assert generate(model, PROMPTS[:length], **settings) == together[:length]


def test_top_p_draws_only_from_the_likeliest_tokens(make_model: Make) -> None:
    model = make_model()
    likely: set[int] = set()
    with torch.no_grad():
        odds = torch.softmax(model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1], dim=-1)
    total = 0.0
    for chance, token in zip(*odds.sort(descending=True), strict=True):
        if total >= 0.5:
            break
        likely.add(int(token))
        total += float(chance)
    drawn = {
        generate(
            model,
            [PROMPTS[0]],
            max_new_tokens=1,
            stop_ids=set(),
            pad_id=0,
            sampling=SamplingParams(temperature=1.0, top_p=0.5, seed=s),
        )[0][0]
        for s in range(60)
    }
    assert drawn <= likely
    assert len(drawn) > 1


def test_a_tiny_top_p_is_greedy(make_model: Make) -> None:
    model = make_model()
    settings: dict[str, Any] = {"max_new_tokens": 8, "stop_ids": set(), "pad_id": 0}
    sampling = SamplingParams(temperature=2.0, top_p=1e-9)
    assert generate(model, PROMPTS, sampling=sampling, **settings) == generate(model, PROMPTS, **settings)


def test_top_k_draws_only_from_so_many_tokens_and_top_p_is_a_share_of_them(make_model: Make) -> None:
    model = make_model()
    with torch.no_grad():
        order = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].argsort(descending=True).tolist()

    def drawn(**settings: Any) -> set[int]:
        answers = (
            generate(
                model,
                [PROMPTS[0]],
                max_new_tokens=1,
                stop_ids=set(),
                pad_id=0,
                sampling=SamplingParams(temperature=1.0, seed=s, **settings),
            )
            for s in range(60)
        )
        return {answer[0][0] for answer in answers}

    assert drawn(top_k=3) == set(order[:3])
    assert drawn(top_k=1) == {order[0]}
    assert drawn(top_k=3, top_p=0.3) == {order[0]}


def test_the_frequencies_of_sampled_tokens_are_their_probabilities(make_model: Make) -> None:
    model = make_model()
    with torch.no_grad():
        odds = torch.softmax(model(input_ids=torch.tensor([[7]])).logits[0, -1], dim=-1)
    answers = generate(
        model,
        [[7]] * 2000,
        max_new_tokens=1,
        stop_ids=set(),
        pad_id=0,
        sampling=SamplingParams(temperature=1.0, seed=1),
    )
    counts = torch.bincount(torch.tensor([a[0] for a in answers]), minlength=len(odds)) / 2000
    # Half the L1 distance of 2000 draws from 300 odds is about 0.1 by chance; another distribution
    # is far beyond.
    assert float((counts - odds).abs().sum() / 2) < 0.2


@pytest.mark.parametrize("penalty", [1.2, 0.8])
def test_repetition_penalty_is_that_of_transformers_also_in_a_padded_batch(
    make_model: Make, penalty: float
) -> None:
    model = make_model()
    plain = GenerationConfig(max_new_tokens=12, do_sample=False, repetition_penalty=penalty, pad_token_id=0)
    with torch.no_grad():
        wanted = [
            model.generate(torch.tensor([prompt]), generation_config=plain)[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    wanted = [answer[:-1] if answer[-1] == 1 else answer for answer in wanted]  # the model's own stop token
    settings: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": {1}}
    sampling = SamplingParams(repetition_penalty=penalty)
    for pad in (0, wanted[1][0]):  # also where the padding is a token of the answer
        assert generate(model, PROMPTS, pad_id=pad, sampling=sampling, **settings) == wanted
    assert generate(model, PROMPTS, pad_id=0, **settings) != wanted


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_beams_match_transformers_and_answers_end_before_the_stop_token(
    make_model: Make, penalty: float
) -> None:
    model = make_model()
    stops = {greedy_by_hand(model, PROMPTS[0], 3)[2]}
    wanted = []
    for prompt in PROMPTS:
        own = GenerationConfig(
            max_new_tokens=10,
            do_sample=False,
            num_beams=4,
            length_penalty=0.5,
            repetition_penalty=penalty,
            eos_token_id=list(stops),
            pad_token_id=0,
        )
        with torch.no_grad():
            found = model.generate(torch.tensor([prompt]), generation_config=own)[0, len(prompt) :].tolist()
        wanted.append(found[: next((i for i, token in enumerate(found) if token in stops), len(found))])
    streamed: list[int] = []
    settings: dict[str, Any] = {
        "max_new_tokens": 10,
        "stop_ids": stops,
        "pad_id": 0,
        "sampling": SamplingParams(beams=4, length_penalty=0.5, repetition_penalty=penalty),
    }
    assert generate(model, PROMPTS, **settings) == wanted
    assert generate(model, PROMPTS[:1], on_token=streamed.append, **settings) == [streamed] == wanted[:1]
    assert wanted != generate(model, PROMPTS, max_new_tokens=10, stop_ids=stops, pad_id=0)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(beams=2, repetition_penalty=1.1)],
)
def test_the_model_and_all_generators_are_left_as_they_were_found(
    make_model: Make, sampling: SamplingParams
) -> None:
    register()
    model = make_model()
    wrapped: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")
    )
    wrapped.train()
    wrapped.base_model.model.lm_head.eval()
    model.config.use_cache = False
    model.set_attn_implementation(FLAT_ATTENTION)
    model.generation_config.repetition_penalty = 3.0
    modes = [module.training for module in wrapped.modules()]
    before = (torch.get_rng_state(), random.getstate())
    answers = generate(wrapped, PROMPTS, max_new_tokens=4, stop_ids={1}, pad_id=0, sampling=sampling)
    assert any(answers)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert [module.training for module in wrapped.modules()] == modes
    assert model.config.use_cache is False
    assert model.config._attn_implementation == FLAT_ATTENTION
    assert model.generation_config.repetition_penalty == 3.0


def test_repetition_penalty_in_the_models_files_does_not_change_greedy(make_model: Make) -> None:
    model = make_model()
    plain = generate(model, PROMPTS, max_new_tokens=12, stop_ids=set(), pad_id=0)
    model.generation_config.repetition_penalty = 5.0
    assert generate(model, PROMPTS, max_new_tokens=12, stop_ids=set(), pad_id=0) == plain


def test_tokens_are_streamed_as_they_come_and_an_answer_can_be_ended(make_model: Make) -> None:
    model = make_model()
    heard: list[int] = []
    whole = generate(model, [PROMPTS[2]], max_new_tokens=10, stop_ids=set(), pad_id=0, on_token=heard.append)
    assert heard == whole[0]
    cut = generate(
        model,
        [PROMPTS[2]],
        max_new_tokens=10,
        stop_ids=set(),
        pad_id=0,
        is_done=lambda _, answer: len(answer) == 3,
    )
    assert cut[0] == whole[0][:3]


def test_many_prompts_keep_their_order_over_batches(make_model: Make) -> None:
    model = make_model()
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 300) for _ in range(draw.randrange(1, 30))] for _ in range(150)]
    seen: list[int] = []
    answers = generate(model, prompts, max_new_tokens=2, stop_ids=set(), pad_id=0, on_answers=seen.append)
    assert seen[-1] == 150
    for index in (0, 70, 149):
        assert answers[index] == greedy_by_hand(model, prompts[index], 2)


def test_no_prompts_give_no_answers(make_model: Make) -> None:
    assert generate(make_model(), [], max_new_tokens=5, stop_ids=set(), pad_id=0) == []
