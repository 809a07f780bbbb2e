"""The sampled answers of a run, from its files of rollouts: a step at a time, in batches of rows.

A file may be large, and is not trusted: texts are cut where they are read, and columns must be of
the types that a run writes.
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.base.files import open_plain, parse_json
from unisono.base.text import show_bytes
from unisono.front.board.follow import FollowedRun, inside

NO_PYARROW = "answers are in Parquet files, which pyarrow reads: pip install pyarrow"
_FILE = re.compile(r"step-(\d{8,12})\.(\d{1,6})\.parquet")
_TEXTS = ("row", "prompt", "text", "stop", "rewards")
_TYPES = {
    **dict.fromkeys(("step", "place", "answer", "draw", "policy"), "int64"),
    **dict.fromkeys(_TEXTS, "string"),
    "ids": "list<element: int32>",
    **dict.fromkeys(("reward", "advantage"), "double"),
    **dict.fromkeys(("has_loss", "is_equal", "is_replaced"), "bool"),
}
_BATCH_ROWS = 128
_BUFFER_BYTES = 1 << 20
_MOST_BYTES = 2 << 30  # of the columns that are read of a file, as its footer says
_MOST_TEXT = 4_000
_MOST_JSON = 1 << 20
_MOST_GROUPS = 200  # of a step that are listed
_MOST_READ_GROUPS = 2_000  # of a step
_MOST_STEPS = 1_000  # of a rollout, as in a config
_MOST_ANSWERS = 64  # of a group
_MOST_FILES = 5_000  # that are searched for a prompt
_MOST_OVER_STEPS = 12
_EXCERPT = 160
Group = dict[str, Any]


@dataclass
class _Answers:
    """What is read of a step: groups with their answers, by place and draw."""

    groups: dict[tuple[int, int], Group] = field(default_factory=dict)

    def add(self, row: Group) -> None:
        """Takes an answer, if there is room for it."""
        key = row["place"] or 0, row["draw"] or 0
        group = self.groups.get(key)
        if group is None:
            if len(self.groups) >= _MOST_READ_GROUPS:
                return
            group = self.groups[key] = {
                "key": f"{key[0]}.{key[1]}",
                **{name: row[name] for name in ("step", "row", "prompt", "policy")},
                "is_equal": bool(row["is_equal"]),
                "is_replaced": bool(row["is_replaced"]),
                "answers": [],
            }
        if len(group["answers"]) < _MOST_ANSWERS:
            names = ("answer", "text", "tokens", "stop", "reward", "rewards", "advantage", "has_loss")
            group["answers"].append({name: row[name] for name in names if name in row})

    def in_order(self) -> list[Group]:
        """The groups by place, each with its answers in order."""
        for group in self.groups.values():
            group["answers"].sort(key=lambda answer: answer["answer"] or 0)
        return [group for _, group in sorted(self.groups.items())]


def answers_of_step(run: FollowedRun, step: int | None, key: str | None) -> Group:
    """A step with its groups, and the answers of one of them.

    Args:
        run: with rollouts, or without: then the result is empty.
        step: the nearest that there is; None: the newest.
        key: of the group; None, or one that there is not: the first.
    """
    files = _rollouts(run)
    if not files:
        return {}
    _require_pyarrow()
    firsts = sorted(files)
    last = _last_step(run, files[firsts[-1]], firsts[-1])
    step = last if step is None else min(max(step, firsts[0]), last)
    groups = _groups_of(run, files, step)
    chosen = next((group for group in groups if group["key"] == key), groups[0] if groups else None)
    if chosen is not None:
        chosen = _with_texts(run, files, chosen)
    return {
        "first": firsts[0],
        "last": last,
        **_shown_step(step, groups),
        "group": chosen,
    }


def answers_over_steps(run: FollowedRun, row: str) -> Group:
    """The groups of one prompt over the steps, evenly thinned; the first and the last stay."""
    _require_pyarrow()
    files = _rollouts(run)
    firsts = sorted(files)[-_MOST_FILES:]
    places = [(first, place) for first in firsts for place in _places_of(run, files[first], row)]
    shown = _thinned(places, _MOST_OVER_STEPS)
    groups = []
    for first, (step, place, draw) in shown:
        answers = _read_step(run, files[first], step, only=place)
        groups += [group for at, group in answers.groups.items() if at == (place, draw)]
    return {"row": row, "over": groups, "left_out": len(places) - len(shown)}


def answers_of_some_steps(
    run: FollowedRun, *, steps: int = 6, groups: int = 6, characters: int = 800
) -> Group:
    """A few steps, evenly spread, each with the answers of some groups, for a page without a
    server.

    Prompts that are in several of these steps come first.
    """
    files = _rollouts(run)
    if not files:
        return {}
    _require_pyarrow()
    firsts = sorted(files)
    last = _last_step(run, files[firsts[-1]], firsts[-1])
    all_steps = _thinned(range(firsts[0], last + 1), steps)
    read = {step: _groups_of(run, files, step) for step in all_steps}
    often: dict[str, int] = {}
    for of_step in read.values():
        for row in {group["row"] for group in of_step}:
            often[row] = often.get(row, 0) + 1
    shown = []
    for step, of_step in read.items():
        kept = sorted(of_step, key=lambda group: -often[group["row"]])[:groups]
        kept = [_with_texts(run, files, group, characters) for group in kept]
        page = _shown_step(step, of_step)
        left_out = page["groups_left_out"] + len(page["groups"]) - len(kept)
        rows = [_summary(group) for group in kept]
        shown.append({**page, "groups": rows, "groups_left_out": left_out, "details": kept})
    return {"first": firsts[0], "last": last, "steps": shown}


def _require_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise ValueError(NO_PYARROW)


def _thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _rollouts(run: FollowedRun) -> dict[int, list[Path]]:
    """The files of all ranks, by the first step of each rollout."""
    files: dict[int, list[Path]] = {}
    for path in sorted(run.run.rollouts.glob("step-*.parquet")):
        if matched := _FILE.fullmatch(path.name):
            files.setdefault(int(matched[1]), []).append(path)
    return files


def _last_step(run: FollowedRun, paths: Sequence[Path], first: int) -> int:
    """The last step of a rollout."""
    last = first
    for path in paths:
        with _opened(run, path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=["step"]):
                last = max([last, *(step for step in batch.column(0).to_pylist() if step is not None)])
    return min(last, first + _MOST_STEPS - 1)


def _groups_of(run: FollowedRun, files: Mapping[int, Sequence[Path]], step: int) -> list[Group]:
    """All groups of a step; their answers have no texts, which may be long."""
    return _read_step(run, _files_of(files, step), step).in_order()


def _files_of(files: Mapping[int, Sequence[Path]], step: int) -> Sequence[Path]:
    """The files of the rollout that a step belongs to."""
    return files.get(max((first for first in files if first <= step), default=-1), ())


def _with_texts(
    run: FollowedRun, files: Mapping[int, Sequence[Path]], group: Group, characters: int = _MOST_TEXT
) -> Group:
    """A group whose answers have their texts."""
    place = int(group["key"].partition(".")[0])
    read = _read_step(run, _files_of(files, group["step"]), group["step"], only=place).in_order()
    whole: Group = next((one for one in read if one["key"] == group["key"]), group)
    for answer in whole["answers"]:
        answer["text"] = _cut(answer.get("text", ""), characters)
    return whole


def _read_step(run: FollowedRun, paths: Sequence[Path], step: int, *, only: int | None = None) -> _Answers:
    """The answers of a step in the files of a rollout; `only`: with texts those of one place."""
    from pyarrow import compute

    answers = _Answers()
    for path in paths:
        with _opened(run, path) as file:
            names = list(_TYPES)
            if only is None:
                names.remove("text")
            for batch in file.iter_batches(_BATCH_ROWS, columns=names):
                mask = compute.equal(batch.column("step"), step)
                if only is not None:
                    mask = compute.and_(mask, compute.equal(batch.column("place"), only))
                for row in _rows(batch.filter(mask)):
                    answers.add(row)
    return answers


def _places_of(run: FollowedRun, paths: Sequence[Path], row: str) -> list[tuple[int, int, int]]:
    """Step, place and draw of the groups of a prompt in the files of a rollout."""
    from pyarrow import compute

    places = set()
    for path in paths:
        with _opened(run, path) as file:
            names = ["step", "place", "draw"]
            for batch in file.iter_batches(_BATCH_ROWS, columns=[*names, "row"]):
                same = compute.equal(batch.column("row"), row)
                places |= {
                    (one["step"], one["place"], one["draw"])
                    for one in batch.select(names).filter(same).to_pylist()
                }
    return sorted(places)


@contextmanager
def _opened(run: FollowedRun, path: Path) -> Iterator[Any]:
    """A file of rollouts, of which no column is in memory as a whole.

    Raises:
        ValueError: if it is damaged, too large, or not one of a run.
        OSError: if it cannot be opened, or leads out of the run.
    """
    from pyarrow import ArrowInvalid, parquet

    with open_plain(inside(run.root, path)) as source:
        try:
            _check_types(path, parquet.read_schema(source))
            source.seek(0)
            file = parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except ArrowInvalid as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
        sizes = (
            group.column(number).total_uncompressed_size
            for group in map(file.metadata.row_group, range(file.metadata.num_row_groups))
            for number in range(group.num_columns)
        )
        if (size := sum(sizes)) > _MOST_BYTES:
            raise ValueError(f"{path.name} has {show_bytes(size)} of answers, more than the board reads")
        yield file


def _check_types(path: Path, schema: Any) -> None:
    types = {name: str(schema.field(name).type) for name in schema.names}
    for name, kind in _TYPES.items():
        # lists of older versions of pyarrow have items, not elements
        if types.get(name, "").replace("item:", "element:") != kind:
            raise ValueError(f"{path.name} has no column {name} as a run writes it")


def _rows(batch: Any) -> Iterator[Group]:
    """The rows of a batch, with texts as they are shown."""
    from pyarrow import compute

    columns: dict[str, Sequence[Any]] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if name == "ids":
            columns["tokens"] = compute.list_value_length(column).to_pylist()
        elif name in _TEXTS:
            value_of = functools.cache(_VALUES.get(name, _cut))  # a group has one prompt
            columns[name] = [value_of(text or "") for text in column.to_pylist()]
        else:
            columns[name] = column.to_pylist()
    for number in range(batch.num_rows):
        yield {name: values[number] for name, values in columns.items()}


def _cut(text: str, most: int = _MOST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _prompt(text: str) -> Any:
    """A text, or messages of role and content; a damaged one as it is."""
    value = _json(text)
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, list):
        turns = [turn for turn in value[:100] if isinstance(turn, dict)]
        return [
            {"role": _cut(str(turn.get("role")), 40), "content": _cut(str(turn.get("content")))}
            for turn in turns
        ]
    return _cut(text)


def _parts(text: str) -> dict[str, float | None]:
    """Rewards by function."""
    value = _json(text)
    items = value.items() if isinstance(value, dict) else ()
    return {
        _cut(str(name), 80): float(part) if isinstance(part, int | float) else None
        for name, part in list(items)[:40]
    }


def _json(text: str) -> Any:
    if len(text) > _MOST_JSON:
        return None
    try:
        return parse_json(text)
    except (ValueError, json.JSONDecodeError):
        return None


_VALUES = {"prompt": _prompt, "rewards": _parts}


def _shown_step(step: int, groups: Sequence[Group]) -> Group:
    """What is shown of a step beside the answers of a group."""
    return {
        "step": step,
        "figures": _figures(groups),
        "groups": [_summary(group) for group in groups[:_MOST_GROUPS]],
        "groups_left_out": max(0, len(groups) - _MOST_GROUPS),
    }


def _summary(group: Group) -> Group:
    """A group in one line."""
    answers, prompt = group["answers"], group["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) if prompt else ""
    return {
        **{name: group[name] for name in ("key", "row", "is_equal", "is_replaced")},
        "prompt": _cut(" ".join(text.split()), _EXCERPT),
        "rewards": [answer["reward"] for answer in answers],
        "truncated": sum(answer["stop"] == "length" for answer in answers),
        "mean": _mean([answer["reward"] for answer in answers]),
    }


def _figures(groups: Sequence[Group]) -> dict[str, float | None]:
    """Of the answers that are trained on, the means that metrics have of a step."""
    used = [group for group in groups if not group["is_replaced"]]
    answers = [answer for group in used for answer in group["answers"]]
    names = list(dict.fromkeys(name for answer in answers for name in answer["rewards"]))
    return {
        "reward": _mean([answer["reward"] for answer in answers]),
        **(
            {f"reward_{name}": _mean([answer["rewards"].get(name) for answer in answers]) for name in names}
            if len(names) > 1
            else {}
        ),
        "answer_tokens": _mean([answer["tokens"] for answer in answers]),
        "truncated": _mean([answer["stop"] == "length" for answer in answers]),
        "equal_groups": _mean([group["is_equal"] for group in used]),
        "no_reward": _mean([answer["reward"] is None for answer in answers]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
