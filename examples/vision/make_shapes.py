"""Draws colored shapes with questions, and makes a tiny vision-language model to learn from them.

    python examples/vision/make_shapes.py FOLDER [--seed 0]

FOLDER/model is a LLaVA: a new vision tower of two layers with random weights, a projector, and the
built-in model as its decoder, with a processor. FOLDER/train.jsonl and FOLDER/heldout.jsonl have
rows with the pictures in FOLDER/pictures. No picture of the one is in the other. Nothing is
downloaded; it takes a few seconds.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from unisono.trainer.model.directory import locate_model

SIDE, PATCH = 48, 8  # pixels
COLORS = ("red", "green", "blue", "yellow", "black", "purple")
SHAPES = ("circle", "square", "triangle", "cross")
TRAINED, HELD_OUT = 3000, 200
QUESTION = "<image>What is in the picture?"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
)


def draw(color: str, shape: str, dice: random.Random) -> Image.Image:
    """A shape near the middle of a white picture."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen, size = ImageDraw.Draw(picture), dice.randint(14, 20)
    x, y = (SIDE // 2 + dice.randint(-3, 3) for _ in range(2))
    box = (x - size, y - size, x + size, y + size)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    elif shape == "triangle":
        pen.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=color)
    else:
        width = size // 3
        pen.rectangle((x - width, y - size, x + width, y + size), fill=color)
        pen.rectangle((x - size, y - width, x + size, y + width), fill=color)
    return picture


def make_rows(folder: Path, dice: random.Random) -> None:
    """Pictures, and the rows of both files."""
    pictures = folder / "pictures"
    pictures.mkdir()
    seen: set[bytes] = set()
    for name, count in (("heldout", HELD_OUT), ("train", TRAINED)):
        rows: list[dict[str, object]] = []
        while len(rows) < count:
            color, shape = dice.choice(COLORS), dice.choice(SHAPES)
            picture = draw(color, shape, dice)
            if name == "heldout":
                seen.add(picture.tobytes())
            elif picture.tobytes() in seen:
                continue
            file = pictures / f"{name}-{len(rows):04d}.png"
            picture.save(file)
            answer = {"role": "assistant", "content": f"a {color} {shape}"}
            messages = [{"role": "user", "content": QUESTION}, answer]
            rows.append({"messages": messages, "images": [f"pictures/{file.name}"]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(directory: Path, *, seed: int) -> None:
    """The built-in model with a tower, which sees nothing yet."""
    torch.manual_seed(seed)
    built_in = locate_model("builtin:tiny")
    tokenizer = AutoTokenizer.from_pretrained(built_in)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    decoder = AutoModelForCausalLM.from_pretrained(built_in, dtype=torch.float32)
    decoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    patches = (SIDE // PATCH) ** 2
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=64,
        ),
        text_config=decoder.config,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=patches,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": SIDE},
            crop_size={"height": SIDE, "width": SIDE},
            image_mean=[0.5] * 3,
            image_std=[0.25] * 3,
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",  # noqa: S106 - it names a place
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def main() -> None:
    """Makes both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    make_rows(args.folder, random.Random(args.seed))  # noqa: S311 - pictures
    make_model(args.folder / "model", seed=args.seed)


if __name__ == "__main__":
    main()
