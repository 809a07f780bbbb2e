"""Tiny random vision-language models with their processors, made without a hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T  # noqa: N812 - many classes
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

COLORS = ("red", "green", "blue", "black")
SHAPES = ("square", "circle")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", "<image_soft_token>", "<start_of_image>", "<end_of_image>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
)  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EYE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip


def chatml(place: str) -> str:
    """A template that reads contents as text or as parts, and writes `place` for a picture."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}" + place + "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(**more: Any) -> Any:
    """A byte-level tokenizer with the tokens of all families."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    corpus = [f"a {color} {shape} what is this in the picture" for color in COLORS for shape in SHAPES]
    raw.train_from_iterator(
        corpus * 20,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return T.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", **more
    )


def llava(directory: Path) -> None:
    """LLaVA: a picture of any size is 16 tokens."""
    own = tokenizer()
    config = T.LlavaConfig(
        vision_config=T.CLIPVisionConfig(projection_dim=32, **EYE),
        text_config=T.LlamaConfig(vocab_size=len(own), **TEXT),
        image_token_id=own.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    processor = T.LlavaProcessor(
        image_processor=T.CLIPImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=own,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=chatml("<image>"),
    )
    _save(directory, T.LlavaForConditionalGeneration, config, processor)


def idefics3(directory: Path) -> None:
    """Idefics3, the form of SmolVLM: tiles, each of 4 tokens."""
    own = tokenizer()
    config = T.Idefics3Config(
        vision_config=EYE,
        text_config=T.LlamaConfig(vocab_size=len(own), pad_token_id=0, **TEXT),
        image_token_id=own.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    processor = T.Idefics3Processor(
        image_processor=T.Idefics3ImageProcessor(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        tokenizer=own,
        image_seq_len=4,
        chat_template=chatml("<image>"),
    )
    _save(directory, T.Idefics3ForConditionalGeneration, config, processor)


def gemma3(directory: Path) -> None:
    """Gemma 3: 4 tokens, which see each other in both directions."""
    tokens = {
        "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    }  # fmt: skip
    own = tokenizer(bos_token="<|im_start|>", extra_special_tokens=tokens)
    image, begin, end = (own.convert_tokens_to_ids(token) for token in tokens.values())
    config = T.Gemma3Config(
        text_config={"vocab_size": len(own), "head_dim": 8, "sliding_window": 64, **TEXT},
        vision_config=EYE,
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    processor = T.Gemma3Processor(
        image_processor=T.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=own,
        image_seq_length=4,
        chat_template=chatml("<start_of_image>"),
    )
    _save(directory, T.Gemma3ForConditionalGeneration, config, processor)


def _qwen(directory: Path, kind: Any, config: Any, processor: str, **eye: Any) -> None:
    own = tokenizer()
    ids = {name: own.convert_tokens_to_ids(f"<|{token}|>") for name, token in _QWEN_TOKENS.items()}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": len(own), "rope_parameters": rope, **TEXT}
    settings = config(text_config=text, vision_config={**QWEN_EYE, **eye}, **ids)
    torch.manual_seed(0)
    model = kind(settings)
    _enlarge(model)
    model.save_pretrained(directory)
    pictures = T.Qwen2VLImageProcessorPil(
        min_pixels=28 * 28, max_pixels=84 * 84, patch_size=eye.get("patch_size", 14)
    )
    pictures.save_pretrained(directory)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": processor}))
    own.chat_template = chatml("<|vision_start|><|image_pad|><|vision_end|>")
    own.save_pretrained(directory)


_QWEN_TOKENS = {
    "image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}  # fmt: skip
QWEN_EYE: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def qwen2_5_vl(directory: Path) -> None:
    """Qwen2.5-VL: as many tokens as a picture has patches, and positions in three dimensions."""
    more = {"fullatt_block_indexes": [1], "window_size": 112}
    _qwen(directory, T.Qwen2_5_VLForConditionalGeneration, T.Qwen2_5_VLConfig, "Qwen2_5_VLProcessor", **more)


def qwen3_vl(directory: Path) -> None:
    """Qwen3-VL: features also enter later layers."""
    more = {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    _qwen(directory, T.Qwen3VLForConditionalGeneration, T.Qwen3VLConfig, "Qwen3VLProcessor", **more)


def processor_of(directory: Path) -> Any:
    """The processor of a family; of Qwen's without that of videos, which needs torchvision."""
    if (directory / "processor_config.json").is_file():
        return T.AutoProcessor.from_pretrained(directory)
    kind: Any = getattr(
        T, json.loads((directory / "preprocessor_config.json").read_text())["processor_class"]
    )
    own = T.AutoTokenizer.from_pretrained(directory)
    pictures = T.Qwen2VLImageProcessorPil.from_pretrained(directory)

    class WithoutVideo(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return (
                None if argument is None else super().check_argument_for_proper_class(argument_name, argument)
            )

    return WithoutVideo(pictures, own, None, chat_template=own.chat_template)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "llava": llava,
    "idefics3": idefics3,
    "gemma3": gemma3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
}


def _save(directory: Path, kind: Any, config: Any, processor: Any) -> None:
    torch.manual_seed(0)
    model = kind(config)
    _enlarge(model)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def _enlarge(model: Any) -> None:
    """Makes weights larger: with the usual 0.02 pictures are nearly invisible, and Gemma 3's
    projector begins with zeros.
    """
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5) if parameter.any() else parameter.data.normal_(std=0.2)


def draw(color: str, shape: str, *, size: tuple[int, int] = (96, 64)) -> Any:
    """A picture of Pillow with a colored shape on white."""
    image = Image.new("RGB", size, "white")
    width, height = size
    box = (width // 4, height // 4, width * 3 // 4, height * 3 // 4)
    pen = ImageDraw.Draw(image)
    (pen.rectangle if shape == "square" else pen.ellipse)(box, fill=color)
    return image
