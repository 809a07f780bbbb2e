"""Rewards of tests, as users write them."""

import time
from typing import Any


def thirds(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of tokens whose number is a multiple of 3: a random model has all values."""
    return [sum(token % 3 == 0 for token in ids) / len(ids) for ids in completion_ids]


def fails_on_a_seven(prompts: list[str], completions: list[str], number: list[int]) -> list[float]:
    if number[0] % 10 == 7:
        raise ValueError("there is no score for a seven")
    return [float(len(answer)) for answer in completions]


def hangs_on_a_seven(prompts: list[str], completions: list[str], number: list[int]) -> list[float]:
    if number[0] % 10 == 7:
        time.sleep(1e6)
    return [float(len(answer)) for answer in completions]


def of_even_numbers(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Rewards that tell the answers to prompts with an even number apart, and no others."""
    return thirds(completion_ids) if number[0] % 2 == 0 else [0.0] * len(completion_ids)


def longer(completions: list[str], **_: Any) -> list[float]:
    return [float(len(answer)) for answer in completions]
