"""Which tool wrote the logs: what its settings are called decides what can be done."""

from collections.abc import Iterable

from unisono.diagnose.event import Event

BY_PRIORITY = (
    "llamafactory", "axolotl", "kohya", "recipes", "torchtune", "megatron", "trl", "lightning", "ray", "transformers", "deepspeed", "accelerate", "torchrun",
)  # fmt: skip
"""Whose settings a person would change, first those that wrap others."""


def find_framework(events: Iterable[Event]) -> str:
    """One of BY_PRIORITY, or "" where nothing tells."""
    found = {name for event in events if event.signature == "made_by" for name in event.fields}
    return next((name for name in BY_PRIORITY if name in found), "")


def find_all(events: Iterable[Event]) -> set[str]:
    """All tools that took part."""
    return {name for event in events if event.signature == "made_by" for name in event.fields}
