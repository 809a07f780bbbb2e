"""What stands for a picture is what LLaMA-Factory's own tests expect with the processors of public
models, built here from their published settings.

Run: pytest tests/trainer/vision/test_expansions.py

The expected texts are those for a picture of 32 × 32 pixels in tests/data/test_mm_plugin.py of
hiyouga/LLaMA-Factory at ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30. Left out are its plugins for
models of recordings and of videos alone, and for PaliGemma, which reads prompts in both directions.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers as T  # noqa: N812 - many classes

from tests import needs
from tests.vision_models import chatml, tokenizer
from unisono.trainer.data import PICTURE, VIDEO
from unisono.trainer.data.pictures.picture_template import media_marks
from unisono.trainer.data.pictures.processor import ClipTimes, PictureProcessor

SIZE = (32, 32)
GEMMA3 = {
    "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
}  # fmt: skip
GEMMA4 = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
INTERNVL = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
LLAMA4 = (
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip
CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}


def llava(directory: Path) -> None:
    """Of llava-hf/llava-1.5-7b-hf."""
    pictures = {"image_processor_type": "CLIPImageProcessor", **CLIP}
    more = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    _save(directory, "llava", tokenizer(), "<image>", pictures, {"processor_class": "LlavaProcessor", **more})


def llava_next(directory: Path) -> None:
    """Of llava-hf/llava-v1.6-vicuna-7b-hf."""
    grid = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    pictures = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": grid, **CLIP}
    more = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    settings = {"processor_class": "LlavaNextProcessor", **more}
    _save(directory, "llava_next", tokenizer(), "<image>", pictures, settings)


def gemma3(directory: Path) -> None:
    """Of google/gemma-3-4b-it."""
    own = tokenizer(bos_token="<|im_start|>", extra_special_tokens=GEMMA3)
    pictures = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
    settings = {"processor_class": "Gemma3Processor", "image_seq_length": 256}
    _save(directory, "gemma3", own, "<start_of_image>", pictures, settings, "<image_soft_token>")


def gemma4(directory: Path) -> None:
    """Of google/gemma-4-31B-it."""
    own = tokenizer(*GEMMA4.values(), "<|video|>", bos_token="<|im_start|>", extra_special_tokens=GEMMA4)
    pictures = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280}
    settings = {"processor_class": "Gemma4Processor", "image_seq_length": 280}
    _save(directory, "gemma4", own, "<|image|>", pictures, settings)


def internvl(directory: Path) -> None:
    """Of OpenGVLab/InternVL3-1B-hf."""
    own = tokenizer(*INTERNVL.values(), extra_special_tokens=INTERNVL)
    pictures = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
        "size": {"height": 448, "width": 448},
    }
    settings = {"processor_class": "InternVLProcessor", "image_seq_length": 256}
    _save(directory, "internvl", own, "<IMG_CONTEXT>", pictures, settings)


def qwen2_vl(directory: Path) -> None:
    """Of Qwen/Qwen2-VL-7B-Instruct."""
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    settings = {"processor_class": "Qwen2VLProcessor"}
    _save(directory, "qwen2_vl", tokenizer(), place, pictures, settings, "<|image_pad|>")


def qwen3_vl(directory: Path) -> None:
    """Of Qwen/Qwen3-VL-30B-A3B-Instruct."""
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        **sizes,
    }
    videos = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        **sizes,
    }
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    settings = {"processor_class": "Qwen3VLProcessor"}
    _save(directory, "qwen3_vl", tokenizer(), place, pictures, settings, "<|image_pad|>")
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))


def pixtral(directory: Path) -> None:
    """Of mistral-community/pixtral-12b."""
    pictures = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 1024},
        "patch_size": {"height": 16, "width": 16},
    }
    settings = {"processor_class": "PixtralProcessor", "patch_size": 16, "image_token": "[IMG]"}
    _save(directory, "llava", tokenizer(*PIXTRAL), "[IMG]", pictures, settings)


def llama4(directory: Path) -> None:
    """Llama 4's, whose tiles have 336 × 336 pixels."""
    pictures = {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
    }
    settings = {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5}
    _save(directory, "llama4", tokenizer(*LLAMA4), "<|image|>", pictures, settings, "<|patch|>")


def _save(
    directory: Path,
    model_type: str,
    own: Any,
    place: str,
    pictures: dict[str, Any],
    settings: dict[str, Any],
    feature: str | None = None,
) -> None:
    """Writes the files of a processor, with what a config.json says about pictures."""
    own.chat_template = chatml(place)
    own.save_pretrained(directory)
    number = own.convert_tokens_to_ids(feature or place)
    config = T.CONFIG_MAPPING[model_type](image_token_id=number)
    config.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(pictures))
    (directory / "processor_config.json").write_text(json.dumps(settings))


EXPECTED: list[tuple[Callable[[Path], None], str]] = [
    (llava, "<image>" * 576),
    (llava_next, "<image>" * 1176),
    (gemma3, "\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n"),
    (gemma4, "<|image>" + "<|image|>" * 256 + "<image|>"),
    (internvl, "<img>" + "<IMG_CONTEXT>" * 256 + "</img>"),
    (qwen2_vl, "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"),
    (pixtral, "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"),
    (llama4, "<|image_start|><|image|>" + "<|patch|>" * 144 + "<|image_end|>"),
]


NEED_TORCHVISION = [] if find_spec("torchvision") else [pixtral, llama4]
CASES = [(build, text) for build, text in EXPECTED if build not in NEED_TORCHVISION]


@pytest.mark.parametrize(("build", "text"), CASES, ids=[build.__name__ for build, _ in CASES])
def test_the_text_of_a_picture_is_the_one_that_llama_factory_expects(
    build: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    needs.package("PIL")
    build(tmp_path)
    processor = PictureProcessor(tmp_path)
    mark = media_marks(processor)[PICTURE].text

    assert mark.replace(processor.placeholder, processor.expansion(SIZE)) == text


@pytest.mark.long  # torchvision is not a part of `dev`
def test_the_texts_of_videos_are_those_that_llama_factory_expects(tmp_path: Path) -> None:
    needs.package("torchvision")
    qwen3_vl(tmp_path)
    processor = PictureProcessor(tmp_path)
    mark = media_marks(processor)[VIDEO]

    def written(frames: int) -> str:
        times = ClipTimes(tuple(number / 2 for number in range(frames)), frames / 2)
        return mark.filled(processor.clip_expansion(SIZE, times)[0])

    video = "<|video_pad|>"
    first = f"<0.2 seconds><|vision_start|>{video}<|vision_end|><1.2 seconds><|vision_start|>{video}<|vision_end|>"
    assert written(4) == first
    assert written(6) == f"{first}<2.2 seconds><|vision_start|>{video}<|vision_end|>"
    assert written(19).count("<|vision_start|>") == 10, "of its 9.72 seconds with video_fps 2"
