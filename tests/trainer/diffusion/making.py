"""A tiny Stable Diffusion pipeline with random weights, and folders of pictures, for tests of image
models.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

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
    """Writes a pipeline of about 0.2 M parameters, whose latents are half as wide as its
    pictures.
    """
    from unisono.trainer.families.pictures.pipeline import import_diffusers, quiet

    import_diffusers()
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

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
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for color in colors:
        for width, height in sizes:
            name = f"{color}-{width}x{height}"
            picture = Image.new("RGB", (width, height), COLORS[color])
            picture.paste((255, 255, 255), (width // 4, height // 4, width // 2, height // 2))
            picture.save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(f"a {color} tile, {width} wide\n")
    return folder


def write_usual_pipeline(root: Path, kind: str) -> Path:
    """Writes a small pipeline whose heads, groups and schedule are those of real models, so that
    its shapes show what it is.

    Args:
        root: where to write.
        kind: `v1`, `v2` or `xl`.
    """
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        EulerDiscreteScheduler,
        PNDMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    from unisono.trainer.families.pictures.pipeline import quiet

    size, is_xl = write_tokenizer(root / "vocabulary"), kind == "xl"
    torch.manual_seed(1)
    channels = (32, 64) if kind == "v1" else (64, 128)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def tokenizer(pad: str) -> CLIPTokenizer:
            files = (str(root / "vocabulary" / name) for name in ("vocab.json", "merges.txt"))
            return CLIPTokenizer(*files, model_max_length=77, pad_token=pad)

        def text(act: str, width: int = 64) -> CLIPTextConfig:
            return CLIPTextConfig(
                vocab_size=size, hidden_size=width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=width // 64,
                hidden_act=act, max_position_embeddings=77, projection_dim=width, bos_token_id=size - 2, eos_token_id=size - 1,
            )  # fmt: skip

        unet = UNet2DConditionModel(
            sample_size=128 if is_xl else 96 if kind == "v2" else 64, block_out_channels=channels, layers_per_block=1,
            cross_attention_dim=64 + 128 if is_xl else 64, attention_head_dim=8 if kind == "v1" else [c // 64 for c in channels],
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D") if is_xl else ("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D") if is_xl else ("UpBlock2D", "CrossAttnUpBlock2D"),
            transformer_layers_per_block=[1, 2] if is_xl else 1, use_linear_projection=kind != "v1", upcast_attention=kind == "v2",
            **({"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 128 + 6 * 8} if is_xl else {}),
        )  # fmt: skip
        vae = AutoencoderKL(
            block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4, sample_size=1024 if is_xl else 512, scaling_factor=0.13025 if is_xl else 0.18215,
        )  # fmt: skip
        named = {"v1": PNDMScheduler, "v2": DDIMScheduler, "xl": EulerDiscreteScheduler}[kind]
        scheduler = named(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
            prediction_type="v_prediction" if kind == "v2" else "epsilon", timestep_spacing="leading",
            **({} if is_xl else {"set_alpha_to_one": False}),
            **({"skip_prk_steps": True} if kind == "v1" else {"clip_sample": False} if kind == "v2" else {}),
        )  # fmt: skip
        parts = {
            "vae": vae, "unet": unet, "scheduler": scheduler,
            "tokenizer": tokenizer("!" if kind == "v2" else "<|endoftext|>"),
            "text_encoder": CLIPTextModel(text("gelu" if kind == "v2" else "quick_gelu")),
        }  # fmt: skip
        if is_xl:
            second = {
                "text_encoder_2": CLIPTextModelWithProjection(text("gelu", 128)),
                "tokenizer_2": tokenizer("!"),
            }
            pipeline = StableDiffusionXLPipeline(**parts, **second)
        else:
            pipeline = StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)  # fmt: skip
        pipeline.save_pretrained(root / "model")
    return root / "model"
