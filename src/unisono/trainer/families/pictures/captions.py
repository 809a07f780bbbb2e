"""Captions as they are written, and what becomes of them in a use: a line, alternatives, and the
order of their parts.

The order of operations is that of sd-scripts. Without torch.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.base.text import Warmup
from unisono.trainer.config.sections import DiffusionSection

VARIED = (
    "caption_dropout",
    "shuffle_captions",
    "tag_dropout",
    "keep_tokens",
    "keep_tokens_separator",
    "caption_separator",
    "secondary_separator",
    "wildcards",
    "tag_warmup",
    "tag_warmup_min",
)
"""The keys of `diffusion` by which captions vary; a picture's entry has its own where a source sets
them.
"""
_ESCAPED = (("{{", "\ufdd0", "{"), ("}}", "\ufdd1", "}"))
"""Doubled braces, the noncharacters that stand for them while alternatives are chosen, and what
they become.
"""
_ALTERNATIVES = re.compile(r"\{([^}]+)\}")

Choose = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a caption: those that stay at its beginning, those that are shuffled and
    omitted, and those that stay at its end.
    """

    first: list[str]
    free: list[str]
    last: list[str]

    def joined(self, free: Sequence[str]) -> str:
        """A caption with some of the free parts."""
        return ", ".join([*self.first, *free, *self.last])


def captions_vary(section: DiffusionSection) -> bool:
    """Whether a caption can be another text in each use, beside the empty one of
    `caption_dropout`.
    """
    return _changes_parts(section) or section.wildcards


def _changes_parts(section: DiffusionSection) -> bool:
    return section.shuffle_captions or section.tag_dropout > 0 or Warmup.parse(section.tag_warmup).amount > 0


def plain_caption(written: str, section: DiffusionSection) -> str:
    """A caption where nothing is drawn, as in evaluation: its first line, the first of
    alternatives, and all parts in their order.
    """
    return _undrawn(written, section, lambda choices: choices[0])


def longest_caption(written: str, section: DiffusionSection) -> str:
    """A caption of the longest line and alternatives, and all parts."""
    return _undrawn(written, section, lambda choices: max(choices, key=len))


def _undrawn(written: str, section: DiffusionSection, choose: Choose) -> str:
    text = _with_choices(written, section, choose)
    if _has_separator(text, section):
        parts = split_parts(text, section)
        text = parts.joined(parts.free)
    return _with_secondary(text, section)


def varied_caption(
    written: str, section: DiffusionSection, *, drop: float, order: float, warm: float = 1.0
) -> str:
    """A caption for one use in training.

    Args:
        written: as it is in its file, with prefix and suffix.
        section: `diffusion`, as it is for its folder.
        drop: drawn uniformly from 0 to 1; below `caption_dropout` the caption is empty.
        order: drawn likewise; decides on the line, the alternatives, and the parts.
        warm: how much of `tag_warmup` is done, 1 at its end.
    """
    if drop < section.caption_dropout:
        return ""
    # Of this generator only the sequence of `random` is the same in all versions of Python.
    draw = random.Random(math.floor(order * (1 << 24))).random  # noqa: S311 - not for secrets
    text = _with_choices(written, section, lambda choices: choices[math.floor(draw() * len(choices))])
    if _changes_parts(section) or _has_separator(text, section):
        parts = split_parts(text, section)
        free = parts.free
        if warm < 1:
            free = free[: section.tag_warmup_min + math.floor(warm * (len(free) - section.tag_warmup_min))]
        if section.shuffle_captions:
            free = sorted(free, key=lambda _: draw())
        if section.tag_dropout:
            free = [part for part in free if draw() >= section.tag_dropout]
        text = parts.joined(free)
    return _with_secondary(text, section)


def split_parts(text: str, section: DiffusionSection) -> Parts:
    """The parts of a caption, around `keep_tokens_separator` where it has one, else by
    `keep_tokens`.
    """
    if not _has_separator(text, section):
        parts = [part.strip() for part in text.split(section.caption_separator)]
        return Parts(parts[: section.keep_tokens], parts[section.keep_tokens :], [])
    first, free, last = (*text.split(section.keep_tokens_separator, 2), "")[:3]
    return Parts(*(_nonempty(one, section.caption_separator) for one in (first, free, last)))


def _nonempty(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _has_separator(text: str, section: DiffusionSection) -> bool:
    return bool(section.keep_tokens_separator) and section.keep_tokens_separator in text


def _with_secondary(text: str, section: DiffusionSection) -> str:
    if not section.secondary_separator:
        return text
    return text.replace(section.secondary_separator, section.caption_separator)


def _with_choices(written: str, section: DiffusionSection, choose: Choose) -> str:
    """With `wildcards` one of the lines, and of each `{a|b}` one of the alternatives; `{{` and `}}`
    are braces.
    """
    if not section.wildcards:
        return written
    lines = written.split("\n")
    text = choose(lines) if len(lines) > 1 else written
    for doubled, mark, _ in _ESCAPED:
        text = text.replace(doubled, mark)
    text = _ALTERNATIVES.sub(lambda match: choose(match[1].split("|")), text)
    for _, mark, brace in _ESCAPED:
        text = text.replace(mark, brace)
    return text
