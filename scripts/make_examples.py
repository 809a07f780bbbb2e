"""Writes examples/data: the demo's task, a request in plain words that becomes one line of JSON.

    python scripts/make_examples.py

Three files of prompt-completion rows. `train.jsonl` is learnt from; on `dev.jsonl` the example's
settings were chosen; `heldout.jsonl` is measured and nothing else. No answer occurs in two of them,
and a share of the rows of `dev` and of `heldout` holds a noun, a name or a city that occurs in no
other file.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo_words import ADJECTIVES, CITIES, DAYS, NAMES, NOUNS, SONG_NOUNS, VERBS_OF, number_word

OUT = Path("examples/data")
SEED = 1
SPLITS = {"train": 2000, "dev": 200, "heldout": 200}
_SHARE_WITH_NEW_WORDS = 0.4
_WORDS_KEPT_BACK = 0.1
"""Share of the nouns, names and cities that is kept for `dev`, and again for `heldout`."""

Row = dict[str, str]
Answer = dict[str, str | int]


@dataclass(frozen=True)
class Words:
    """The words that rows are made of.

    Where `new` is given, one of its words takes the place of a common one.
    """

    nouns: tuple[str, ...]
    names: tuple[str, ...]
    cities: tuple[str, ...]


REMINDER = (
    "remind me {day} {time} to {what}",
    "remind me to {what} {day} {time}",
    "{day} {time} remind me to {what}",
    "set a reminder {day} {time} to {what}",
    "do not let me forget to {what} {day} {time}",
    "i need to {what} {day} {time}",
)
ALARM = (
    "wake me up {day} {time}",
    "set an alarm {day} {time}",
    "i need an alarm {time} {day}",
    "alarm {time} {day}",
    "{day} wake me up {time}",
)
WEATHER = (
    "what is the weather in {city} {day}",
    "weather forecast for {city} {day}",
    "how will the weather be {day} in {city}",
    "will it rain in {city} {day}",
    "{day} in {city} what will the weather be like",
)
MUSIC = (
    "play {song}",
    "put on the song {song}",
    "i want to hear {song}",
    "start the track {song}",
)
MUSIC_BY = (
    "play {song} by {name}",
    "put on the song {song} by {name}",
    "i want to hear {name} with {song}",
)
MESSAGE = (
    "tell {name} to {what}",
    "send a message to {name} that says {what}",
    "text {name} {what}",
    "let {name} know they should {what}",
    "message {name} and ask them to {what}",
)
TIMER = (
    "set a timer for {amount} {unit}",
    "timer {amount} {unit}",
    "count down {amount} {unit}",
    "start a timer of {amount} {unit}",
    "tell me when {amount} {unit} are over",
)
CALL = (
    "call {name} {time}",
    "phone {name} {time}",
    "give {name} a call {time}",
    "i want to talk to {name} {time}",
    "{time} call {name}",
)
PHRASINGS = (*REMINDER, *ALARM, *WEATHER, *MUSIC, *MUSIC_BY, *MESSAGE, *TIMER, *CALL)


def phrases() -> list[str]:
    """The stretches of two words or more that requests are recognised by, as `remind me` or `set a
    timer for`.
    """
    found = (part.strip() for phrasing in PHRASINGS for part in re.split(r"\{\w+\}", phrasing))
    return sorted({part for part in found if " " in part})


def draw_day(draw: random.Random) -> tuple[str, str]:
    """A day as it is said, and as it is written."""
    day = draw.choice((*DAYS, "today", "tomorrow"))
    return (f"on {day}", day[:3].lower()) if day in DAYS else (day, day)


def draw_time(draw: random.Random) -> tuple[str, str]:
    """A time of day as it is said, and as HH:MM.

    A bare hour is one from eight in the morning to seven in the evening.
    """
    kind = draw.choices(
        ("noon", "midnight", "digits", "bare", "half", "quarter", "whole"), (6, 4, 12, 13, 18, 12, 35)
    )[0]
    if kind == "noon":
        return "at noon", "12:00"
    if kind == "midnight":
        return "at midnight", "00:00"
    if kind == "digits":
        hour, minute = draw.randrange(24), draw.choice((0, 5, 10, 15, 20, 30, 40, 45, 50))
        return f"at {hour}:{minute:02d}", f"{hour:02d}:{minute:02d}"
    if kind == "bare":
        hour = draw.choice((8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19))
        return f"at {number_word(hour % 12)}", f"{hour:02d}:00"
    hour = draw.choice([hour for hour in range(1, 24) if hour != 12])
    said = number_word(hour % 12) if draw.random() < 0.6 else str(hour % 12)
    minute, before = {"half": (30, "half past "), "quarter": (15, "quarter past "), "whole": (0, "")}[kind]
    long_form = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    part = long_form if draw.random() < 0.6 else ("am" if hour < 12 else "pm")
    return f"at {before}{said} {part}", f"{hour:02d}:{minute:02d}"


def draw_what(draw: random.Random, words: Words) -> str:
    """Something to do, as `print the bill`."""
    noun = draw.choice(words.nouns)
    return f"{draw.choice(VERBS_OF[noun])} {draw.choice(('the', 'the', 'my'))} {noun}"


def _reminder(draw: random.Random, words: Words) -> tuple[str, Answer]:
    (day, day_written), (time, time_written), what = draw_day(draw), draw_time(draw), draw_what(draw, words)
    said = draw.choice(REMINDER).format(day=day, time=time, what=what)
    return said, {"intent": "reminder", "day": day_written, "time": time_written, "what": what}


def _alarm(draw: random.Random, words: Words) -> tuple[str, Answer]:
    (day, day_written), (time, time_written) = draw_day(draw), draw_time(draw)
    said = draw.choice(ALARM).format(day=day, time=time)
    return said, {"intent": "alarm", "day": day_written, "time": time_written}


def _weather(draw: random.Random, words: Words) -> tuple[str, Answer]:
    (day, day_written), city = draw_day(draw), draw.choice(words.cities)
    return draw.choice(WEATHER).format(day=day, city=city), {
        "intent": "weather",
        "city": city,
        "day": day_written,
    }


def _music(draw: random.Random, words: Words) -> tuple[str, Answer]:
    song = f"{draw.choice(ADJECTIVES)} {draw.choice(SONG_NOUNS)}"
    if draw.random() < 0.4:
        return draw.choice(MUSIC).format(song=song), {"intent": "music", "song": song}
    name = draw.choice(words.names)
    return draw.choice(MUSIC_BY).format(song=song, name=name), {"intent": "music", "song": song, "by": name}


def _message(draw: random.Random, words: Words) -> tuple[str, Answer]:
    name, what = draw.choice(words.names), draw_what(draw, words)
    return draw.choice(MESSAGE).format(name=name, what=what), {"intent": "message", "to": name, "what": what}


def _timer(draw: random.Random, words: Words) -> tuple[str, Answer]:
    amount, unit = draw.randint(2, 59), draw.choice(("seconds", "minutes", "minutes", "hours"))
    said = number_word(amount) if draw.random() < 0.6 else str(amount)
    return draw.choice(TIMER).format(amount=said, unit=unit), {"intent": "timer", unit: amount}


def _call(draw: random.Random, words: Words) -> tuple[str, Answer]:
    name, (time, time_written) = draw.choice(words.names), draw_time(draw)
    return draw.choice(CALL).format(name=name, time=time), {
        "intent": "call",
        "who": name,
        "time": time_written,
    }


Intent = Callable[[random.Random, Words], tuple[str, Answer]]
_INTENTS: tuple[Intent, ...] = (_reminder, _reminder, _alarm, _weather, _music, _message, _timer, _call)
"""Reminders are the richest, so they come twice."""


def _row(draw: random.Random, words: Words) -> Row:
    said, answer = draw.choice(_INTENTS)(draw, words)
    said = draw.choice((said, said, f"please {said}", f"{said} please"))
    return {"prompt": said, "completion": json.dumps(answer)}


def words_of_splits() -> dict[str, Words]:
    """The words that only rows of a split may hold: for `train`, those that all may."""
    draw = random.Random(f"words {SEED}")
    lists: dict[str, list[tuple[str, ...]]] = {split: [] for split in SPLITS}
    for words in (NOUNS, NAMES, CITIES):
        shuffled = draw.sample(words, len(words))
        kept = max(1, round(len(words) * _WORDS_KEPT_BACK))
        lists["heldout"].append(tuple(shuffled[:kept]))
        lists["dev"].append(tuple(shuffled[kept : 2 * kept]))
        lists["train"].append(tuple(shuffled[2 * kept :]))
    return {split: Words(*found) for split, found in lists.items()}


def holds_any(text: str, words: Words) -> bool:
    """Whether one of the words stands in a text."""
    return not {*words.nouns, *words.names, *words.cities}.isdisjoint(re.findall(r"\w+", text))


def split_of(answer: str) -> str:
    """Where an answer belongs: a function of the answer alone, so that no answer is in two
    splits.
    """
    place = hashlib.sha256(answer.encode()).digest()[0] % 8
    return {0: "heldout", 1: "dev"}.get(place, "train")


def rows_of_split(split: str) -> list[Row]:
    """The rows of a split, no request twice; of `dev` and `heldout` a share holds words of their
    own.
    """
    draw = random.Random(f"rows {split} {SEED}")
    words = words_of_splits()
    wanted = SPLITS[split]
    with_new_words = 0 if split == "train" else round(wanted * _SHARE_WITH_NEW_WORDS)
    rows: dict[str, Row] = {}
    while len(rows) < wanted:
        new = len(rows) < with_new_words
        row = _row(draw, words[split] if new else words["train"])
        if split_of(row["completion"]) == split and (not new or holds_any(row["prompt"], words[split])):
            rows.setdefault(row["prompt"], row)
    return draw.sample(list(rows.values()), wanted)


def text_of(rows: list[Row]) -> str:
    """The rows as JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Writes the three files."""
    OUT.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        (OUT / f"{split}.jsonl").write_text(text_of(rows_of_split(split)), encoding="utf-8")
        print(f"{OUT / split}.jsonl: {SPLITS[split]} rows")


if __name__ == "__main__":
    main()
