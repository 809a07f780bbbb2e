"""The base class of config sections and the types of their fields; the objectives with their
sections, `preference` and `diffusion`, and which objective uses which keys.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from unisono.base.text import Duration, Warmup, host_name, parse_bytes, parse_seconds
from unisono.base.user_code import own_class
from unisono.trainer.config.yaml_file import Takes, section_in

DIFFUSION = "diffusion"
GRPO = "grpo"

TargetWord = Literal["all-linear", "unet", "unet+text"]
"""Words of `adapter.targets`; the last two are for image models."""
_PARTS = {name: frozenset((name,)) for name in ("attention", "mlp", "experts", "router")} | {
    "all-linear": frozenset(("attention", "mlp", "experts", "other"))
}
Thinking = bool | Literal["preserve"] | None
"""A value of `data.thinking`."""
LF_PREFIX = "lf:"
"""Begins a `data.template` that is the name of a template of LLaMA-Factory."""


@dataclass(frozen=True, slots=True)
class NamesFile:
    """In the annotation of a field: it is the path of a file or directory, or has several.

    Attributes:
        is_output: the run makes it. All others are input, and only a path of what exists.
        shows_absence: nothing else that nodes compare would show that it is not set.
        besides: a word that names no file.
    """

    is_output: bool = False
    shows_absence: bool = False
    besides: str | None = None

    @classmethod
    def of(cls, field: FieldInfo) -> "NamesFile | None":
        """The one of a field; None if its value is no path."""
        return next((item for item in field.metadata if isinstance(item, cls)), None)


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _list_single_items(cls, value: Any) -> Any:
        """A text where a list of texts is expected is a list of one, and so is a section: `track:
        wandb`, `train: {path: a.csv}`.
        """
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        return {
            key: [one] if isinstance(one, str | dict) and _needs_list(fields.get(key), one) else one
            for key, one in value.items()
        }


def path_keys(section: type[BaseModel] | None, prefix: str = "") -> dict[str, NamesFile]:
    """The dotted keys of values that name files, e.g. `model.path`; without those inside lists of
    sections.
    """
    marks: dict[str, NamesFile] = {}
    for name, field in section.model_fields.items() if section else ():
        key, mark = f"{prefix}{field.alias or name}", NamesFile.of(field)
        marks |= {key: mark} if mark else path_keys(section_in(field.annotation), f"{key}.")
    return marks


def _needs_list(annotation: Any, one: str | dict[str, object]) -> bool:
    """Whether a key takes lists of texts, or of sections, and not this text or section itself."""
    members = list(_members(annotation))
    items = [item for kind in members if get_origin(kind) is list for item in _members(get_args(kind)[0])]
    if isinstance(one, dict):
        return not any(map(_is_section, members)) and any(map(_is_section, items))
    takes_it = str in members or any(
        get_origin(kind) is Literal and one in get_args(kind) for kind in members
    )
    return not takes_it and any(item is str or get_origin(item) is Literal for item in items)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union, without their bounds."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _check_duration(text: str) -> str:
    Duration.parse(text)
    return text


def _check_warmup(text: str) -> str:
    Warmup.parse(text)
    return text


def _check_seconds(text: str) -> str:
    parse_seconds(text)
    return text


def _check_bytes(text: str) -> str:
    parse_bytes(text)
    return text


def _text_of_yaml(value: Any) -> Any:
    """The text where YAML reads a date."""
    return value.isoformat() if isinstance(value, date) else value


def _check_date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        raise ValueError(f"{text!r} is not a date; write YYYY-MM-DD")
    date.fromisoformat(text)
    return text


def _check_storage(text: str) -> str:
    scheme, separator, location = text.partition("://")
    if not separator or not scheme or not location.strip("/"):
        raise ValueError(f"{text!r} is not a URL; write s3://bucket/runs or file:///mnt/copies")
    if scheme in ("file", "local") and not location.startswith("/"):
        raise ValueError(f"{text!r} has no absolute path; write {scheme}:///{location}")
    return text


def _check_host(text: str) -> str:
    if host_name(text) is None:
        raise ValueError(f"{text!r} is not a host; write pictures.example.org or 10.0.0.7:8080")
    return text.lower()


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: `a{99999999999}`, and (((…
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from error
    return text


def parts_named(words: str) -> frozenset[str]:
    """The parts of a language model that words of `adapter.targets`, joined by `+`, name."""
    return frozenset().union(*(_PARTS[word] for word in words.split("+")))


def _check_parts(words: str) -> str:
    if not set(words.split("+")) <= _PARTS.keys():
        raise ValueError(f"{words!r} is not one of {', '.join(_PARTS)}, or several of them joined by +")
    return words


def _list_of_pattern(value: Any) -> Any:
    """A list of a text that is not words of `PartWords`."""
    is_pattern = isinstance(value, str) and not set(value.split("+")) <= _PARTS.keys()
    return [value] if is_pattern else value


def float_of_yaml(value: Any) -> Any:
    """The number where YAML 1.1 reads a string, e.g. `1e-4`."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


DurationText = Annotated[
    str,
    AfterValidator(_check_duration),
    Takes("an amount with its unit, e.g. `3 epochs`, `500 steps` or `2M tokens`"),
]
WarmupText = Annotated[
    str, AfterValidator(_check_warmup), Takes("a share or a number of steps, e.g. `3%` or `100 steps`")
]
SecondsText = Annotated[
    str, AfterValidator(_check_seconds), Takes("a time, e.g. `25 seconds` or `2 minutes`")
]
PatienceText = Annotated[
    str,
    AfterValidator(lambda text: text if text == "auto" else _check_seconds(text)),
    Takes("`auto`, or a time, e.g. `5 minutes`"),
]
BytesText = Annotated[str, AfterValidator(_check_bytes), Takes("a size, e.g. `1 GB` or `50 MB`")]
StorageText = Annotated[
    str, AfterValidator(_check_storage), Takes("a URL, e.g. `s3://bucket/runs` or `file:///mnt/copies`")
]
HostText = Annotated[
    str, AfterValidator(_check_host), Takes("the name or address of a host, e.g. `pictures.example.org`")
]
DateText = Annotated[
    str, BeforeValidator(_text_of_yaml), AfterValidator(_check_date), Takes("a date as YYYY-MM-DD")
]
PartWords = Annotated[
    str,
    AfterValidator(_check_parts),
    Takes(f"parts joined by +: {', '.join(_PARTS)}", words=tuple(_PARTS)),
]
Pattern = Annotated[str, AfterValidator(_check_pattern), Takes("a regular expression")]
Patterns = Annotated[list[Pattern], BeforeValidator(_list_of_pattern)]
"""A list for keys that take `PartWords`, too."""
Share = Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, BeforeValidator(float_of_yaml), Field(gt=0.0)]
NotNegative = Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0)]


Objective = Literal[
    "sft", "pretrain", "reward", "dpo", "kto", "orpo", "simpo", "grpo", "classify", "embed", "diffusion"
]

OBJECTIVES_TEXT = (
    "sft: answers to prompts; pretrain: all tokens of plain text; reward: a reward model of pairs;"
    " dpo (arXiv:2305.18290), orpo (arXiv:2403.07691) and simpo (arXiv:2405.14734): pairs of answers;"
    " kto (arXiv:2402.01306): rated answers; grpo (arXiv:2402.03300): answers that the model samples to"
    " prompts, by their rewards; classify: a classifier of texts with labels; embed: an"
    " embedding model of pairs of similar texts; diffusion: a LoRA for a Stable Diffusion model, of"
    " pictures with captions; FILE.py:CLASS: your own, on the rows of sft, with `--trust-code`"
)
"""What each of them trains on, for the reference."""

OwnObjective = Annotated[
    str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), Takes("a class in your own file, `FILE.py:CLASS`")
]


def lf_name(template: str | None) -> str | None:
    """The name behind `lf:` in data.template; None if it is a file, or not set."""
    if template is None or not template.startswith(LF_PREFIX):
        return None
    return template.removeprefix(LF_PREFIX)


def rows_of(objective: str) -> str:
    """The objective whose rows it has: those of `sft` for one of the user's own."""
    return "sft" if own_class(objective) else objective


PAIRS = ("reward", "dpo", "orpo", "simpo")
"""Objectives whose rows are a chosen and a rejected answer."""

RATINGS = ("kto",)
"""Objectives whose rows are one answer with a label."""

PREFERENCE = (*PAIRS, *RATINGS)
"""All objectives of preference rows."""

WITH_PICTURES = ("sft", "dpo", "kto", "orpo", "simpo", GRPO)
"""Objectives whose rows may have pictures."""

USED: dict[str, tuple[str, ...]] = {
    "dpo": ("loss", "beta", "label_smoothing", "sft_weight", "reference"),
    "kto": ("beta", "desirable_weight", "undesirable_weight", "sft_weight", "reference"),
    "orpo": ("beta", "sft_weight"),
    "simpo": ("beta", "gamma", "sft_weight"),
}
"""The keys of `preference` that each objective uses; the others use none."""


class PreferenceSection(Section):
    """The loss of preference objectives."""

    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        default="sigmoid",
        description=(
            "for dpo: the loss function; hinge: arXiv:2305.10425; ipo (arXiv:2310.12036): squared, on"
            " log-probabilities per token"
        ),
    )
    beta: Positive = Field(
        default=0.1,
        description=(
            "dpo, kto: how strongly deviations from the reference are penalized; orpo: weight of the odds"
            " ratio; simpo: scale of the reward"
        ),
    )
    label_smoothing: Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0, lt=0.5)] = Field(
        default=0.0,
        description="for dpo with `loss: sigmoid`: share of pairs that are assumed to have swapped labels",
    )
    sft_weight: NotNegative = Field(
        default=0.0,
        description=(
            "weight of an added term: the mean cross entropy per token of the chosen (kto: desirable) answers"
        ),
    )
    gamma: NotNegative = Field(default=0.5, description="for simpo: the target reward margin")
    desirable_weight: Positive = Field(default=1.0, description="for kto: weight of rows with `label: true`")
    undesirable_weight: Positive = Field(
        default=1.0, description="for kto: weight of rows with `label: false`"
    )
    reference: Annotated[str, NamesFile(shows_absence=True, besides="auto")] = Field(
        default="auto",
        min_length=1,
        description=(
            "for dpo and kto: the reference model, a path; auto: the model without its adapter (also with"
            " adapter.from; adapters of adapter.merge are part of the model), or with full fine-tuning the"
            " starting weights"
        ),
    )


def keys_of(objective: str) -> tuple[str, ...]:
    """The keys of `preference` that an objective uses."""
    return USED.get(objective, ())


def sides_of(objective: str) -> int:
    """The number of rows of tokens that a unit of an objective has: 2 for a pair, and for a rated
    answer with the mismatched one.
    """
    return 2 if objective in PREFERENCE else 1


assert set(get_args(Objective)) == {
    *("sft", "pretrain", "classify", "embed", "diffusion"),
    GRPO,
    *PREFERENCE,
}


Resolution = (
    Annotated[int, Field(ge=8)]
    | Annotated[list[Annotated[int, Field(ge=8)]], Field(min_length=2, max_length=2)]
)
"""The side of a square of pixels, or [width, height]."""

CaptionExtension = Annotated[str, Field(pattern=r"^\.[A-Za-z0-9_-]+$")]


class DiffusionSection(Section):
    """LoRA training of Stable Diffusion models on pictures with captions."""

    prediction: Literal["auto", "epsilon", "v_prediction"] = Field(
        default="auto",
        description=(
            "what the UNet predicts: the noise, or v (arXiv:2202.00512); auto: as the scheduler of the model"
            " says"
        ),
    )
    min_snr_gamma: Positive | None = Field(
        default=None,
        description=(
            "γ of the loss weights min(SNR, γ) / SNR (arXiv:2303.09556; with v: / (SNR + 1)); 5 is usual;"
            " null: no weights"
        ),
    )
    noise_offset: NotNegative = Field(
        default=0.0, description="scale of a random constant that is added to the noise of each channel"
    )
    prior: Annotated[str | None, NamesFile(shows_absence=True)] = Field(
        default=None,
        min_length=1,
        description=(
            "a folder of regularization pictures (prior preservation, arXiv:2208.12242); they are repeated"
            " until they are as many as the training pictures of their resolution with their repeats"
        ),
    )
    prior_weight: NotNegative = Field(
        default=1.0, description="weight of the loss of regularization pictures"
    )
    caption_extensions: list[CaptionExtension] = Field(
        default=[".txt", ".caption"],
        min_length=1,
        description=(
            "suffixes of caption files, in order of preference; a `metadata.jsonl` in the folder counts, too"
        ),
    )
    folder_captions: bool = Field(
        default=False,
        description=(
            "a picture without a caption gets the name of its folder, `4_NAME`, as in sd-scripts; false: it"
            " is a bad row"
        ),
    )
    caption_dropout: Share = Field(
        default=0.0, description="share of captions that are replaced by an empty one, in training"
    )
    shuffle_captions: bool = Field(
        default=False, description="shuffle the parts of a caption between commas each time it is used"
    )
    tag_dropout: Share = Field(
        default=0.0,
        description=(
            "share of the parts of a caption between commas that are omitted, drawn each time it is used"
        ),
    )
    keep_tokens: int = Field(
        default=0,
        ge=0,
        description="with `shuffle_captions` and `tag_dropout`: number of parts at the beginning that stay",
    )
    keep_tokens_separator: str = Field(
        default="",
        description=(
            "a text in captions, e.g. `|||`: the parts before the first one and after a second one stay,"
            " whatever `keep_tokens` is; the text is removed"
        ),
    )
    caption_separator: str = Field(
        default=",", min_length=1, description="the text between the parts of a caption"
    )
    secondary_separator: str = Field(
        default="",
        description=(
            "a text in captions, e.g. `;;;`, between parts that are shuffled and omitted as one; it becomes"
            " `caption_separator`"
        ),
    )
    wildcards: bool = Field(
        default=False,
        description=(
            "each time a caption is used one of its lines is drawn, and of `{a|b}` one of the alternatives;"
            " `{{` and `}}` are braces. Evaluation uses the first ones"
        ),
    )
    tag_warmup: WarmupText = Field(
        default="0 steps",
        description=(
            "steps, or share of all steps, over which the number of trained parts of a caption grows to all"
            " of them; parts that stay are always used"
        ),
    )
    tag_warmup_min: int = Field(default=1, ge=0, description="with `tag_warmup`: number of parts at step 1")
    caption_prefix: str = Field(default="", description="text before each caption, with a space between them")
    caption_suffix: str = Field(default="", description="text after each caption, with a space between them")
    clip_skip: int | None = Field(
        default=None,
        ge=1,
        le=12,
        description=(
            "the hidden states of the text encoder that the UNet sees, counted from its end: 1 is the last"
            " layer; null: as in the model's pipeline"
        ),
    )
    flip: bool = Field(
        default=False,
        description=(
            "half of the uses of a picture in training, drawn each time, are mirrored left to right; latents"
            " of both are cached"
        ),
    )
    buckets: bool = Field(
        default=True,
        description=(
            "pictures keep about their aspect ratio, in one of a few sizes of about the area of"
            " `data.resolution`; false: all are cut to it"
        ),
    )
    min_side: int = Field(default=256, ge=8, description="with `buckets`: shortest side, pixels")
    max_side: int = Field(default=2048, ge=8, description="with `buckets`: longest side, pixels")
    bucket_step: int = Field(
        default=64, ge=8, description="with `buckets`: sides are multiples of this many pixels"
    )
    upscale: bool = Field(
        default=True,
        description=(
            "with `buckets`: smaller pictures are enlarged to the area of `data.resolution`; false: they keep"
            " their size, cut to the step"
        ),
    )
    max_tokens: Literal[75, 150, 225] = Field(
        default=75,
        description=(
            "tokens of a caption; more than 75 are encoded in parts of 75 that the UNet sees one after the"
            " other"
        ),
    )
    cache: bool = Field(
        default=True,
        description=(
            "compute the latents of pictures and the embeddings of captions once, before training, and keep"
            " them on disk; false: in each step"
        ),
    )
    text_lr: Positive | None = Field(
        default=None,
        description="with `adapter.targets: unet+text`: learning rate of the text encoders; null: optim.lr",
    )
    eval_seed: int | None = Field(
        default=None,
        description=(
            "seed with which `data.eval`, or `pictures.eval` of a source, chooses among the training"
            " pictures; null: `seed`"
        ),
    )
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description=(
            "prompts of sample pictures, which are drawn at each evaluation into `samples/`, beside the"
            " pictures of `eval.samples`"
        ),
    )
    sample_steps: int = Field(default=20, ge=1, le=1000, description="denoising steps of sample pictures")
    guidance: NotNegative = Field(
        default=7.5, description="scale of the classifier-free guidance of sample pictures; up to 1: none"
    )


class PixelsSection(Section):
    """Bounds of the pictures in rows, in pixels."""

    min: int | None = Field(
        default=None,
        ge=1,
        description="pictures with fewer pixels are enlarged to this many; null: no picture is enlarged",
    )
    max: int | None = Field(
        default=None,
        ge=1,
        description="pictures with more pixels are reduced to this many; null: no picture is reduced",
    )


class FramesSection(Section):
    """Which frames of the videos in rows are used."""

    fps: Positive | None = Field(
        default=2.0,
        description="frames per second of a video file; null: `max` frames, whatever its duration",
    )
    max: int = Field(default=16, ge=1, description="frames of a video, evenly over its duration")
    pixels: PixelsSection = Field(
        default=PixelsSection(), description="bounds of a frame; null: as data.pixels"
    )


class PicturesSection(Section):
    """Settings for the pictures of one source: keys of `diffusion`, `data.resolution`, and some
    that only a source has.
    """

    resolution: Resolution | None = Field(default=None, description="like data.resolution, for this source")
    flat: bool = Field(
        default=False,
        description=(
            "only the pictures directly in the folder, whatever its name; false: also those of its folders"
            " `4_NAME`"
        ),
    )
    caption: str | None = Field(
        default=None,
        description="the caption of pictures without a caption file; null: see `diffusion.folder_captions`",
    )
    prior: bool = Field(
        default=False, description="these are regularization pictures, as in `diffusion.prior`"
    )
    eval: Annotated[float, BeforeValidator(float_of_yaml), Field(ge=0.0, le=1.0)] = Field(
        default=0.0,
        description=(
            "share of the pictures that is held out for evaluation, chosen with `diffusion.eval_seed`; 1: all"
        ),
    )
    caption_extensions: Annotated[list[CaptionExtension], Field(min_length=1)] | None = Field(
        default=None, description="like diffusion.caption_extensions"
    )
    caption_dropout: Share | None = Field(default=None, description="like diffusion.caption_dropout")
    shuffle_captions: bool | None = Field(default=None, description="like diffusion.shuffle_captions")
    tag_dropout: Share | None = Field(default=None, description="like diffusion.tag_dropout")
    keep_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="like diffusion.keep_tokens"
    )
    keep_tokens_separator: str | None = Field(
        default=None, description="like diffusion.keep_tokens_separator"
    )
    caption_separator: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="like diffusion.caption_separator"
    )
    secondary_separator: str | None = Field(default=None, description="like diffusion.secondary_separator")
    wildcards: bool | None = Field(default=None, description="like diffusion.wildcards")
    tag_warmup: WarmupText | None = Field(default=None, description="like diffusion.tag_warmup")
    tag_warmup_min: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="like diffusion.tag_warmup_min"
    )
    caption_prefix: str | None = Field(default=None, description="like diffusion.caption_prefix")
    caption_suffix: str | None = Field(default=None, description="like diffusion.caption_suffix")
    flip: bool | None = Field(default=None, description="like diffusion.flip")
    buckets: bool | None = Field(default=None, description="like diffusion.buckets")
    min_side: Annotated[int, Field(ge=8)] | None = Field(default=None, description="like diffusion.min_side")
    max_side: Annotated[int, Field(ge=8)] | None = Field(default=None, description="like diffusion.max_side")
    bucket_step: Annotated[int, Field(ge=8)] | None = Field(
        default=None, description="like diffusion.bucket_step"
    )
    upscale: bool | None = Field(default=None, description="like diffusion.upscale")

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Only what differs, so that what was not set does not read as set."""
        fields = type(self).model_fields
        return {key: value for key, value in dump(self).items() if value != fields[key].default}

    def applied_to(self, section: DiffusionSection) -> DiffusionSection:
        """The settings of all pictures with those of this source."""
        changes = {
            key: value
            for key in DiffusionSection.model_fields
            if (value := getattr(self, key, None)) is not None
        }
        return section.model_copy(update=changes)
