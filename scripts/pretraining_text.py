"""The text that the built-in model is pretrained on: written from a seed, with nothing of the
demo's task in it.

It teaches the words of the demo and how to copy: repeat what was said, list and list again, find a
value by its key, answer questions about a little story, write a number's word as digits. It holds
no JSON and no phrase of the task.

    python scripts/pretraining_text.py       # writes a sample, examples/data/text.jsonl
"""

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from demo_words import (
    ADJECTIVES,
    ALL_WORDS,
    CITIES,
    DAYS,
    NAMES,
    NOUNS,
    SONG_NOUNS,
    VERBS,
    VERBS_OF,
    number_word,
)
from make_examples import phrases

EXAMPLE = Path("examples/data/text.jsonl")
EXAMPLE_ROWS = 2000
_CONSONANTS, _VOWELS = "bcdfgklmnprstvz", "aeiou"
_PRINTABLE = "".join(chr(code) for code in range(33, 127))

Draw = random.Random


def _invented_word(draw: Draw) -> str:
    syllables = draw.choice((1, 2, 2, 3))
    stem = "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(syllables))
    return stem + draw.choice(("", "n", "r", "t", "l"))


def _word(draw: Draw) -> str:
    return _invented_word(draw) if draw.random() < 0.15 else draw.choice(ALL_WORDS)


def _words(draw: Draw, least: int = 1, most: int = 7) -> str:
    return " ".join(_word(draw) for _ in range(draw.randint(least, most)))


def _deed(draw: Draw) -> str:
    noun = draw.choice(NOUNS) if draw.random() < 0.9 else _invented_word(draw)
    verb = draw.choice(VERBS_OF.get(noun, VERBS)) if draw.random() < 0.7 else draw.choice(VERBS)
    owner = draw.choice(("the", "the", "my", "his", "a", "some", f"the {draw.choice(ADJECTIVES)}"))
    return f"{verb} {owner} {noun}"


def _quoted(draw: Draw, text: str) -> str:
    return f'"{text}"' if draw.random() < 0.6 else text


def _copies(draw: Draw) -> str:
    said, name = _words(draw), draw.choice(NAMES)
    first, second = _words(draw, 1, 4), _words(draw, 1, 4)
    return draw.choice(
        (
            f"say: {said}. said: {_quoted(draw, said)}.",
            f"{name} said {_quoted(draw, said)}. {draw.choice(NAMES)} heard {_quoted(draw, said)}.",
            f"repeat {said}\n{_quoted(draw, said)}",
            f"{said}\n{said}\n{_quoted(draw, said)}",
            f'"{said}" is {said}.',
            f'first {first}, then {second}. then: "{second}". first: "{first}".',
            f'{name} wrote {said} twice: "{said}" "{said}".',
        )
    )


def _lists(draw: Draw) -> str:
    items = draw.sample(ALL_WORDS, draw.randint(3, 6))
    listed, place = ", ".join(items), draw.randrange(len(items) - 1)
    return (
        f'list: {listed}. again: {listed}. first "{items[0]}", last "{items[-1]}". '
        f'after {items[place]} comes "{items[place + 1]}".'
    )


def _keys_and_values(draw: Draw) -> str:
    keys = draw.sample(ALL_WORDS, draw.randint(2, 5))
    values = {key: _words(draw, 1, 3) for key in keys}
    told = "; ".join(f"{key} has {values[key]}" for key in keys)
    asked = " ".join(f'{key}: "{values[key]}".' for key in draw.sample(keys, len(keys)))
    return f"{told}. {asked}"


def _numbers(draw: Draw) -> str:
    start, number = draw.randint(0, 55), draw.randint(0, 59)
    several = [draw.randint(0, 59) for _ in range(4)]
    said = number_word(number) if draw.random() < 0.7 else str(number)
    return draw.choice(
        (
            ", ".join(f"{number_word(n)} is {n}" for n in range(start, start + 5)),
            f'{number_word(number)} is {number}. the number {number_word(number)}: "{number}".',
            " ".join(map(number_word, several)) + "\n" + " ".join(map(str, several)),
            f"{draw.choice(NAMES)} counted {said} {draw.choice(NOUNS)}. how many? {_quoted(draw, str(number))}.",
        )
    )


def _story(draw: Draw) -> str:
    """Something happened, somewhere, one day, at some hour; then questions, each answered in the
    story's words.
    """
    one, other = draw.sample(NAMES, 2)
    deed, song = _deed(draw), f"{draw.choice(ADJECTIVES)} {draw.choice(SONG_NOUNS)}"
    settings = [
        ("where", "in", draw.choice(CITIES)),
        ("which day", "on", draw.choice(DAYS)),
        ("what hour", "at", number_word(draw.randint(1, 12))),
    ]
    settings = draw.sample(settings, draw.randint(0, 3))
    said = [f"{preposition} {value}" for _, preposition, value in settings]
    front = f"{said.pop(0)} " if said and draw.random() < 0.4 else ""
    tail = "".join(f" {part}" for part in said)
    told, answers = draw.choice(
        (
            (
                f"{one} asked {other} to {deed}{tail}.",
                {"who asked": one, "who was asked": other, "to do what": deed},
            ),
            (f"{one} had to {deed}{tail}.", {"who": one, "to do what": deed}),
            (
                f"{one} told {other} that they must {deed}{tail}.",
                {"who told": one, "who was told": other, "to do what": deed},
            ),
            (
                f"{one} sang {song} with {other}{tail}.",
                {"who sang": one, "with whom": other, "which song": song},
            ),
            (
                f"{one} met {other}{tail} and they went to {deed}.",
                {"who met": one, "met whom": other, "to do what": deed},
            ),
            (
                f"{one} and {other} liked {song}. they wanted to {deed}{tail}.",
                {"which song": song, "to do what": deed},
            ),
        )
    )
    answers |= {question: value for question, _, value in settings}
    asked = draw.sample(list(answers.items()), min(len(answers), draw.randint(2, 4)))
    return f"{front[:1].upper()}{front[1:]}{told} " + " ".join(
        f"{question}? {_quoted(draw, value)}." for question, value in asked
    )


def _codes(draw: Draw) -> str:
    """Random characters, pieces of words and groups of digits, copied: so that every byte's token
    is learnt.
    """
    code = draw.choice(
        (
            [_some(draw, _PRINTABLE, 1, 3) for _ in range(draw.randint(2, 6))],
            [draw.choice(ALL_WORDS).lower()[: draw.randint(1, 4)] for _ in range(draw.randint(2, 6))],
            [
                f"{draw.randint(0, 99)}{draw.choice(('', '', ':', '-', '.'))}{draw.randint(0, 99):02d}"
                for _ in range(draw.randint(1, 4))
            ],
        )
    )
    text = " ".join(code)
    return draw.choice((f"code {text} same code {text}", f"{text}\n{text}", f'code {text} is "{text}".'))


def _some(draw: Draw, characters: str, least: int, most: int) -> str:
    return "".join(draw.choice(characters) for _ in range(draw.randint(least, most)))


_KINDS: dict[Callable[[Draw], str], float] = {
    _copies: 3,
    _lists: 1,
    _keys_and_values: 2.5,
    _numbers: 1.5,
    _story: 4,
    _codes: 1,
}
_FORBIDDEN = ('{"', *phrases())


def rows(seed: int) -> Iterator[str]:
    """An endless stream of rows of one to three pieces; a row that by chance holds JSON or a phrase
    of the task is left out.
    """
    draw = random.Random(f"text {seed}")
    while True:
        kinds = draw.choices(list(_KINDS), list(_KINDS.values()), k=draw.choice((1, 1, 2, 3)))
        row = "\n".join(kind(draw) for kind in kinds)
        if not any(phrase in row.lower() for phrase in _FORBIDDEN):
            yield row


def main() -> None:
    """Writes the small sample that examples/pretrain.yaml trains on."""
    lines = (json.dumps({"text": row}) + "\n" for row in islice(rows(0), EXAMPLE_ROWS))
    EXAMPLE.write_text("".join(lines), encoding="utf-8")
    print(f"{EXAMPLE}: {EXAMPLE_ROWS} rows")


if __name__ == "__main__":
    main()
