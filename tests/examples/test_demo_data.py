"""The demo is honest: what is measured was not shown before.

Run: pytest tests/examples/test_demo_data.py
"""

import json
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from demo_words import ADJECTIVES, CITIES, DAYS, NAMES, NOUNS, SONG_NOUNS, VERBS
from make_examples import PHRASINGS, SPLITS, Row, holds_any, phrases, rows_of_split, text_of, words_of_splits
from make_pairs import FILES, pairs_of_split
from pretraining_text import rows as pretraining_rows

DATA = Path(__file__).parents[2] / "examples" / "data"


class Splits(NamedTuple):
    """The rows of the three files."""

    train: list[Row]
    dev: list[Row]
    heldout: list[Row]


@pytest.fixture(scope="module")
def splits() -> Splits:
    def rows(name: str) -> list[Row]:
        return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]

    return Splits(*(rows(name) for name in Splits._fields))


@pytest.fixture(scope="module")
def pretraining_sample() -> list[str]:
    return list(islice(pretraining_rows(0), 20_000))


def test_the_files_are_what_the_script_writes() -> None:
    for split in SPLITS:
        assert (DATA / f"{split}.jsonl").read_text("utf-8") == text_of(rows_of_split(split)), split


def test_no_answer_and_no_request_is_in_two_splits(splits: Splits) -> None:
    for key in ("completion", "prompt"):
        train, dev, heldout = ({row[key] for row in rows} for rows in splits)
        assert train.isdisjoint(dev)
        assert train.isdisjoint(heldout)
        assert dev.isdisjoint(heldout)


def test_no_request_is_asked_twice(splits: Splits) -> None:
    for rows in splits:
        assert len({row["prompt"] for row in rows}) == len(rows)


def test_a_third_of_the_heldout_rows_have_words_that_are_nowhere_else(splits: Splits) -> None:
    own = words_of_splits()["heldout"]
    assert sum(holds_any(row["prompt"], own) for row in splits.heldout) * 3 >= len(splits.heldout)
    assert not any(holds_any(row["prompt"], own) for row in splits.train + splits.dev)


def test_the_development_rows_have_words_of_their_own_too(splits: Splits) -> None:
    own = words_of_splits()["dev"]
    assert sum(holds_any(row["prompt"], own) for row in splits.dev) * 3 >= len(splits.dev)
    assert not any(holds_any(row["prompt"], own) for row in splits.train + splits.heldout)


def test_an_answer_is_json_with_one_of_seven_intents(splits: Splits) -> None:
    for rows in splits:
        intents = {json.loads(row["completion"])["intent"] for row in rows}
        assert intents == {"reminder", "alarm", "weather", "music", "message", "timer", "call"}


def test_a_word_stands_in_one_list_only() -> None:
    lists = (DAYS, NAMES, CITIES, VERBS, NOUNS, ADJECTIVES, SONG_NOUNS)
    words = [word.lower() for words in lists for word in words]
    assert len(words) == len(set(words))


def test_the_pretraining_text_holds_no_json(pretraining_sample: list[str]) -> None:
    assert not [row for row in pretraining_sample if '{"' in row or '": ' in row]


def test_the_pretraining_text_holds_no_phrase_of_the_task(pretraining_sample: list[str]) -> None:
    assert {"remind me", "wake me up", "set a timer for"} <= set(phrases())
    text = "\n".join(pretraining_sample).lower()
    assert not [phrase for phrase in phrases() if phrase in text]


def test_the_pretraining_text_holds_no_row_of_the_task(splits: Splits, pretraining_sample: list[str]) -> None:
    text = "\n".join(pretraining_sample).lower()
    assert not [row for rows in splits for row in rows if row["prompt"].lower() in text]
    assert not [row for rows in splits for row in rows if row["completion"].lower() in text]


def test_a_seed_writes_the_same_pretraining_text_again() -> None:
    assert list(islice(pretraining_rows(3), 50)) == list(islice(pretraining_rows(3), 50))
    assert list(islice(pretraining_rows(3), 50)) != list(islice(pretraining_rows(4), 50))


def test_every_phrasing_is_used_in_training(splits: Splits) -> None:
    requests = "\n".join(row["prompt"] for row in splits.train)
    for phrasing in PHRASINGS:
        longest = max(phrasing.replace("{", "\0").replace("}", "\0").split("\0")[::2], key=len).strip()
        assert longest in requests, phrasing


@pytest.fixture(scope="module")
def pairs() -> dict[str, list[Row]]:
    """The preference pairs of each split."""
    return {
        split: [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]
        for split, name in FILES.items()
    }


def test_the_pairs_are_what_their_script_writes() -> None:
    for split, name in FILES.items():
        assert (DATA / name).read_text("utf-8") == text_of(pairs_of_split(split)), split


def test_no_heldout_pair_shares_a_request_or_an_answer_with_training(pairs: dict[str, list[Row]]) -> None:
    for key in ("prompt", "chosen", "rejected"):
        train, heldout = ({pair[key] for pair in pairs[split]} for split in ("train", "heldout"))
        assert train.isdisjoint(heldout)


def test_a_third_of_the_heldout_pairs_have_words_that_are_in_no_other(pairs: dict[str, list[Row]]) -> None:
    own = words_of_splits()["heldout"]
    assert sum(holds_any(pair["prompt"], own) for pair in pairs["heldout"]) * 3 >= len(pairs["heldout"])
    assert not any(holds_any(pair["prompt"], own) for pair in pairs["train"])
