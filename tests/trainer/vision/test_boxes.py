"""Boxes of ms-swift's column `objects` are written as the model's family does, at its scale.

Run: pytest tests/trainer/vision/test_boxes.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.trainer.vision import picture_rewards
from tests.trainer.vision.conftest import Gallery
from unisono.base.errors import DataError
from unisono.trainer.data.pictures.boxes import FORMS
from unisono.trainer.data.token_table import TokenTable

pytestmark = pytest.mark.processes  # pictures are decoded in them

_TOKENS = ["<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"]
_SEEN = ("<image>Describe the image.", "<ref-object><bbox> and <ref-object><bbox> are playing on the beach")
_BOXES = [[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]]
_OBJECTS: dict[str, Any] = {
    "ref": ["a dog", "a woman"],
    "bbox": _BOXES,
}
"""A row of ms-swift's page on datasets, of a picture of 1500 × 1800 pixels."""


def _row(*turns: str, images: list[str], objects: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, "images": images, "objects": objects}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and models whose tokenizers have the tokens of boxes."""
    folder = tmp_path_factory.mktemp("boxes")
    for name, size in {"dog": (1500, 1800), "sheep": (900, 800), "screen": (2500, 2000)}.items():
        Image.new("RGB", size, (200, 30, 30)).save(folder / f"{name}.png")
    return folder


def _model(gallery: Gallery, folder: Path, family: str) -> str:
    directory = folder / family
    if not directory.exists():
        shutil.copytree(gallery.model(family), directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.add_special_tokens({"extra_special_tokens": _TOKENS})
        tokenizer.save_pretrained(directory)
    return str(directory)


def _text(gallery: Gallery, folder: Path, model: str, row: dict[str, Any], **data: Any) -> str:
    """The text of a prepared row, without the tokens of pictures."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    plan = gallery.plan(
        "llava",
        model={"path": model, "resize_vocabulary": True},
        data={"train": str(file), "max_length": 2048, **data},
        batch={"global": 1, "micro": 1},
    )
    ids = TokenTable.open(Path(plan.data.cache_dir), "train").row(0)[0].tolist()
    text: str = transformers.AutoTokenizer.from_pretrained(model).decode(ids)
    return text.replace("<|image_pad|>", "")


def test_boxes_are_thousandths_of_the_sides_for_qwen3_vl(gallery: Gallery, folder: Path) -> None:
    """The texts of ms-swift's page, whose first form has what its second one gives."""
    model = _model(gallery, folder, "qwen3_vl")

    seen = _text(gallery, folder, model, _row(*_SEEN, images=["dog.png"], objects=_OBJECTS))
    assert (
        "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|> and"
        " <|object_ref_start|>a woman<|object_ref_end|><|box_start|>(451,381),(733,793)<|box_end|> are playing"
    ) in seen
    sheep = {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]]}
    row = _row("<image>Find the <ref-object> in it", "<bbox><bbox>", images=["sheep.png"], objects=sheep)
    seen = _text(gallery, folder, model, row)
    assert "Find the <|object_ref_start|>sheep<|object_ref_end|> in it" in seen
    assert "<|box_start|>(101,201),(150,266)<|box_end|><|box_start|>(401,601),(550,666)<|box_end|>" in seen
    row = _row(
        "<image>Open it",
        "click(start_box='<bbox>')",
        images=["screen.png"],
        objects={"ref": [], "bbox": [[615, 226]]},
    )
    assert "click(start_box='<|box_start|>(246,113)<|box_end|>')" in _text(gallery, folder, model, row)


@pytest.mark.parametrize("most", [None, 4000])
def test_boxes_are_pixels_of_the_resized_picture_for_qwen2_5_vl(
    gallery: Gallery, folder: Path, most: int | None
) -> None:
    model = _model(gallery, folder, "qwen2_5_vl")
    first = (1500, 1800) if most is None else (57, 69)
    height, width = smart_resize(first[1], first[0], factor=28, min_pixels=28 * 28, max_pixels=84 * 84)

    row = _row(*_SEEN, images=["dog.png"], objects=_OBJECTS)
    seen = _text(gallery, folder, model, row, pixels={"max": most})

    for box in _BOXES:
        x1, y1, x2, y2 = (
            round(at / side * target)
            for at, side, target in zip(box, (1500, 1800) * 2, (width, height) * 2, strict=True)
        )
        assert f"<|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>" in seen


def test_shares_the_picture_of_a_box_and_lists_of_numbers(gallery: Gallery, folder: Path) -> None:
    model = _model(gallery, folder, "qwen3_vl")
    turns = ("<image><image>where is the <ref-object>?", '[{"bbox_2d": <bbox>}, {"bbox_2d": <bbox>}]')
    objects = {"ref": ["sheep"], "bbox": [[750, 900, 1500, 1800], [450, 400, 900, 800]], "image_id": [0, 1]}
    images = ["dog.png", "sheep.png"]

    seen = _text(gallery, folder, model, _row(*turns, images=images, objects=objects), boxes="list")
    assert "where is the sheep?" in seen
    assert '[{"bbox_2d": [500, 500, 1000, 1000]}, {"bbox_2d": [500, 500, 1000, 1000]}]' in seen

    objects = {"ref": ["sheep"], "bbox": [[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 1, 1]], "bbox_type": "norm1"}
    seen = _text(gallery, folder, model, _row(*turns, images=images, objects=objects), boxes="list")
    assert '[{"bbox_2d": [100, 200, 300, 400]}, {"bbox_2d": [500, 500, 1000, 1000]}]' in seen


def test_rows_of_a_template_of_llamafactory_have_the_same_boxes(gallery: Gallery, folder: Path) -> None:
    model = _model(gallery, folder, "qwen3_vl")
    row = _row(*_SEEN, images=["dog.png"], objects=_OBJECTS)

    text = _text(gallery, folder, model, row, template="lf:qwen3_vl_nothink")

    assert "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>" in text


def test_the_form_of_internvl_is_that_of_ms_swift() -> None:
    form = FORMS["InternVLProcessor"]

    assert form.ref.format("sheep") == "<ref>sheep</ref>"
    assert form.box([101, 201, 150, 266]) == "<box>[[101, 201, 150, 266]]</box>"
    assert not form.in_pixels


_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one too few": ({**_OBJECTS, "bbox": _BOXES[:1]}, "it has 2 × <bbox>, and objects has 1 in bbox"),
    "names": ({**_OBJECTS, "ref": []}, "it has 2 × <ref-object>, and objects has 0 in ref"),
    "shares": ({**_OBJECTS, "bbox_type": "norm1"}, "[331.5, 761.4, 853.5, 1594.8] in objects is outside of dog.png"),
    "outside": ({**_OBJECTS, "bbox": [[0, 0, 1, 1], [0, 0, 1502, 9]]}, "in a picture of 1500 × 1800 pixels"),
    "no such picture": ({**_OBJECTS, "image_id": [0, 1]}, "image_id in objects is 1, and the row has 1 picture"),
    "kind": ({**_OBJECTS, "bbox_type": "norm"}, "write real or norm1"),
    "three numbers": ({**_OBJECTS, "bbox": [[1, 2, 3], [1, 2]]}, "a box in objects is [1, 2, 3]"),
    "text": ({**_OBJECTS, "bbox": [["1", "2"], [1, 2]]}, "a box in objects is ['1', '2']"),
    "pictures": ({**_OBJECTS, "image_id": [0]}, "objects has 2 in bbox and 1 in image_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", _BAD)
def test_objects_that_do_not_match_make_the_row_bad(gallery: Gallery, folder: Path, name: str) -> None:
    objects, why = _BAD[name]
    model = _model(gallery, folder, "qwen3_vl")

    with pytest.raises(DataError) as caught:
        _text(gallery, folder, model, _row(*_SEEN, images=["dog.png"], objects=objects))

    problem = caught.value.problems[0]
    assert problem.where.endswith("rows.jsonl:1")
    assert why in f"{problem.why}; {problem.fix}"


def test_a_family_without_a_known_form_and_rows_without_a_picture_are_refused(
    gallery: Gallery, folder: Path
) -> None:
    def why(model: str, row: dict[str, Any]) -> str:
        with pytest.raises(DataError) as caught:
            _text(gallery, folder, model, row)
        return caught.value.problems[0].why

    row = _row(*_SEEN, images=["dog.png"], objects=_OBJECTS)
    llava, qwen = (str(gallery.model(family)) for family in ("llava", "qwen3_vl"))
    assert "how the models of LlavaProcessor write boxes is not known" in why(llava, row)
    assert "the tokenizer has no token <|object_ref_start|>" in why(qwen, row)
    bare = _row("<ref-object><bbox>?", "a dog", images=[], objects={"ref": ["it"], "bbox": [[1, 2]]})
    assert "and no picture" in why(qwen, bare)

    source = [{"path": str(folder / "rows.jsonl"), "columns": {"objects": None}}]
    text = _text(gallery, folder, llava, row, train=source)
    assert "<ref-object><bbox>" in text, "without the column it is text"


def test_boxes_of_pairs_stand_in_the_prompt_and_in_each_answer(gallery: Gallery, folder: Path) -> None:
    model = _model(gallery, folder, "qwen3_vl")
    objects: dict[str, Any] = {
        "ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]],
    }  # fmt: skip
    row = {
        "prompt": "<image>Is the <ref-object> in <bbox>?", "chosen": "no: <bbox>", "rejected": "yes",
        "images": ["sheep.png"], "objects": objects,
    }  # fmt: skip
    first, second = (
        "<|box_start|>(101,201),(150,266)<|box_end|>",
        "<|box_start|>(401,601),(550,666)<|box_end|>",
    )
    question = f"Is the <|object_ref_start|>sheep<|object_ref_end|> in {first}?"

    chosen, rejected = _sides(gallery, folder, model, row)
    assert question in chosen
    assert question in rejected
    assert f"no: {second}" in chosen
    assert "yes" in rejected

    other = {"ref": ["sheep"], "bbox": [objects["bbox"][0], [0, 0, 900, 800]]}
    chosen, rejected = _sides(
        gallery, folder, model, {**row, "rejected": "no: <bbox>", "rejected_objects": other}
    )
    assert f"no: {second}" in chosen
    assert "no: <|box_start|>(0,0),(1000,1000)<|box_end|>" in rejected

    with pytest.raises(DataError) as caught:
        _sides(gallery, folder, model, {**row, "rejected": "<bbox>, <bbox>"})
    assert "it has 3 × <bbox>, and objects has 2 in bbox" in caught.value.problems[0].why


def _sides(gallery: Gallery, folder: Path, model: str, row: dict[str, Any]) -> list[str]:
    """The texts of the chosen and the rejected side of a prepared pair."""
    file = folder / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    plan = gallery.plan(
        "llava",
        model={"path": model, "resize_vocabulary": True},
        objective="dpo",
        data={"train": str(file), "max_length": 2048},
        batch={"global": 1, "micro": 1},
    )
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts: list[str] = [tokenizer.decode(table.row(0, side)[0].tolist()) for side in range(table.sides)]
    return texts


def test_boxes_of_a_prompt_for_grpo_are_written_and_the_column_stays_for_rewards(
    gallery: Gallery, folder: Path
) -> None:
    model = _model(gallery, folder, "qwen3_vl")
    row = {
        "prompt": [{"role": "user", "content": "<image>Find the <ref-object>"}], "images": ["sheep.png"],
        "objects": {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8]]},
    }  # fmt: skip
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n")
    plan = gallery.plan(
        "llava",
        model={"path": model, "resize_vocabulary": True},
        objective="grpo",
        rewards=[f"{picture_rewards.__file__}:first_byte"],
        data={"train": str(file), "max_length": 2048, "packing": False},
        batch={"global": 4, "micro": 2},
        rollout={"group": 4, "max_new_tokens": 5},
        grpo={"truncated": "keep"},
    )
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    text = transformers.AutoTokenizer.from_pretrained(model).decode(table.row(0)[0].tolist())
    assert "Find the <|object_ref_start|>sheep<|object_ref_end|>" in text
    columns = table.record(0)["columns"]
    assert isinstance(columns, dict)
    assert columns["objects"] == row["objects"]
