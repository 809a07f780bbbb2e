"""Finds out where the rows of some sequences come from."""

from pathlib import Path
from typing import Any

from unisono.data.table import TokenTable
from unisono.errors import DataError
from unisono.events import Reporter
from unisono.text import one_line


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Gives `rows`: file and line of each row of the sequences, in their order.

    Args:
        request: `table`, the directory of a token table, and `sequences` of its training split.
        report: told nothing; this takes a moment.

    Raises:
        DataError: if the table is gone, or has no such sequence.
    """
    del report
    try:
        table = TokenTable.open(Path(request["table"]), "train")
        rows = [int(row) for sequence in request["sequences"] for row in table.rows_of(int(sequence))]
        return {"rows": [table.row_id(row) for row in rows]}
    except (OSError, IndexError) as error:
        raise DataError.of("the rows cannot be looked up", where=str(request["table"]), why=one_line(str(error))) from error  # fmt: skip
