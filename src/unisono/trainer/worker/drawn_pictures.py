"""Makes a tiny vision-language model with random weights, drawn pictures, and rows with one each:
for drills, where there are none.

    python -m unisono.trainer.worker.drawn_pictures FOLDER --rows N

FOLDER/model is a LLaVA with the built-in model's tokenizer; row I of FOLDER/rows.jsonl, from 0, has
the picture FOLDER/pictures/I.png.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from unisono.trainer.model.directory import locate_model

SIDE, PATCH = 32, 16  # pixels
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
)


def draw_rows(folder: Path, rows: int) -> None:
    """Pictures of different colors, and the rows with them."""
    from PIL import Image

    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    lines = []
    for number in range(rows):
        color = (number % 251, number // 251, number * 31 % 251)  # no two are equal
        Image.new("RGB", (SIDE, SIDE), color).save(pictures / f"{number}.png")
        messages = [
            {"role": "user", "content": "<image>count"},
            {"role": "assistant", "content": " ".join(map(str, range(1, number % 7 + 3)))},
        ]
        lines.append(json.dumps({"messages": messages, "images": [f"pictures/{number}.png"]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))


def make_model(directory: Path) -> None:
    """The model with its processor."""
    import transformers as T  # noqa: N812 - many classes

    torch.manual_seed(0)
    tokenizer = T.AutoTokenizer.from_pretrained(locate_model("builtin:tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    config = T.LlavaConfig(
        vision_config=T.CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, projection_dim=32, **small),
        text_config=T.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **small),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    processor = T.LlavaProcessor(
        image_processor=T.CLIPImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",  # noqa: S106 - it names a place
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )
    T.LlavaForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)


def main() -> int:
    """Makes all of it."""
    parser = argparse.ArgumentParser(prog="unisono.trainer.worker.drawn_pictures")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    args = parser.parse_args()
    draw_rows(args.folder, args.rows)
    make_model(args.folder / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
