"""Tiny random vision-language models with their processors, made without a hub."""

import json
from collections.abc import Callable
from importlib.util import find_spec
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


def chatml(place: str, video: str = "") -> str:
    """A template that reads contents as text or as parts, and writes `place` for a picture and
    `video` for a video.
    """
    film = "{% elif c.type == 'video' %}" + video if video else ""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for c in m.content %}"
        "{% if c.type == 'image' %}"
        + place
        + film
        + "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(*tokens: str, **more: Any) -> Any:
    """A byte-level tokenizer with tokens of all families, and these."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    corpus = [f"a {color} {shape} what is this in the picture" for color in COLORS for shape in SHAPES]
    raw.train_from_iterator(
        corpus * 20,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=[*SPECIAL, *tokens],
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


def llava_next(directory: Path) -> None:
    """LLaVA-Next: a picture as a whole and as tiles, with a token at the end of each line."""
    own = tokenizer()
    grid = [[56, 112], [112, 56], [112, 112]]
    config = T.LlavaNextConfig(
        vision_config=T.CLIPVisionConfig(projection_dim=32, **EYE),
        text_config=T.LlamaConfig(vocab_size=len(own), **TEXT),
        image_token_id=own.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=grid,
        image_seq_length=16,
    )
    processor = T.LlavaNextProcessor(
        image_processor=T.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=grid
        ),
        tokenizer=own,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=chatml("<image>"),
    )
    _save(directory, T.LlavaNextForConditionalGeneration, config, processor)


def llava_onevision(directory: Path) -> None:
    """LLaVA-OneVision: tiles for the only picture of a row, none for several."""
    own = tokenizer("<video>")
    grid = [[56, 112], [112, 56], [112, 112]]
    config = T.LlavaOnevisionConfig(
        vision_config=T.SiglipVisionConfig(vision_use_head=False, **EYE),
        text_config=T.Qwen2Config(vocab_size=len(own), **TEXT),
        image_token_id=own.convert_tokens_to_ids("<image>"),
        video_token_id=own.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grid,
    )
    pictures = T.LlavaOnevisionImageProcessorPil(size={"height": 56, "width": 56}, image_grid_pinpoints=grid)
    settings = {
        "num_image_tokens": 16, "vision_feature_select_strategy": "full", "image_token": "<image>",
        "video_token": "<video>", "vision_aspect_ratio": "anyres_max_9",
    }  # fmt: skip
    own.chat_template = chatml("<image>", "<video>")
    model = T.LlavaOnevisionForConditionalGeneration
    _save_parts(directory, model, config, pictures, own, "LlavaOnevisionProcessor", **settings)


def internvl(directory: Path) -> None:
    """InternVL: tiles of 4 tokens between two more."""
    tokens = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    own = tokenizer(*tokens.values(), extra_special_tokens=tokens)
    config = T.InternVLConfig(
        vision_config={**EYE, "image_size": [56, 56], "patch_size": [14, 14]},
        text_config=T.Qwen2Config(vocab_size=len(own), **TEXT),
        image_token_id=own.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    pictures = T.GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    own.chat_template = chatml("<IMG_CONTEXT>", "<video>")
    model = T.InternVLForConditionalGeneration
    _save_parts(directory, model, config, pictures, own, "InternVLProcessor", image_seq_length=4)


def gemma4(directory: Path) -> None:
    """Gemma 4: as many tokens as a picture has, which see each other in both directions."""
    tokens = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    own = tokenizer(*tokens.values(), "<|video|>", bos_token="<|im_start|>", extra_special_tokens=tokens)
    ids = {f"{name}_id": own.convert_tokens_to_ids(token) for name, token in tokens.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    eye = {name: value for name, value in EYE.items() if name != "image_size"}
    config = T.Gemma4Config(
        text_config={
            "vocab_size": len(own), "vocab_size_per_layer_input": len(own), "hidden_size_per_layer_input": 8,
            "head_dim": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
            "use_bidirectional_attention": "vision", "pad_token_id": own.pad_token_id, **TEXT,
        },
        vision_config={**eye, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2,
                       "position_embedding_size": 64},
        audio_config=None,
        video_token_id=own.convert_tokens_to_ids("<|video|>"),
        **ids,
    )  # fmt: skip
    pictures = T.Gemma4ImageProcessorPil(patch_size=14, max_soft_tokens=70, pooling_kernel_size=2)
    own.chat_template = chatml("<|image|>", "<|video|>")
    model = T.Gemma4ForConditionalGeneration
    _save_parts(directory, model, config, pictures, own, "Gemma4Processor", image_seq_length=70)


def pixtral(directory: Path) -> None:
    """Pixtral: LLaVA with patches of any picture, and a token at the end of each line of them."""
    own = tokenizer(*_PIXTRAL_TOKENS)
    config = T.LlavaConfig(
        vision_config=T.PixtralVisionConfig(**EYE),
        text_config=T.MistralConfig(vocab_size=len(own), **TEXT),
        image_token_id=own.convert_tokens_to_ids("[IMG]"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    _save_pixtral(directory, T.LlavaForConditionalGeneration, config, own, spatial_merge_size=1)


def mistral3(directory: Path) -> None:
    """Mistral 3: Pixtral's processor, and patches merged by four."""
    own = tokenizer(*_PIXTRAL_TOKENS)
    config = T.Mistral3Config(
        vision_config=T.PixtralVisionConfig(**EYE),
        text_config=T.Ministral3Config(vocab_size=len(own), head_dim=8, **TEXT),
        image_token_index=own.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    _save_pixtral(directory, T.Mistral3ForConditionalGeneration, config, own, spatial_merge_size=2)


_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _save_pixtral(directory: Path, kind: Any, config: Any, own: Any, *, spatial_merge_size: int) -> None:
    own.chat_template = chatml("[IMG]")
    pictures = T.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=14 * spatial_merge_size)
    more = {"patch_size": 14, "spatial_merge_size": spatial_merge_size}
    _save_parts(directory, kind, config, pictures, own, "PixtralProcessor", **more)


def llama4(directory: Path) -> None:
    """Llama 4: tiles between separators, and experts."""
    own = tokenizer(
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    )  # fmt: skip
    own.chat_template = chatml("<|image|>")
    eye = {
        "image_size": 56,
        "patch_size": 14,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = T.Llama4Config(
        vision_config={
            **eye, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        text_config={
            "vocab_size": len(own), "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2,
            "pad_token_id": own.pad_token_id, "bos_token_id": None, "eos_token_id": own.eos_token_id, **TEXT,
        },
        boi_token_index=own.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=own.convert_tokens_to_ids("<|image_end|>"),
        image_token_index=own.convert_tokens_to_ids("<|patch|>"),
    )  # fmt: skip
    settings = {
        "image_processor_type": "Llama4ImageProcessor", "size": {"height": 56, "width": 56}, "max_patches": 4,
    }  # fmt: skip
    model = T.Llama4ForConditionalGeneration
    _save_parts(directory, model, config, settings, own, "Llama4Processor", patch_size=14)


def smolvlm(directory: Path) -> None:
    """SmolVLM: Idefics3 with words around the frames of a video."""
    own = tokenizer()
    config = T.SmolVLMConfig(
        vision_config=EYE,
        text_config=T.LlamaConfig(vocab_size=len(own), pad_token_id=0, **TEXT),
        image_token_id=own.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 56}}
    processor = T.SmolVLMProcessor(
        image_processor=T.SmolVLMImageProcessor(**sizes),
        tokenizer=own,
        video_processor=T.SmolVLMVideoProcessor(video_sampling=sampling, **sizes),
        image_seq_len=4,
        chat_template=chatml("<image>", "<video>"),
    )
    _save(directory, T.SmolVLMForConditionalGeneration, config, processor)


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
    own.chat_template = chatml(*QWEN_PLACES)
    own.save_pretrained(directory)
    kind = {"Qwen2_5_VLProcessor": "Qwen2VLVideoProcessor", "Qwen3VLProcessor": "Qwen3VLVideoProcessor"}[
        processor
    ]
    _save_qwen_videos(directory, kind, eye.get("patch_size", 14))


QWEN_PLACES = tuple(f"<|vision_start|><|{medium}_pad|><|vision_end|>" for medium in ("image", "video"))
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


def qwen3_5(directory: Path) -> None:
    """Qwen3.5: Qwen3-VL's processor, and layers with a state."""
    own = tokenizer()
    ids = {name: own.convert_tokens_to_ids(f"<|{token}|>") for name, token in _QWEN_TOKENS.items()}
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0,
        "mrope_interleaved": True,
    }  # fmt: skip
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    text = {
        "vocab_size": len(own), "rope_parameters": rope, "head_dim": 8, **linear, **TEXT,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    eye = {**QWEN_EYE, "patch_size": 16, "num_position_embeddings": 64}
    config = T.Qwen3_5Config(text_config=text, vision_config=eye, **ids)
    pictures = T.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=84 * 84, patch_size=16)
    own.chat_template = chatml(*QWEN_PLACES)
    _save_parts(directory, T.Qwen3_5ForConditionalGeneration, config, pictures, own, "Qwen3VLProcessor")
    _save_qwen_videos(directory, "Qwen3VLVideoProcessor", 16)


def _save_qwen_videos(directory: Path, kind: str, patch: int) -> None:
    size = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84 * (4 if "3" in kind else 1)}
    settings = {
        "video_processor_type": kind, "size": size, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
    }  # fmt: skip
    (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))


def processor_of(directory: Path) -> Any:
    """The processor of a family; without torchvision that of pictures alone."""
    files = [directory / name for name in ("processor_config.json", "preprocessor_config.json")]
    read = [json.loads(file.read_text()) for file in files if file.is_file()]
    settings = {key: value for part in read[:1] for key, value in part.items()}
    if find_spec("torchvision") or "image_processor" in settings:
        return T.AutoProcessor.from_pretrained(directory)
    named: str = next(part["processor_class"] for part in read if "processor_class" in part)
    kind: Any = getattr(T, named)
    parts = {
        "image_processor": T.AutoImageProcessor.from_pretrained(directory),
        "tokenizer": T.AutoTokenizer.from_pretrained(directory),
        "video_processor": None,
    } | ({"feature_extractor": None} if named == "Gemma4Processor" else {})
    more = (
        {}
        if "image_processor_type" in settings
        else {k: v for k, v in settings.items() if k != "processor_class"}
    )

    class PicturesOnly(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return (
                None if argument is None else super().check_argument_for_proper_class(argument_name, argument)
            )

    return PicturesOnly(**parts, **more, chat_template=parts["tokenizer"].chat_template)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "llava": llava,
    "idefics3": idefics3,
    "gemma3": gemma3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "internvl": internvl,
    "gemma4": gemma4,
    "qwen3_5": qwen3_5,
}
NEED_TORCHVISION: dict[str, Callable[[Path], None]] = {
    "pixtral": pixtral,
    "mistral3": mistral3,
    "llama4": llama4,
}
"""Families whose processors need torchvision also for pictures."""
if find_spec("num2words"):
    NEED_TORCHVISION["smolvlm"] = smolvlm
if find_spec("torchvision"):
    FAMILIES |= NEED_TORCHVISION


def _save_parts(
    directory: Path, kind: Any, config: Any, pictures: Any, own: Any, processor: str, **settings: Any
) -> None:
    """Saves a model with a processor that also reads videos, for which torchvision is needed."""
    torch.manual_seed(0)
    model = kind(config)
    _enlarge(model)
    model.save_pretrained(directory)
    if isinstance(pictures, dict):
        (directory / "preprocessor_config.json").write_text(json.dumps(pictures))
    else:
        pictures.save_pretrained(directory)
    own.save_pretrained(directory)
    body = {"processor_class": processor, **settings}
    (directory / "processor_config.json").write_text(json.dumps(body))


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
