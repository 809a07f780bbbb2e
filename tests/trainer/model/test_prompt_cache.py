"""Prompts that begin like earlier ones are read from there on, with the same answers.

Run: pytest tests/trainer/model/test_prompt_cache.py
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.model.test_engine import CONFIGS, STOP, alone, make_model
from unisono.trainer.model.engine import Engine, GeneratedAnswer, KnownPrompts
from unisono.trainer.model.prompt_cache import LEAST, PromptCache, common_tokens
from unisono.trainer.plan.task_requests import SamplingParams

GREEDY = SamplingParams()


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 120) for _ in range(count)]


class Reader:
    """An engine, and the number of columns of each forward."""

    def __init__(
        self, model: Any, known: PromptCache | None, owner: str = "", part: int | None = None
    ) -> None:
        self.columns: list[tuple[int, int]] = []
        view = None if known is None else KnownPrompts(known, owner)
        self._model = model
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.engine = Engine(model, stop_ids=STOP, pad_id=0, rows=8, part_tokens=part, known=view)

    def _count(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        self.columns.append(tuple(inputs["input_ids"].shape))

    def answers(self, prompts: list[list[int]], *, later: int = 0) -> list[list[int]]:
        """Answers to prompts that come together, or `later` steps after each other."""
        made = [GeneratedAnswer(prompt, 12, GREEDY) for prompt in prompts]
        waiting = list(made)
        with self.engine.ready():
            while waiting or not self.engine.is_idle:
                for _ in range(1 if later else len(waiting)):
                    if waiting:
                        self.engine.add(waiting.pop(0))
                for _ in range(max(1, later)):
                    self.engine.step()
        return [answer.tokens for answer in made]

    def close(self) -> None:
        self._hook.remove()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("part", [None, 90])
def test_answers_are_the_same_with_and_without_a_cache(name: str, part: int | None) -> None:
    model, system = make_model(name), ids(90, 1)
    chats = [system + ids(3 + 5 * number, 10 + number) for number in range(6)]
    prompts = [*chats, ids(30, 2), chats[0] + ids(20, 3), chats[0], system[:70], system, ids(90, 5), chats[5]]
    wanted = [alone(model, prompt, limit=12, sampling=GREEDY) for prompt in prompts]
    for later in (0, 30):
        reader = Reader(model, PromptCache(1 << 24), part=part)
        assert reader.answers(prompts, later=later) == wanted
        assert reader.answers(prompts[::-1], later=later) == wanted[::-1]
        reader.close()


def test_a_common_beginning_is_read_once() -> None:
    model, system = make_model("llama"), ids(200, 1)
    prompts = [system + ids(10, 10 + number) for number in range(6)]
    read = {}
    for name, known in (("without", None), ("with", PromptCache(1 << 24))):
        reader = Reader(model, known, part=512)
        reader.answers(prompts)
        reader.close()
        read[name] = sum(rows * columns for rows, columns in reader.columns if columns > 1)
    assert read == {"without": 6 * 210, "with": 210 + 5 * 10}


def test_a_cache_keeps_its_bytes_and_the_prompts_that_were_used_last() -> None:
    model = make_model("llama")
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers with 2 heads of 8 float32
    known = PromptCache(250 * token_bytes)
    reader = Reader(model, known)
    first, second, third = (ids(100, seed) for seed in (1, 2, 3))
    reader.answers([first, second])
    assert known.size == 200 * token_bytes
    reader.answers([[*first, 11]])
    reader.answers([third])
    assert known.size == 200 * token_bytes
    assert [known.find("", np.array(one))[0] for one in (first, second, third)] == [99, 0, 99]
    reader.answers([ids(240, 4)])
    reader.answers([ids(200, 4) + ids(100, 5)])  # too many bytes: it is not kept
    assert known.find("", np.array(ids(300, 4)))[0] == 240
    known.forget("")
    assert known.size == 0
    reader.close()


def test_adapters_do_not_share_what_they_have_read() -> None:
    model, known, prompt = make_model("llama"), PromptCache(1 << 24), ids(100, 1)
    Reader(model, known, "one").answers([prompt])
    assert known.find("one", np.array(prompt))[0] == 99
    assert known.find("two", np.array(prompt)) == (0, None)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
@settings(deadline=None)
def test_common_tokens_are_those_up_to_the_first_difference(one: list[int], other: list[int]) -> None:
    count = common_tokens(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64))
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


def test_a_scored_prompt_is_read_as_a_whole() -> None:
    model, known, prompt = make_model("llama"), PromptCache(1 << 24), ids(LEAST + 20, 1)
    reader = Reader(model, known)
    reader.answers([prompt])
    scored = GeneratedAnswer(prompt, 1, GREEDY, top=0, prompt_scores=[])
    with reader.engine.ready(), torch.no_grad():
        reader.engine.add(scored)
        while not reader.engine.is_idle:
            reader.engine.step()
    assert scored.prompt_scores is not None
    assert len(scored.prompt_scores) == len(prompt) - 1
    reader.close()
