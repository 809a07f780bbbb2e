"""A JSON decoder that detects duplicate keys with different values."""

import json
from typing import Any

from unisono.data.rows import BadRow, Place
from unisono.text import one_line


class Decoder:
    """Decodes JSON, and detects objects with a duplicate key whose values differ.

    Python silently keeps the last value. Equal values are harmless.
    """

    def __init__(self) -> None:
        self._doubled = False
        self._json = json.JSONDecoder(object_pairs_hook=self._object)
        self.read_any = False  # whether any line was JSON

    def decode(self, text: str) -> Any:
        """The value of a JSON text.

        Raises:
            ValueError: if it is not valid JSON.
            RecursionError: if it is nested too deep.
        """
        value = self._json.decode(text)
        self.read_any = True
        return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: dict[str, Any] = {}
            for key, inner in pairs:
                if seen.setdefault(key, inner) != inner:
                    self._doubled = True
                    return _Doubled(value, key)
        return value

    def take_doubled(self, place: Place, value: Any) -> BadRow | None:
        """The bad row of a value with a duplicate key; None if it has none."""
        key = _doubled_key(value) if self._doubled else None
        if key is None:
            return None
        shown = one_line(repr(key), limit=60)
        return BadRow(
            place, f"duplicate key {shown} in an object, with different values", "remove one of them"
        )


class _Doubled(dict[str, Any]):
    """An object that had a duplicate key."""

    def __init__(self, value: dict[str, Any], key: str) -> None:
        super().__init__(value)
        self.key = key


def _doubled_key(value: Any) -> str | None:
    if isinstance(value, _Doubled):
        return value.key
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((key for key in map(_doubled_key, inner) if key is not None), None)
