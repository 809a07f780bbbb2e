"""Draws colored shapes with captions, and trains a tiny Stable Diffusion pipeline on two of their
classes, from random weights.

    python examples/images/make_shapes.py FOLDER
    python examples/images/make_shapes.py classify PICTURES

FOLDER/model is then a pipeline of diffusers that draws red squares and blue discs by their
captions, and FOLDER/pictures/8_green has pictures of the third class, green crosses, for a LoRA.
Nothing is downloaded; it takes about two minutes on one core.
"""

import json
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

SIDE = 16  # pixels
CLASSES = {"red square": (225, 40, 40), "blue disc": (40, 60, 225), "green cross": (30, 190, 60)}
_LARGE = 8  # times: shapes are drawn larger, and reduced


def draw_shape(name: str, dice: random.Random) -> Image.Image:
    """A picture of a class: its shape in its color, somewhere on white."""
    side = SIDE * _LARGE
    picture = Image.new("RGB", (side, side), (250, 250, 250))
    size = dice.uniform(0.55, 0.75) * side
    left, top = (dice.uniform(0.05, 0.2) * side for _ in range(2))
    fill_shape(picture, name.split()[1], (left, top, left + size, top + size), CLASSES[name])
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def fill_shape(picture: Image.Image, shape: str, box: tuple[float, float, float, float], fill: Any) -> None:
    """Fills a square, disc or cross in a box (left, top, right, bottom)."""
    draw, (left, top, right, bottom) = ImageDraw.Draw(picture), box
    if shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "disc":
        draw.ellipse(box, fill=fill)
    else:
        third = (right - left) / 3
        draw.rectangle((left + third, top, left + 2 * third, bottom), fill=fill)
        draw.rectangle((left, top + third, right, top + 2 * third), fill=fill)


def class_of(picture: Image.Image) -> str:
    """The color and the shape that a picture shows, e.g. `green cross`, or `green disc`, which is
    no class; `none` if it is nearly white.

    The color is the class's that is nearest to the mean of the pixels that are not white. The shape
    is the one that differs least from these pixels when both fill the same box.
    """
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    strength = pixels.max(2) - pixels.min(2)
    if np.count_nonzero(strength > 60) < strength.size // 12:
        return "none"
    mean = pixels[strength > 60].mean(0)
    color = min(CLASSES, key=lambda name: float(np.abs(mean - CLASSES[name]).sum())).split()[0]
    mask = np.clip(strength / np.percentile(strength, 97), 0, 1)
    rows, columns = np.nonzero(mask > 0.5)
    box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    seen = (
        Image.fromarray((mask * 255).astype(np.uint8))
        .crop(box)
        .resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    )

    def difference(shape: str) -> float:
        wanted, side = Image.new("L", (SIDE * _LARGE,) * 2), SIDE * _LARGE - 1
        fill_shape(wanted, shape, (0, 0, side, side), 255)
        small = wanted.resize((SIDE, SIDE), Image.Resampling.BOX)
        return float(np.abs(np.asarray(seen, dtype=np.float32) - np.asarray(small, dtype=np.float32)).mean())

    return f"{color} {min((name.split()[1] for name in CLASSES), key=difference)}"


def write_pictures(folder: Path, name: str, *, count: int, seed: int) -> None:
    """Writes pictures of one class with their captions."""
    dice = random.Random(seed)  # noqa: S311 - shapes, not secrets
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        draw_shape(name, dice).save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(f"{name}\n")


def batch_of(count: int, dice: random.Random, *, classes: list[str]) -> tuple[torch.Tensor, list[str]]:
    """(count, 3, SIDE, SIDE) from -1 to 1, and the captions."""
    names = [dice.choice(classes) for _ in range(count)]
    pixels = np.stack([np.asarray(draw_shape(name, dice)) for name in names])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1, names


def make_parts(folder: Path) -> dict[str, Any]:
    """The parts of the pipeline, with random weights."""
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    characters = [chr(code) for code in range(33, 127)]
    words = (
        characters + [f"{character}</w>" for character in characters] + ["<|startoftext|>", "<|endoftext|>"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
    size = len(words)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=16,
            bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=8, sample_size=SIDE,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIDE // 2, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    scheduler = DDIMScheduler(
        num_train_timesteps=100, beta_start=0.001, beta_end=0.2, beta_schedule="linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1,
    )  # fmt: skip
    return {"vae": vae, "text_encoder": text, "tokenizer": tokenizer, "unet": unet, "scheduler": scheduler}


def train_vae(vae: Any, dice: random.Random, *, steps: int) -> None:
    """Trains the autoencoder on all three colors, and sets the scale of its latents."""
    optimizer, loss = torch.optim.AdamW(vae.parameters(), lr=2e-3), torch.zeros(())
    for _ in range(steps):
        pixels, _names = batch_of(32, dice, classes=list(CLASSES))
        found = vae.encode(pixels).latent_dist
        loss = (
            vae.decode(found.sample()).sample - pixels
        ).square().mean() + 1e-4 * found.kl().mean() / pixels[0].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        pixels, _names = batch_of(128, dice, classes=list(CLASSES))
        vae.register_to_config(scaling_factor=1 / float(vae.encode(pixels).latent_dist.mean.std()))
    print(f"autoencoder: {steps} steps, loss {float(loss.detach()):.4f}")


def train_unet(parts: dict[str, Any], dice: random.Random, *, steps: int) -> None:
    """Trains UNet and text encoder together on the first two classes; a tenth of the captions is
    empty, for guidance.
    """
    unet, text, vae, scheduler = parts["unet"], parts["text_encoder"], parts["vae"], parts["scheduler"]
    optimizer = torch.optim.AdamW([*unet.parameters(), *text.parameters()], lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    losses: list[float] = []
    for _ in range(steps):
        pixels, names = batch_of(32, dice, classes=list(CLASSES)[:2])
        captions = ["" if dice.random() < 0.1 else name for name in names]
        ids = parts["tokenizer"](
            captions, padding="max_length", max_length=16, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mean * vae.config.scaling_factor
        noise, timesteps = torch.randn_like(latents), torch.randint(0, 100, (len(latents),))
        noisy = scheduler.add_noise(latents, noise, timesteps)
        loss = (unet(noisy, timesteps, text(ids)[0]).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    print(f"UNet and text encoder: {steps} steps, loss {sum(losses[-50:]) / 50:.4f}")


def make(folder: Path, *, vae_steps: int = 300, unet_steps: int = 900) -> None:
    """Writes the pipeline and the pictures of the third class."""
    from diffusers import StableDiffusionPipeline

    began = time.monotonic()
    torch.manual_seed(0)
    dice = random.Random(0)  # noqa: S311
    parts = make_parts(folder / "vocabulary")
    train_vae(parts["vae"], dice, steps=vae_steps)
    train_unet(parts, dice, steps=unet_steps)
    pipeline = StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline.save_pretrained(folder / "model")
    write_pictures(folder / "pictures" / "8_green", "green cross", count=24, seed=1)
    print(f"{folder}: model and pictures in {time.monotonic() - began:.0f} s")


def count_classes(folder: Path) -> str:
    """How many pictures in a folder show which color and shape."""
    files = sorted(folder.glob("*.png"))
    counts = Counter(class_of(Image.open(file)) for file in files)
    return ", ".join(f"{name}: {count} of {len(files)}" for name, count in counts.most_common())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "classify":
        print(f"{sys.argv[2]}: {count_classes(Path(sys.argv[2]))}")
    else:
        make(Path(sys.argv[1]))
