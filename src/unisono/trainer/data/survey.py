"""What a file of rows asks of a config, before there is a model: its format, how long its rows are,
and how many sequences they make.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from unisono.base.errors import DataError
from unisono.trainer.config.sections import sides_of
from unisono.trainer.data import BadRow, Conversation, Example, Preference, RawRow, RowError
from unisono.trainer.data.build import pack
from unisono.trainer.data.formats import FormatName, Renamed, to_example
from unisono.trainer.data.preference_rows import is_rated, read_preference, sides_in
from unisono.trainer.data.readers import read_rows
from unisono.trainer.data.source_format import settle_format
from unisono.trainer.data.sources import RowSource
from unisono.trainer.plan.task_requests import Survey

MOST_ROWS = 50_000
"""Rows that are read; a file with more has steps enough."""
_LENGTHS = (256, 512, 1024, 2048, 4096)  # values of data.max_length to choose from
_SHARE_WITHIN = 0.99  # of rows, if the longest are longer than any of these
_MARGIN = 1.25  # of the longest row, since its tokens are estimated
_CHARS_OF_A_TOKEN = 3.0  # English has about 4, and code fewer
_ALONE = re.compile(r"[0-9\u2e80-\U0010ffff]")  # a digit or a Chinese character is about one token
_OF_A_TEMPLATE, _OF_A_MESSAGE = 16, 6  # tokens of a chat template around a row, and around a message
_KEY = "data.train"


def survey(source: RowSource, *, packed: bool) -> Survey:
    """Reads the rows of a source.

    Args:
        source: its files.
        packed: whether rows will share sequences.

    Raises:
        DataError: if a file cannot be read, has no readable row, or its format is unknown.
    """
    path = source.section.path
    rows = islice(chain.from_iterable(read_rows(file) for file in source.files), MOST_ROWS)
    leading, bad = None, []
    for row in rows:
        if isinstance(row, RawRow):
            leading = row
            break
        bad.append(row)
    if leading is None:
        why = bad[0].why if bad else "it has no rows"
        where = bad[0].where if bad else path
        raise DataError.of(
            f"{path} has no row that can be read", where=where, why=why, fix="use a file with rows"
        )
    objective = _objective(leading.value)
    settled = settle_format(source.section, leading, objective=objective, key=_KEY)
    name, columns = settled.name, settled.section.columns
    sides = []
    for row in chain([leading], rows):
        tokens = row if isinstance(row, BadRow) else _tokens(name, row, columns)
        bad.append(tokens) if isinstance(tokens, BadRow) else sides.append(tokens)
    if not sides:
        raise DataError.of(
            f"{path} has no row that can be used", where=bad[0].where, why=bad[0].why, fix=bad[0].fix
        )
    lengths, answers = [max(of_row) for of_row in sides], sides_of(objective)
    limit, beyond = fitting_length(lengths)
    # A rated row is trained with a second answer, that of another row: about as long.
    kept = [sum(min(length, limit) for length in of_row) * answers // len(of_row) for of_row in sides]
    return Survey(
        rows=len(lengths),
        bad=len(bad),
        first_bad=f"{bad[0].where}: {bad[0].why}" if bad else "",
        format=name,
        why=settled.why,
        columns={ours: theirs for ours, theirs in columns.items() if theirs is not None},
        objective=objective,
        longest=max(lengths),
        max_length=limit,
        beyond=beyond,
        sequences=len(pack(kept, limit=limit * answers)) if packed else len(kept),
    )


def _objective(first: Mapping[str, object]) -> str:
    """A usual objective that trains on such rows."""
    if len(sides_in(first, {})) == 2:
        return "dpo"
    return "kto" if is_rated(first, {}) else "sft"


def fitting_length(lengths: Sequence[int]) -> tuple[int, int]:
    """The smallest usual `data.max_length` for all rows, or for almost all if that is beyond the
    largest; and the number of longer rows.
    """
    longest = max(lengths)
    ordered = sorted(lengths)
    most = longest if longest <= _LENGTHS[-1] else ordered[math.ceil(_SHARE_WITHIN * len(ordered)) - 1]
    limit = next((length for length in _LENGTHS if length >= most * _MARGIN), _LENGTHS[-1])
    return limit, sum(length > limit for length in lengths)


def estimated_tokens(text: str) -> int:
    """Tokens of a text with the tokenizer of a usual model, rather too many than too few."""
    alone = len(_ALONE.findall(text))
    return alone + math.ceil((len(text) - alone) / _CHARS_OF_A_TOKEN)


def _tokens(name: FormatName, row: RawRow, columns: Renamed) -> list[int] | BadRow:
    """Estimated tokens of a row, of a pair those of each side."""
    try:
        example = (
            read_preference(row.value, columns)
            if name == "preference"
            else to_example(name, row.value, columns)
        )
    except RowError as error:
        return error.at(row.place)
    sides = example.answers if isinstance(example, Preference) else [example]
    return [_of_example(side) for side in sides]


def _of_example(example: Example) -> int:
    messages = len(example.messages) if isinstance(example, Conversation) else 0
    texts = _texts(asdict(example))
    return _OF_A_TEMPLATE + _OF_A_MESSAGE * (messages or 2) + sum(map(estimated_tokens, texts))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif value is not None:
        yield json.dumps(value, default=str)
