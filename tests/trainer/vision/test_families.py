"""What is different between families of vision-language models: which tokens stand for features,
how pictures of a row depend on each other, whether rows share a sequence, and what a family needs.

Run: pytest tests/trainer/vision/test_families.py
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES, NEED_TORCHVISION, draw, processor_of
from unisono.base.errors import UsageError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.pictures.store import read_pictures
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families import training_of
from unisono.trainer.model.forward import PictureInputs

pytestmark = pytest.mark.processes  # pictures are decoded in them

PACKED = {"llava", "idefics3", "smolvlm", "llava_next", "llava_onevision", "internvl", "pixtral", "mistral3"}
PADDED = {
    "gemma3": "all layers: rows with pictures in one sequence influence each other",
    "gemma4": "all layers: rows with pictures in one sequence influence each other",
    "qwen2_5_vl": "all layers: rows with pictures in one sequence influence each other",
    "qwen3_vl": "all layers: rows with pictures in one sequence influence each other",
    "qwen3_5": "all layers: rows with pictures in one sequence influence each other",
    "llama4": "all layers: its attention sees chunks of a row, by its mask alone",
}
SIZES = ((96, 64), (64, 64), (50, 120), (200, 150), (31, 300))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_pictures_are_as_many_as_features(gallery: Gallery, family: str) -> None:
    directory = gallery.model(family)
    processor = PictureProcessor(directory)
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    text = processor.processor.tokenizer.encode("what is", add_special_tokens=False)
    for size in SIZES:
        for several in (False, True):
            expansion = processor.processor.tokenizer.encode(
                processor.expansion(size, several=several), add_special_tokens=False
            )
            ids = torch.tensor([(text + expansion) * (1 + several)])
            parts = [processor.inputs(draw("red", "circle", size=size), several=several)] * (1 + several)
            seen = PictureInputs.of(parts, processor.image_ids, torch.device("cpu"))
            assert seen is not None

            with torch.no_grad():  # a model refuses other numbers of tokens
                logits = model(input_ids=ids, **seen.arguments(ids, model)).logits

            assert logits.isfinite().all()
            first = ids[0].tolist().index(processor.image_ids[0])
            fewer = torch.cat([ids[:, :first], ids[:, first + 1 :]], dim=1)
            with pytest.raises((ValueError, RuntimeError)), torch.no_grad():
                model(input_ids=fewer, **seen.arguments(fewer, model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_the_processor_makes_of_all_its_pictures(
    gallery: Gallery, picture_rows: Path, family: str
) -> None:
    plan = gallery.plan(family, data={"packing": False})
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    processor = processor_of(Path(plan.model.directory))
    device = torch.device("cpu")
    loaded = training_of(plan).load(plan, device)
    forward = training_of(plan).choose_forward(plan, loaded, None)
    loader, _ = training_of(plan).open_contents(plan, forward, device, draws=False)
    assert loader is not None
    rows = [json.loads(line) for line in picture_rows.read_text().splitlines()]
    for index in range(table.rows):
        row = rows[int(table.columns["number"][index]) - 1]
        ids = torch.tensor(table.row(index)[0].tolist())[None]
        seen: PictureInputs | None = loader.load([int(table.columns["stored"][index])], [0], [0])

        expected = _by_processor(processor, row, picture_rows.parent)

        assert ids[0].tolist() == expected.pop("input_ids")[0].tolist()[: ids.shape[1]]
        made = {} if seen is None else seen.in_full().arguments(ids, loaded.base)
        for name in set(expected) - {"attention_mask", "token_type_ids", "mm_token_type_ids"}:
            wanted = expected[name].to(made[name].dtype)
            torch.testing.assert_close(_tiles(made[name]), _tiles(wanted), msg=name)


def _tiles(values: torch.Tensor) -> torch.Tensor:
    """The tiles of all pictures in order: Idefics3's processor counts those of a row together, and
    fills up pictures with empty ones.
    """
    if values.dim() < 4:
        return values
    tiles = values.flatten(0, 1)
    return tiles[tiles.flatten(1).any(dim=1)]


def _by_processor(processor: Any, row: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    messages = []
    for turn in row["messages"]:
        pieces = turn["content"].split("<image>")
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": piece}] * bool(piece)
        messages.append({"role": turn["role"], "content": parts})
    images = [Image.open(folder / name).convert("RGB") for name in row.get("images", ())]
    text = processor.apply_chat_template(messages, tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", **({"images": [images]} if images else {})))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_share_a_sequence_where_that_changes_nothing(gallery: Gallery, family: str) -> None:
    plan = gallery.plan(family)
    loaded = training_of(plan).load(plan, torch.device("cpu"))

    forward = training_of(plan).choose_forward(plan, loaded, None)

    assert (family in PACKED) == (forward.layout == "flat")
    assert forward.padded.startswith(PADDED.get(family, "")), forward.padded


def test_the_only_picture_of_a_row_has_tiles_and_several_have_none(
    gallery: Gallery, picture_rows: Path
) -> None:
    plan = gallery.plan("llava_onevision", data={"packing": False})

    pictures = read_pictures(Path(plan.data.cache_dir))

    assert {picture.several for picture in pictures} == {True, False}
    for picture in pictures:
        assert (picture.tokens == 17) == picture.several, picture


@pytest.mark.parametrize("family", NEED_TORCHVISION)
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="needs an environment without torchvision")
def test_a_family_whose_processor_cannot_be_built_is_refused_by_name(gallery: Gallery, family: str) -> None:
    with pytest.raises(UsageError) as refused:
        gallery.plan(family)

    (problem,) = refused.value.problems
    assert problem.what == "the model's processor needs torchvision"
    assert "Processor of transformers" in problem.why
    assert problem.fix == "pip install 'unisono[vision]'"
