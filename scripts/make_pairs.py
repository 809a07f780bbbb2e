"""Writes the preference pairs of the demo: the same answer to a request as a polite sentence
(chosen), and in a few words (rejected).

    python scripts/make_pairs.py

`pairs.jsonl` is learned from, `pairs-heldout.jsonl` is measured and nothing else. No request and no
answer occurs in both, and a share of the held-out pairs has a noun, a name or a city that occurs in
no other pair. Requests have the phrasings of `make_examples.py`.
"""

import random
from dataclasses import dataclass

from demo_words import ADJECTIVES, SONG_NOUNS, number_word
from make_examples import (
    ALARM,
    CALL,
    MESSAGE,
    MUSIC_BY,
    OUT,
    REMINDER,
    TIMER,
    WEATHER,
    Row,
    Words,
    draw_day,
    draw_time,
    draw_what,
    holds_any,
    split_of,
    text_of,
    words_of_splits,
)

PAIRS = {"train": 1000, "heldout": 100}
FILES = {"train": "pairs.jsonl", "heldout": "pairs-heldout.jsonl"}
_SEED = 1
_SHARE_WITH_NEW_WORDS = 0.4


@dataclass(frozen=True)
class Intent:
    """How something is requested, and both answers to it."""

    requests: tuple[str, ...]
    polite: str
    curt: str


_INTENTS = (
    Intent(REMINDER, "I will remind you {day} {time} to {what}.", "{what}, {day}, {time}."),
    Intent(ALARM, "I will wake you up {day} {time}.", "{day}, {time}."),
    Intent(WEATHER, "I will look up the weather in {city} {day}.", "{city}, {day}."),
    Intent(MUSIC_BY, "I will play {song} by {name}.", "{song}, {name}."),
    Intent(MESSAGE, "I will tell {name} to {what}.", "{name}, {what}."),
    Intent(TIMER, "I will count down {amount} {unit}.", "{amount} {unit}."),
    Intent(CALL, "I will call {name} {time}.", "{name}, {time}."),
)


def _pair(draw: random.Random, words: Words) -> Row:
    intent = draw.choice(_INTENTS)
    parts = {
        "day": draw_day(draw)[0],
        "time": draw_time(draw)[0],
        "what": draw_what(draw, words),
        "name": draw.choice(words.names),
        "city": draw.choice(words.cities),
        "song": f"{draw.choice(ADJECTIVES)} {draw.choice(SONG_NOUNS)}",
        "amount": number_word(draw.randint(2, 59)),
        "unit": draw.choice(("seconds", "minutes", "hours")),
    }
    return {
        "prompt": draw.choice(intent.requests).format(**parts),
        "chosen": "Of course. " + intent.polite.format(**parts),
        "rejected": intent.curt.format(**parts),
    }


def pairs_of_split(split: str) -> list[Row]:
    """The pairs of a split, no request twice; of the held-out ones a share has words of its own."""
    draw = random.Random(f"pairs {split} {_SEED}")
    words = words_of_splits()
    wanted = PAIRS[split]
    with_new_words = 0 if split == "train" else round(wanted * _SHARE_WITH_NEW_WORDS)
    pairs: dict[str, Row] = {}
    while len(pairs) < wanted:
        new = len(pairs) < with_new_words
        pair = _pair(draw, words[split] if new else words["train"])
        if split_of(pair["rejected"]) == split and (not new or holds_any(pair["prompt"], words[split])):
            pairs.setdefault(pair["prompt"], pair)
    return draw.sample(list(pairs.values()), wanted)


def main() -> None:
    """Writes both files."""
    for split, name in FILES.items():
        (OUT / name).write_text(text_of(pairs_of_split(split)), encoding="utf-8")
        print(f"{OUT / name}: {PAIRS[split]} pairs")


if __name__ == "__main__":
    main()
