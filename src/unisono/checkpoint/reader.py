"""Reads a checkpoint's tensors one by one, whole, from whole files or from the parts that several ranks wrote.

It does not look for damage: have CheckpointStore read the directory through first.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from unisono.checkpoint.tensor_file import ALIASES, PARTS, group_files
from unisono.checkpoint.values import STATE, decode_values
from unisono.errors import IntegrityError
from unisono.files import parse_json, read_text

Tensors = dict[str, torch.Tensor]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Outline:
    """A tensor's whole shape and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Place:
    """Where a part is: the file, its name there, and where in the whole it belongs."""

    file: Any
    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class CheckpointReader:
    """An open checkpoint. Files are mapped, so a tensor is read when it is asked for.

    Attributes:
        values: everything that is no tensor.
        groups: the outlines of the tensors, by group and name.

    Raises:
        IntegrityError: if the files do not hold what unisono writes, or parts are missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, dict[str, list[_Place]]] = {}
        self.groups: dict[str, dict[str, Outline]] = {}
        try:
            document = parse_json(read_text(directory / STATE, errors="surrogatepass"))
            self.values: dict[str, Any] = decode_values(document["state"])
            shards = int(document.get("shards", 1))
            for group in document["groups"]:
                self._open(group, [directory / name for name in group_files(group, shards)])
        except IntegrityError:
            raise
        except (
            Exception
        ) as error:  # whatever a reader says of files that are not ours, it is damage; the cause is chained
            raise _unreadable(directory, str(error)) from error

    def tensor(self, group: str, name: str) -> torch.Tensor:
        """A whole tensor on the CPU, put together from its parts where there are several."""
        places, outline = self._places[group][name], self.groups[group][name]
        if len(places) == 1 and places[0].shape == outline.shape:
            found: torch.Tensor = places[0].file.get_tensor(places[0].name)
            return found
        whole = torch.empty(outline.shape, dtype=outline.dtype)
        for place in places:
            window = tuple(slice(o, o + s) for o, s in zip(place.offsets, place.shape, strict=True))
            whole[window] = place.file.get_tensor(place.name)
        return whole

    def group(self, group: str) -> Tensors:
        """All tensors of a group. Those that were one in memory when they were saved are one again."""
        found: Tensors = {}
        for name, places in self._places[group].items():
            first = next((other for other in found if self._places[group][other] is places), None)
            found[name] = found[first] if first is not None else self.tensor(group, name)
        return found

    def _open(self, group: str, files: list[Path]) -> None:
        self.groups[group], self._places[group] = {}, {}
        for path in files:
            file: Any = safe_open(str(path), framework="pt")
            metadata = file.metadata() or {}
            parts = parse_json(metadata.get(PARTS, "{}"))
            for name in file.keys():  # noqa: SIM118 - it is no dict
                self._note(group, name, file, parts.get(name))
            for name, original in parse_json(metadata.get(ALIASES, "{}")).items():
                self.groups[group][name] = self.groups[group][original]
                self._places[group][name] = self._places[group][original]
        self._check_cover(group)

    def _note(self, group: str, name: str, file: Any, part: list[list[int]] | None) -> None:
        piece = file.get_slice(name)
        shape = tuple(piece.get_shape())
        whole, offsets = (tuple(part[0]), tuple(part[1])) if part else (shape, (0,) * len(shape))
        outline = Outline(whole, DTYPES[piece.get_dtype()])
        if self.groups[group].setdefault(name, outline) != outline:
            raise _unreadable(self._directory, f"the parts of {name} are of different tensors")
        self._places[group].setdefault(name, []).append(_Place(file, name, shape, offsets))

    def _check_cover(self, group: str) -> None:
        """The parts of a tensor are the whole of it: inside, none on top of another, and as many values as it has."""
        for name, outline in self.groups[group].items():
            places = self._places[group][name]
            held = sum(torch.Size(place.shape).numel() for place in places)
            inside = all(
                o >= 0 and o + s <= w
                for place in places
                for o, s, w in zip(place.offsets, place.shape, outline.shape, strict=True)
            )
            begins = {place.offsets for place in places}
            if not inside or held != torch.Size(outline.shape).numel() or len(begins) != len(places):
                raise _unreadable(self._directory, f"the parts of {name} do not make the whole")


def _unreadable(directory: Path, why: str) -> IntegrityError:
    return IntegrityError.of(
        f"checkpoint {directory.name} cannot be read: {why}", where=str(directory),
        why="its files do not hold what unisono writes", fix="`unisono checkpoint verify RUN` says what is damaged",
    )  # fmt: skip
