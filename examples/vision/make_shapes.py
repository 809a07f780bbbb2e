"""Draws colored shapes with their names as answers, and makes a tiny vision-language model: the
decoder of `builtin:tiny`, and a small vision part with random weights.

    python examples/vision/make_shapes.py FOLDER

FOLDER/model is then a LLaVA of transformers with its processor, which has not seen a picture yet,
FOLDER/train.jsonl and FOLDER/heldout.jsonl have rows with pictures in FOLDER/pictures. Nothing is
downloaded.
"""

import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIDE = 32  # pixels
PATCH = 8
COLORS = {"red": (220, 40, 40), "green": (40, 170, 70), "blue": (50, 70, 220), "yellow": (235, 200, 40)}
SHAPES = ("square", "disc", "cross", "triangle")
QUESTION = "what is in the picture?"
ROWS = {"train": 1600, "heldout": 160}
_LARGE = 4  # times: shapes are drawn larger, and reduced


def draw_shape(color: str, shape: str, dice: random.Random) -> Image.Image:
    """A picture of a shape in a color, somewhere on a light ground."""
    side = SIDE * _LARGE
    picture = Image.new("RGB", (side, side), tuple(dice.randint(225, 255) for _ in range(3)))
    size = dice.uniform(0.45, 0.75) * side
    left, top = (dice.uniform(0.03, 0.97 - size / side) * side for _ in range(2))
    fill = tuple(min(255, max(0, value + dice.randint(-25, 25))) for value in COLORS[color])
    _fill_shape(picture, shape, (left, top, left + size, top + size), fill)
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _fill_shape(picture: Image.Image, shape: str, box: tuple[float, float, float, float], fill: Any) -> None:
    pen, (left, top, right, bottom) = ImageDraw.Draw(picture), box
    third = (right - left) / 3
    if shape == "square":
        pen.rectangle(box, fill=fill)
    elif shape == "disc":
        pen.ellipse(box, fill=fill)
    elif shape == "triangle":
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=fill)
    else:
        pen.rectangle((left + third, top, right - third, bottom), fill=fill)
        pen.rectangle((left, top + third, right, bottom - third), fill=fill)


def write_rows(folder: Path, *, seed: int = 0) -> None:
    """Writes pictures and rows; no held-out picture is one of the training."""
    dice = random.Random(seed)  # noqa: S311 - pictures, not secrets
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        rows = []
        for number in range(count):
            color, shape = dice.choice(list(COLORS)), dice.choice(SHAPES)
            name = f"pictures/{split}-{number:04}.png"
            draw_shape(color, shape, dice).save(folder / name)
            answer = {"role": "assistant", "content": f"a {color} {shape}"}
            question = {"role": "user", "content": f"<image>{QUESTION}"}
            rows.append({"messages": [question, answer], "images": [name]})
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def write_model(folder: Path, *, seed: int = 0) -> None:
    """Writes a LLaVA with its processor."""
    import torch
    import transformers

    from unisono.trainer.model.directory import locate_model

    directory = locate_model("builtin:tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory, extra_special_tokens={"image_token": "<image>"}
    )
    decoder = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers explains that the new row starts at the mean
        decoder.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(seed)
    eye = transformers.CLIPVisionConfig(
        hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, projection_dim=96,
        image_size=SIDE, patch_size=PATCH,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=eye, text_config=decoder.config, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2, vision_feature_layer=-1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    square = {"height": SIDE, "width": SIDE}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",  # noqa: S106 - of a tokenizer
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)
"""That of `builtin:tiny`, with places for pictures."""


def main(folder: Path) -> None:
    """Writes all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    write_model(folder / "model")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/vision/make_shapes.py FOLDER")
    main(Path(sys.argv[1]))
