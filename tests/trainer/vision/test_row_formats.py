"""Rows with pictures as other programs write them give the same tokens and pictures.

Run: pytest tests/trainer/vision/test_row_formats.py
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.vision.broken import PNG, saved
from tests.trainer.vision.conftest import Gallery
from tests.vision_models import draw
from unisono.base.errors import DataError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.pictures.store import read_pictures
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers

pytestmark = pytest.mark.processes  # pictures are decoded in them

OTHER = saved(draw("blue", "circle", size=(64, 64)), "PNG")
FIRST, SECOND = "what is this?", "and this?"
ANSWERS = ("a red square", "a blue circle")
_URLS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (PNG, OTHER)]
Row = Mapping[str, Any]


def _turns(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def _from(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]


def _part(text: str, **picture: Any) -> list[dict[str, Any]]:
    return [picture, {"type": "text", "text": text}]


_TAGGED = (f"<image>{FIRST}", ANSWERS[0], f"<image>{SECOND}", ANSWERS[1])
_FILES = ["a.png", "b.png"]
ROWS: dict[str, Row] = {
    "llamafactory-sharegpt": {"conversations": _from(*_TAGGED), "images": _FILES},
    "llamafactory-messages": {"messages": _turns(*_TAGGED), "images": _FILES},
    "ms-swift": {"messages": _turns(*_TAGGED), "images": [{"path": "a.png"}, {"bytes": None, "path": "b.png"}]},
    "base64": {"messages": _turns(*_TAGGED), "images": _URLS},
    "openai": {
        "messages": _turns(
            _part(FIRST, type="image_url", image_url={"url": _URLS[0]}), ANSWERS[0],
            _part(SECOND, type="image_url", image_url={"url": _URLS[1]}), ANSWERS[1],
        )
    },
    "anthropic": {
        "messages": _turns(
            _part(FIRST, type="image", source={"type": "base64", "media_type": "image/png", "data": _URLS[0].partition(",")[2]}),
            ANSWERS[0],
            _part(SECOND, type="image", source={"type": "base64", "media_type": "image/png", "data": _URLS[1].partition(",")[2]}),
            ANSWERS[1],
        )
    },
    "trl-parts": {
        "messages": _turns(_part(FIRST, type="image"), ANSWERS[0], _part(SECOND, type="image"), ANSWERS[1]),
        "images": _FILES,
    },
    "trl-prompt-completion": {
        "prompt": _turns(_part(FIRST, type="image"), ANSWERS[0], _part(SECOND, type="image")),
        "completion": [{"role": "assistant", "content": ANSWERS[1]}],
        "images": _FILES,
    },
    "unsloth": {
        "messages": _turns(
            _part(FIRST, type="image", image="a.png"), ANSWERS[0], _part(SECOND, type="image", image="file://FOLDER/b.png"), ANSWERS[1]
        )
    },
    "alpaca": {"history": [list(_TAGGED[:2])], "instruction": _TAGGED[2], "output": ANSWERS[1], "images": _FILES},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pictures."""
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(OTHER)
    return tmp_path


def _prepared(gallery: Gallery, file: Path, **data: Any) -> tuple[list[int], list[tuple[str, int]]]:
    """The tokens of the first row, and the digests and widths of its pictures."""
    plan = gallery.plan("llava", data={"train": str(file), **data}, batch={"global": 1, "micro": 1})
    table = Path(plan.data.cache_dir)
    pictures = read_pictures(table)
    numbers = read_picture_numbers(table)[0]
    ids = TokenTable.open(table, "train").row(0)[0].tolist()
    return ids, [(pictures[number].digest, pictures[number].width) for number in numbers]


def _written(folder: Path, row: Row) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row).replace("FOLDER", str(folder)) + "\n")
    return file


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_other_programs_give_the_same_tokens_and_pictures(
    gallery: Gallery, folder: Path, name: str
) -> None:
    wanted = _prepared(gallery, _written(folder, ROWS["llamafactory-messages"]))

    ids, pictures = _prepared(gallery, _written(folder, ROWS[name]))

    assert (ids, pictures) == wanted
    assert [width for _, width in pictures] == [96, 64]


def test_pictures_of_an_arrow_column_are_read_and_their_nulls_too(gallery: Gallery, folder: Path) -> None:
    """Arrow fills keys that other parts have with null."""
    turns = _turns(
        [{"type": "image", "text": None}, {"type": "text", "text": FIRST}],
        [{"type": "text", "text": ANSWERS[0]}],
        [{"type": "image", "text": None}, {"type": "text", "text": SECOND}],
        [{"type": "text", "text": ANSWERS[1]}],
    )
    images = [{"bytes": PNG, "path": None}, {"bytes": OTHER, "path": "b.png"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns, "images": images}]), folder / "rows.parquet")
    wanted = _prepared(gallery, _written(folder, ROWS["llamafactory-messages"]))

    assert _prepared(gallery, folder / "rows.parquet") == wanted


def test_one_picture_in_the_column_image_of_llava_and_trl(gallery: Gallery, folder: Path) -> None:
    rows = [{"image": "a.png", "conversations": _from(f"<image>\n{FIRST}", ANSWERS[0])}]
    (folder / "llava.json").write_text(json.dumps(rows))
    plain = {"messages": _turns(FIRST, ANSWERS[0]), "image": "a.png"}
    tagged = {"messages": _turns(f"<image>{FIRST}", ANSWERS[0]), "images": ["a.png"]}

    _, pictures = _prepared(gallery, folder / "llava.json")

    assert [width for _, width in pictures] == [96]
    assert _prepared(gallery, _written(folder, plain)) == _prepared(gallery, _written(folder, tagged))


def test_paths_begin_in_media_dir_if_it_is_set(gallery: Gallery, folder: Path, tmp_path_factory: Any) -> None:
    rows = tmp_path_factory.mktemp("elsewhere")
    file = _written(rows, ROWS["llamafactory-messages"])
    with pytest.raises(DataError) as caught:
        _prepared(gallery, file)
    assert "there is no such file" in caught.value.problems[0].why

    wanted = _prepared(gallery, _written(folder, ROWS["llamafactory-messages"]))
    assert _prepared(gallery, file, media_dir=str(folder)) == wanted
    source = [{"path": str(file), "media_dir": str(folder)}]
    plan = gallery.plan("llava", data={"train": source}, batch={"global": 1, "micro": 1})
    assert plan.data.ledger["pictures"] == 2


METADATA: dict[str, list[Row]] = {
    "messages": [{"file_name": "a.png", "messages": _turns(FIRST, ANSWERS[0])}],
    "question and answer": [{"file_name": "a.png", "question": FIRST, "answer": ANSWERS[0]}],
    "prompt and completion": [{"file_name": "a.png", "prompt": FIRST, "completion": ANSWERS[0]}],
    "a place": [{"file_name": "a.png", "instruction": f"<image>{FIRST}", "output": ANSWERS[0]}],
}


_KINDS = [(rows, kind) for rows in METADATA for kind in ("jsonl", "csv", "parquet")]
_KINDS.remove(("messages", "csv"))  # a field of CSV holds no list


@pytest.mark.parametrize(("rows", "kind"), _KINDS)
def test_a_folder_with_a_metadata_file_is_read_as_hugging_face_does(
    gallery: Gallery, folder: Path, rows: str, kind: str
) -> None:
    tagged = {"messages": _turns(f"<image>{FIRST}", ANSWERS[0]), "images": ["a.png"]}
    wanted = _prepared(gallery, _written(folder, tagged))
    (folder / "rows.jsonl").unlink()
    _write_metadata(folder, METADATA[rows], kind)

    assert _prepared(gallery, folder) == wanted


def _write_metadata(folder: Path, rows: list[Row], kind: str) -> None:
    file = folder / f"metadata.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    elif kind == "csv":
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        file.write_text("".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in cells))
    else:
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_each_metadata_file_names_the_pictures_of_its_own_folder(gallery: Gallery, folder: Path) -> None:
    for name, data in (("one", PNG), ("two", OTHER)):
        (folder / name).mkdir()
        (folder / name / "a.png").write_bytes(data)
        row = {"file_names": ["a.png", "../b.png"], "question": FIRST, "answer": ANSWERS[0]}
        _write_metadata(folder / name, [row], "jsonl")

    plan = gallery.plan("llava", data={"train": f"{folder}/*/metadata.jsonl"}, duration="1 steps")

    table = Path(plan.data.cache_dir)
    widths = [[read_pictures(table)[n].width for n in numbers] for numbers in read_picture_numbers(table)]
    assert widths == [[96, 64], [64, 64]]
    assert "file_names" not in plan.data.formats[0].partition("not read")[2]
    assert not [line for line in plan.data.warnings if "no place" in line]


def test_rows_of_a_metadata_file_without_their_pictures(gallery: Gallery, folder: Path) -> None:
    rows: list[Row] = [
        {"file_name": name, "question": FIRST, "answer": ANSWERS[0]} for name in ("a.png", "none.png")
    ]
    _write_metadata(folder, rows, "jsonl")
    with pytest.raises(DataError) as caught:
        _prepared(gallery, folder)
    assert [problem.where for problem in caught.value.problems] == [f"{folder}/metadata.jsonl:2"]
    assert "none.png cannot be used: there is no such file" in caught.value.problems[0].why

    source = [{"path": str(folder), "columns": {"images": None}}]
    plan = gallery.plan("llava", data={"train": source}, batch={"global": 1, "micro": 1})
    assert "pictures" not in plan.data.ledger


def test_bounds_of_a_part_go_before_those_of_the_config(gallery: Gallery, folder: Path) -> None:
    row = {"messages": _turns(_part(FIRST, type="image", image="a.png", max_pixels=1500), ANSWERS[0])}

    _, pictures = _prepared(gallery, _written(folder, row), pixels={"max": 600})

    assert [width for _, width in pictures] == [47]


def test_columns_with_other_names_are_mapped(gallery: Gallery, folder: Path) -> None:
    row = {"messages": _turns(*_TAGGED), "photos": _FILES}
    file = _written(folder, row)
    source = [{"path": str(file), "columns": {"images": "photos"}}]

    plan = gallery.plan("llava", data={"train": source}, batch={"global": 1, "micro": 1})

    assert plan.data.ledger["pictures"] == 2


def test_the_model_of_a_run_without_pictures_is_as_before(gallery: Gallery, folder: Path) -> None:
    """Rows of text need no processor: it is not loaded, and the vision part is not in memory."""
    file = _written(folder, {"messages": _turns("what is red?", "a color")})

    plan = gallery.plan("llava", data={"train": str(file)}, batch={"global": 1, "micro": 1})

    assert not plan.model.reads_pictures
    assert plan.data.pictures is None
    assert "pictures" not in plan.data.ledger


_PROMPTS: dict[str, Row] = {
    "text": {"prompt": f"<image>{FIRST}"},
    "without-place": {"prompt": FIRST},
    "messages": {"prompt": _turns(f"<image>{FIRST}")},
    "trl-parts": {"prompt": _turns(_part(FIRST, type="image"))},
    "question": {"question": f"<image>{FIRST}", "answer": "a <image> of nothing"},
    "with-answer": {"messages": _turns(f"<image>{FIRST}", ANSWERS[0])},
    "alpaca": {"instruction": f"<image>{FIRST}", "output": ANSWERS[0]},
}


@pytest.mark.parametrize("name", _PROMPTS)
def test_prompts_of_rewards_have_pictures_too(gallery: Gallery, folder: Path, name: str) -> None:
    more: dict[str, Any] = {
        "objective": "grpo", "rewards": ["exact"], "rollout": {"group": 2, "max_new_tokens": 5},
        "batch": {"global": 2, "micro": 1},
    }  # fmt: skip
    file = _written(folder, {**_PROMPTS[name], "images": ["a.png"], "solution": "red"})

    plan = gallery.plan("llava", data={"train": str(file), "packing": False}, **more)

    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    processor = PictureProcessor(gallery.model("llava"))
    template = processor.processor.tokenizer.chat_template or processor.template
    wanted = processor.processor.tokenizer.apply_chat_template(
        _turns("<image>" * 16 + FIRST), chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert processor.processor.tokenizer.decode(table.row(0)[0]) == wanted
    assert read_picture_numbers(Path(plan.data.cache_dir)) == [[0]]
    record: dict[str, Any] = table.record(0)
    assert record["columns"]["images"] == [str(folder / "a.png")]
    assert record["columns"]["solution"] == "red"
    assert "<image>" + FIRST in json.dumps(record["prompt"])
