"""The dataset file of sd-scripts (`dataset_config`): its datasets and subsets, each subset with the
settings that hold for it.

A setting of a subset comes before one of its dataset, that before `[general]`, and that before one
of the main file, as there.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unisono.base.errors import ConfigError, Problem
from unisono.base.files import SOURCE_BYTES, parse_json, read_given
from unisono.base.text import nearest, one_line
from unisono.trainer.config.translation import KeyFate
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces
from unisono.trainer.readers.key_table import Values
from unisono.trainer.readers.sd_scripts.keys import KEYS, PAGE, read_mapping, resolved

Level = Literal["general", "dataset", "subset"]
_LEVELS: dict[Level, tuple[str, ...]] = {
    "general": ("dataset", "subset"),
    "dataset": ("dataset", "subset"),
    "subset": ("subset", "own"),
}
"""Which of the keys' levels a part of the file may have."""
_PARTS: dict[Level, str] = {
    "general": "[general]",
    "dataset": "[[datasets]]",
    "subset": "[[datasets.subsets]]",
}
_MAIN_NAMES = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}
"""Keys of the main file that have another name in a dataset file."""
_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\-]+)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r'\s*["\']?([A-Za-z0-9_\-]+)["\']?\s*=')


@dataclass(frozen=True)
class Subset:
    """One folder of pictures.

    Attributes:
        values: the settings that hold for it.
        place: where it is in the file.
        dataset: the number of its dataset.
    """

    values: Values
    place: str
    dataset: int


@dataclass
class DatasetFile:
    """A dataset file as it was read; with problems `subsets` may be incomplete."""

    subsets: list[Subset] = field(default_factory=list)
    fates: list[KeyFate] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def batch_sizes(self) -> list[int]:
        """The batch size of each dataset."""
        sizes = {subset.dataset: subset.values["batch_size"] for subset in self.subsets}
        return [1 if size is None else size for size in sizes.values()]

    @property
    def batch(self) -> tuple[int, int]:
        """Pictures of a forward and forwards of a step: a step has the largest batch, and no
        forward more than the smallest.
        """
        sizes = self.batch_sizes
        forward = math.gcd(*sizes) if min(sizes) > 0 else min(sizes)
        return forward, max(sizes) // max(1, forward)


def read_toml(path: Path) -> tuple[dict[str, object], dict[KeyPath, int]]:
    """A TOML file, and the line of each of its keys that is written as `key = value`.

    Raises:
        ConfigError: if it cannot be read.
    """
    text = _text_of(path)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(
            f"{path} cannot be read", where=str(path), why=one_line(str(error)), fix="fix the file"
        ) from error
    return raw, _lines_of(text)


def _text_of(path: Path) -> str:
    text = read_given(path, str(path), most_bytes=SOURCE_BYTES)
    if isinstance(text, str):
        return text
    fault, where = text
    raise ConfigError.of(fault.what, where=where, why=fault.why, fix=fault.fix)


def _lines_of(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    numbers: dict[KeyPath, int] = {}  # of tables that are items of a list: how many there are
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            table = ()
            for name in header[2].split("."):
                table = (*table, name)
                is_item = table in numbers and (header[1] == "[" or name != header[2].split(".")[-1])
                table = (*table, numbers[table]) if is_item else table
            if header[1] == "[[":
                numbers[table] = numbers.get(table, -1) + 1
                table = (*table, numbers[table])
            lines.setdefault(table, number)
        elif key is not None:
            lines.setdefault((*table, key[1]), number)
    return lines


def locate(name: str, beside: Path) -> Path:
    """A file that a config names: from the working directory, as there, or beside the config."""
    file = Path(name).expanduser()
    return beside.parent / name if not file.is_file() and (beside.parent / name).is_file() else file


def read_dataset_file(path: Path, main: Values) -> DatasetFile:
    """The subsets of a dataset file, TOML or JSON.

    Args:
        path: of the file.
        main: the values of the main file, which come last.

    Raises:
        ConfigError: if it cannot be read.
    """
    raw, lines = _read_json(path) if path.suffix.lower() == ".json" else read_toml(path)
    file = DatasetFile()
    part = _Part(file, KeyPlaces(lines, str(path)), str(path))
    for key in raw:
        if key not in ("general", "datasets"):
            part.refuse_top(key, raw[key])
    general = part.read("general", raw.get("general", {}), ("general",))
    given = {_MAIN_NAMES.get(name, name): value for name, value in main.given.items()}
    places = {_MAIN_NAMES.get(name, name): location for name, location in main.places.items()}
    for number, dataset in part.items(raw.get("datasets", []), ("datasets",)):
        at: KeyPath = ("datasets", number)
        upper = part.read("dataset", {k: v for k, v in dataset.items() if k != "subsets"}, at)
        seen: set[str] = set()
        for order, subset in part.items(dataset.get("subsets", []), (*at, "subsets")):
            inside = (*at, "subsets", order)
            specific = part.read("subset", subset, inside)
            layers = [(given, places), general, upper, specific]
            values = Values(
                {key: value for layer, _ in layers for key, value in layer.items()},
                {key: location for _, layer in layers for key, location in layer.items()},
                str(path),
                KEYS,
            )
            _add(file, Subset(values, part.places.of(inside), number), specific[0], seen)
    if not file.subsets and not file.problems:
        file.problems.append(
            Problem(
                f"{path} has no pictures to train on",
                str(path),
                "no [[datasets.subsets]] with an `image_dir` is left",
                "add one",
            )
        )
    return file


def _add(file: DatasetFile, subset: Subset, given: Mapping[str, Any], seen: set[str]) -> None:
    """Adds a subset, unless there it would not be used either."""
    folder = given.get("image_dir")
    if "metadata_file" in given or "conditioning_data_dir" in given:
        return  # refused by its key
    if not folder:
        what = "a subset has no `image_dir`"
        file.problems.append(Problem(what, subset.place, "", "add the folder of its pictures"))
    elif folder in seen:
        file.warnings.append(
            f"{subset.place}: {folder} is in this dataset already, and only the first one is used, as in"
            " sd-scripts"
        )
    elif subset.values["num_repeats"] < 1:
        file.warnings.append(f"{subset.place}: {folder} is not used: num_repeats is below 1")
    else:
        file.subsets.append(subset)
    seen.add(folder or "")


def _read_json(path: Path) -> tuple[dict[str, object], dict[KeyPath, int]]:
    try:
        raw = parse_json(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(
            f"{path} cannot be read", where=str(path), why=one_line(str(error)), fix="fix the file"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError.of(
            f"{path} is not a dataset file", where=str(path), fix="write an object with `datasets`"
        )
    return raw, {}


class _Part:
    """Reads the parts of a dataset file, and notes what is wrong with them."""

    def __init__(self, file: DatasetFile, places: KeyPlaces, name: str) -> None:
        self.file, self.places, self.name = file, places, name

    def items(self, value: Any, at: KeyPath) -> Iterator[tuple[int, dict[str, object]]]:
        """The tables of a list with their numbers; a problem if it is none."""
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            word = ".".join(str(part) for part in at if isinstance(part, str))
            what = f"`{word}` is not a list of tables"
            self.file.problems.append(Problem(what, self.places.of(at), "", f"write [[{word}]] above each"))
            return
        yield from enumerate(value)

    def refuse_top(self, key: str, value: Any) -> None:
        """A problem with a key beside `general` and `datasets`."""
        near = nearest(key, ["general", "datasets"])
        if resolved(key) is not None and not isinstance(value, dict | list):
            what, fix = f"`{key}` is in no section", "put it into [general]"
        else:
            what = f"unknown section `{key}`"
            fix = (
                f"did you mean `{near}`?"
                if near
                else f"a dataset file has [general] and [[datasets]]; {PAGE}"
            )
        self.file.problems.append(Problem(what, self.places.of((key, 0)), "", fix))

    def read(self, level: Level, raw: Any, at: KeyPath) -> tuple[dict[str, object], dict[str, str]]:
        """The values of one part, and their places."""
        if not isinstance(raw, dict):
            what = f"`{at[-1]}` is not a table"
            self.file.problems.append(
                Problem(what, self.places.of(at), "", f"write {_PARTS[level]} above its keys")
            )
            return {}, {}
        allowed = {}
        for name, value in raw.items():
            problem = self._misplaced(level, name, at)
            if problem is None:
                allowed[name] = value
            else:
                self.file.problems.append(problem)
        reading = read_mapping(allowed, self.places, self.name, inside=at)
        self.file.problems += reading.problems
        self.file.fates += reading.fates
        return reading.values, reading.places

    def _misplaced(self, level: Level, name: str, at: KeyPath) -> Problem | None:
        key = resolved(name)
        if key is None or key.level in _LEVELS[level]:
            return None
        where = self.places.of((*at, name))
        if not key.level:
            return Problem(
                f"`{name}` is not a setting of a dataset",
                where,
                "",
                "move it into the file that names the dataset file",
            )
        home: Level = "subset" if key.level == "own" else "dataset"
        return Problem(
            f"`{name}` is not a setting of {_PARTS[level]}", where, "", f"move it into {_PARTS[home]}"
        )
