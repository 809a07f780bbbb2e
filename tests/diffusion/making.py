"""A tiny Stable Diffusion pipeline with random weights, and folders of pictures, for tests of image models."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

Color = tuple[int, int, int]
COLORS: dict[str, Color] = {
    "red": (220, 30, 30),
    "blue": (30, 30, 220),
    "green": (20, 180, 40),
    "grey": (90, 90, 90),
}


def write_tokenizer(root: Path) -> int:
    """Writes a CLIP tokenizer of single characters; gives the number of its tokens."""
    root.mkdir(parents=True)
    characters = [chr(code) for code in range(33, 127)]
    words = (
        characters + [f"{character}</w>" for character in characters] + ["<|startoftext|>", "<|endoftext|>"]
    )
    (root / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (root / "merges.txt").write_text("#version: 0.2\n")
    return len(words)


def write_pipeline(root: Path, *, prediction: str = "epsilon", xl: bool = False) -> Path:
    """Writes a pipeline of about 0.2 M parameters, whose latents are half as wide as its pictures."""
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    from unisono.diffusion.pipeline import quiet

    size = write_tokenizer(root / "vocabulary")
    torch.manual_seed(0)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = CLIPTokenizer(
            str(root / "vocabulary" / "vocab.json"),
            str(root / "vocabulary" / "merges.txt"),
            model_max_length=77,
        )
        text = CLIPTextConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=77, projection_dim=32, bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1,
        )  # fmt: skip
        vae = AutoencoderKL(
            block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4, norm_num_groups=8, sample_size=32,
        )  # fmt: skip
        more = {
            "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 32 + 6 * 8,
            "transformer_layers_per_block": 1, "use_linear_projection": True,
        } if xl else {}  # fmt: skip
        unet = UNet2DConditionModel(
            sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=64 if xl else 32,
            attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **more,
        )  # fmt: skip
        scheduler = DDPMScheduler(
            num_train_timesteps=100, prediction_type=prediction, steps_offset=1, clip_sample=False
        )
        parts = {
            "vae": vae,
            "text_encoder": CLIPTextModel(text),
            "tokenizer": tokenizer,
            "unet": unet,
            "scheduler": scheduler,
        }
        if xl:
            second = {"text_encoder_2": CLIPTextModelWithProjection(text), "tokenizer_2": tokenizer}
            pipeline = StableDiffusionXLPipeline(**parts, **second)
        else:
            pipeline = StableDiffusionPipeline(
                **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
            )
        pipeline.save_pretrained(root / "model")
    return root / "model"


def write_pictures(
    folder: Path, colors: Sequence[str], sizes: Sequence[tuple[int, int]] = ((32, 32),)
) -> Path:
    """Writes a picture of each color and size with its caption; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for color in colors:
        for width, height in sizes:
            name = f"{color}-{width}x{height}"
            picture = Image.new("RGB", (width, height), COLORS[color])
            picture.paste((255, 255, 255), (width // 4, height // 4, width // 2, height // 2))
            picture.save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(f"a {color} tile, {width} wide\n")
    return folder
