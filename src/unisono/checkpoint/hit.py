"""Which tensors of a damaged safetensors file are hit, by the digests that the manifest has of each. Torch-free.

It is looked for only after the whole file's digest was found wrong: it says where, and never that a file is well.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from unisono.checkpoint.manifest import FileEntry
from unisono.checkpoint.tensor_file import ITEM_BYTES

HEADER = "the header"
_LENGTH_BYTES = 8
_HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own
_CHUNK_BYTES = 4 << 20
_SHOWN = 3


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes are in the file."""

    name: str
    begin: int
    end: int


def hit_tensors(fd: int, entry: FileEntry) -> list[str]:
    """The tensors whose bytes are not those that were written, in the order of the file; [HEADER] where that is hit.

    Args:
        fd: of the damaged file, open for reading.
        entry: what the manifest says of it. Without digests of its tensors nothing can be said, and nothing is.

    Raises:
        OSError: if it cannot be read.
    """
    if not entry.tensors:
        return []
    places = _places(fd, entry)
    if places is None:
        return [HEADER]
    hit = [place.name for place in places if _digest(fd, place) != entry.tensors[place.name]]
    return hit or [HEADER]


def show_hit(tensors: Sequence[str]) -> str:
    """Some of them by name, for people; nothing for none."""
    more = f" and {len(tensors) - _SHOWN} tensors more" if len(tensors) > _SHOWN else ""
    return ", ".join(tensors[:_SHOWN]) + more


def _places(fd: int, entry: FileEntry) -> list[_Place] | None:
    """Where each tensor is, as the header says; None if the header cannot be the one that was written."""
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if length > min(_HEADER_LIMIT_BYTES, entry.bytes):
        return None
    try:
        header = json.loads(os.pread(fd, length, _LENGTH_BYTES))
        return _checked(header, _LENGTH_BYTES + length, entry)
    except (ValueError, TypeError, KeyError, AttributeError):  # whatever a turned bit makes of a text
        return None


def _checked(header: dict[str, Any], data: int, entry: FileEntry) -> list[_Place] | None:
    header.pop("__metadata__", None)
    if header.keys() != entry.tensors.keys():
        return None
    places = []
    for name, value in header.items():
        begin, end = value["data_offsets"]
        if end - begin != prod(value["shape"]) * ITEM_BYTES[value["dtype"]]:
            return None
        places.append(_Place(name, data + begin, data + end))
    places.sort(key=lambda place: (place.begin, place.end))
    ends = [data, *(place.end for place in places)]
    is_whole = all(place.begin == end for place, end in zip(places, ends, strict=False))
    return places if is_whole and ends[-1] == entry.bytes else None


def _digest(fd: int, place: _Place) -> str:
    digest = xxhash.xxh3_64()
    at = place.begin
    while at < place.end and (piece := os.pread(fd, min(_CHUNK_BYTES, place.end - at), at)):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest() if at == place.end else "cut short"
