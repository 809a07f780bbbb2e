"""The schema of a config. Validators accept or reject; they read nothing from the machine.

They change no value, but a text where a list of texts is expected.

Quantities keep their text (`3 epochs`, `3%`); `Duration`, `Warmup` and similar types parse it where
it is used.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from unisono.base.text import Duration, nearest, one_line
from unisono.trainer.config.answer_functions import MetricSection, function_contradictions, function_names
from unisono.trainer.config.heads import CLASSIFY, EMBED, HEADS, ClassifySection, EmbedSection
from unisono.trainer.config.limits import refused_values
from unisono.trainer.config.optimizers import OPTIMIZERS, optimizer_named
from unisono.trainer.config.rollout_sections import (
    GrpoSection,
    RewardSection,
    RolloutSection,
    grpo_contradictions,
    server_contradictions,
)
from unisono.trainer.config.schedules import SCHEDULES, schedule_named
from unisono.trainer.config.sections import (
    DIFFUSION,
    GRPO,
    OBJECTIVES_TEXT,
    USED,
    BytesText,
    DateText,
    DiffusionSection,
    DurationText,
    FramesSection,
    HostText,
    NamesFile,
    NotNegative,
    Objective,
    OwnObjective,
    PartWords,
    PatienceText,
    Pattern,
    Patterns,
    PicturesSection,
    PixelsSection,
    Positive,
    PreferenceSection,
    Resolution,
    SecondsText,
    Section,
    Share,
    StorageText,
    TargetWord,
    Thinking,
    WarmupText,
    float_of_yaml,
    keys_of,
    lf_name,
)
from unisono.trainer.config.yaml_file import Takes, words_in

_ROUNDING = 1e-6  # of a sum of probabilities, which people write with few digits

Format = Literal[
    "auto",
    "alpaca",
    "alpaca-prompt",
    "sharegpt",
    "messages",
    "openai",
    "text",
    "prompt-completion",
    "preference",
]


class RopeSection(Section):
    """Scaling of rotary position embeddings, for rows that are longer than the model was trained
    on.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = Field(
        description=(
            "linear: arXiv:2306.15595; dynamic: NTK-aware, by the length of each row; yarn: arXiv:2309.00071;"
            " llama3: as in Llama 3.1"
        )
    )
    factor: Annotated[float, BeforeValidator(float_of_yaml), Field(gt=1.0)] | Literal["auto"] = Field(
        default="auto",
        description=(
            "how many times longer rows may be; auto: as data.max_length needs, in whole multiples of the"
            " model's positions"
        ),
    )


class ModelSection(Section):
    """The model to train, and how it is loaded."""

    path: Annotated[str, NamesFile()] = Field(
        min_length=1, description="a directory, a hub id, or `builtin:tiny`"
    )
    revision: str | None = Field(default=None, description="a hub revision: branch, tag or commit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "dtype of frozen weights and of the computation; auto: bfloat16 if the device supports it"
        ),
    )
    tokenizer: Annotated[str | None, NamesFile()] = Field(
        default=None, description="a directory or hub id; null: the model's own"
    )
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description=(
            "random: only config.json is read, for pretraining from random weights; with an adapter only for"
            " `--dry-run`"
        ),
    )
    resize_vocabulary: bool = Field(
        default=False,
        description=(
            "grow embedding and head to the tokenizer's size; with an adapter both are fully trained and"
            " saved with it"
        ),
    )
    rope: RopeSection | None = Field(
        default=None, description="scaled RoPE, stored with the result; null: as in the model's config.json"
    )
    embedding_noise: NotNegative = Field(
        default=0.0,
        description=(
            "NEFTune (arXiv:2310.05914): α of the uniform noise within ±α/√(tokens of the row × hidden size)"
            " that is added to input embeddings in training"
        ),
    )
    trust_remote_code: bool = Field(default=False, description="run Python code from the model repository")
    quantize: Literal["nf4", "fp4", "int8"] | None = Field(
        default=None,
        description=(
            "with an adapter: keep the linear layers of the base model in 4 or 8 bits (QLoRA,"
            " arXiv:2305.14314; needs `pip install bitsandbytes accelerate`); embeddings, head and norms stay"
            " in `dtype`; null: as in the model's files"
        ),
    )
    quantize_double: bool = Field(
        default=True, description="with nf4 and fp4: quantize the scales of blocks of weights, too"
    )
    quantize_embeddings: bool = Field(
        default=False,
        description=(
            "with `quantize`: keep embedding and head in 8 bits, too, with a scale for each token; peft and"
            " bitsandbytes alone have them in 16"
        ),
    )
    quantize_compute: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "dtype that quantized weights are dequantized to, and of the products with them; auto: `dtype`"
        ),
    )


class AdapterSection(Section):
    """A low-rank adapter (LoRA, arXiv:2106.09685; rsLoRA, arXiv:2312.03732; DoRA,
    arXiv:2402.09353), or a different one of peft (OFT, arXiv:2306.07280; LoHa,
    arXiv:2108.06098; LoKr, arXiv:2309.14859).
    """

    kind: Literal["lora", "dora", "rslora", "oft", "loha", "lokr"] = Field(
        default="lora",
        description=(
            "dora trains magnitude and direction separately and is slower; rslora suits high ranks; oft"
            " rotates the weights, loha and lokr multiply small matrices by element and as Kronecker product"
        ),
    )
    rank: int = Field(
        default=16, ge=1, description="the rank r of the update B·A; of oft the size of a block of rotations"
    )
    alpha: Positive = Field(
        default=32.0, description="scale: the update is multiplied by alpha / rank (rslora: alpha / √rank)"
    )
    dropout: Share = Field(default=0.0, description="dropout on the adapter's input")
    targets: TargetWord | PartWords | Patterns = Field(
        default="all-linear",
        description=(
            "attention (and other mixers of tokens), mlp, experts and router, joined by +; all-linear: all of"
            " these and other linear layers, without router, embedding and head; or regular expressions"
            " searched in names of linear layers and of experts' weights; for image models unet (which"
            " all-linear means there, too: all linear layers of its transformer blocks), unet+text, or"
            " regular expressions searched in module names of the UNet"
        ),
    )
    modules_to_save: list[str] = Field(
        default=[], description="modules that are fully trained and saved with the adapter"
    )
    init: Literal["default", "pissa"] = Field(
        default="default",
        description=(
            "pissa (arXiv:2404.02948): begin with the principal components of the weights, and freeze the"
            " rest; stored as a plain adapter of twice the rank"
        ),
    )
    init_steps: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="with `init: pissa`: power iterations of a fast approximate SVD; null: exact",
    )
    from_: Annotated[str | None, NamesFile(shows_absence=True)] = Field(
        default=None,
        alias="from",
        min_length=1,
        description="the directory of an adapter, or of a finished run, to continue with its weights",
    )
    merge: Annotated[list[Annotated[str, Field(min_length=1)]], NamesFile(shows_absence=True)] = Field(
        default=[],
        description=(
            "adapters (directories) that are merged into the base weights in memory, in order; the result"
            " contains them"
        ),
    )

    @property
    def is_plain(self) -> bool:
        """Whether an adapted layer has two matrices more, and no other values or operations; and
        nothing else is trained.
        """
        return self.kind in ("lora", "rslora") and self.dropout == 0 and not self.modules_to_save

    @property
    def is_of_pairs(self) -> bool:
        """Whether an adapted layer has matrices A and B, as LoRA and its variants."""
        return self.kind in ("lora", "rslora", "dora")


def needs_start(adapter: AdapterSection | None) -> bool:
    """Whether the model that a run starts from is another one than that without its adapter."""
    if adapter is None:
        return True
    return bool(adapter.from_ or adapter.modules_to_save) or adapter.init == "pissa"


class TrainOnlySection(Section):
    """The parts of a model that are trained without an adapter; everything else stays as it is."""

    layers: int = Field(description="N: the last N layers; -N: the first N; 0: none")
    spread: bool = Field(
        default=False,
        description=(
            "layers: N layers at equal distances, the last of each group, where LLaMA Pro (arXiv:2401.02415)"
            " inserts new ones"
        ),
    )
    modules: Literal["all"] | list[str] = Field(
        default="all", description="all, or names of the modules inside these layers, e.g. `mlp`, `q_proj`"
    )
    extra: list[str] = Field(
        default=[],
        description="names of modules outside of the layers, e.g. `embed_tokens`, `norm`, `lm_head`",
    )


class TagsSection(Section):
    """The words of a source for the keys of a turn and for its roles; any other role makes a row
    bad.
    """

    role_tag: str = Field(default="from", description="the key of a turn's role")
    content_tag: str = Field(default="value", description="the key of a turn's text")
    user_tag: str | None = Field(default="human", description="the role of the user; null: none")
    assistant_tag: str | None = Field(default="gpt", description="the role of the assistant; null: none")
    observation_tag: str | None = Field(
        default="observation", description="the role of a tool's answer; null: none"
    )
    function_tag: str | None = Field(
        default="function_call", description="the role of a function call; null: none"
    )
    system_tag: str | None = Field(
        default="system", description="the role of a leading system message; null: none"
    )


COLUMN_NAMES = (
    *(
        "messages",
        "conversations",
        "prompt",
        "completion",
        "instruction",
        "input",
        "output",
        "history",
        "text",
    ),
    *("system", "tools", "functions", "chosen", "rejected", "label", "labels"),
    *("anchor", "positive", "negative"),
    *("images", "image", "objects", "videos", "video", "audios", "audio"),
)
"""Our names of columns; the last ones only to be switched off."""


def _check_columns(columns: dict[str, str | None]) -> dict[str, str | None]:
    for name in columns:
        if name not in COLUMN_NAMES:
            near = nearest(name, list(COLUMN_NAMES))
            words = f"did you mean `{near}`?" if near else f"known names are {', '.join(COLUMN_NAMES)}"
            raise ValueError(f"unknown name `{one_line(name, limit=60)}`; {words}")
    return columns


class SourceSection(Section):
    """One source of rows."""

    path: Annotated[str, NamesFile()] = Field(
        min_length=1, description="a path, directory, glob, URL or hub id"
    )
    format: Format = Field(default="auto", description="like data.format, for this source")
    weight: Positive = Field(
        default=1.0,
        description="how often its rows occur in an epoch: 2 is twice, 0.5 is a seeded half of them",
    )
    rows: int | None = Field(
        default=None, ge=1, description="the first rows of the source, or of what `samples` picks; null: all"
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        description=(
            "number of rows to pick at random, with the seed; if the source has fewer rows: all of them, and"
            " the rest drawn with replacement; null: all once"
        ),
    )
    split: str | None = Field(default=None, description="the split of a hub dataset; null: `train`")
    subset: str | None = Field(default=None, description="the subset (configuration) of a hub dataset")
    folder: str | None = Field(default=None, description="the directory within a hub dataset")
    columns: Annotated[dict[str, str | None], AfterValidator(_check_columns)] = Field(
        default={}, description="mapping from our column names to those of the file; null: not read"
    )
    tags: TagsSection | None = Field(
        default=None,
        description=(
            "keys and roles of the turns of `sharegpt`, `openai` and `preference` rows; null: the usual words"
        ),
    )
    media_dir: Annotated[str | None, NamesFile()] = Field(
        default=None, description="like data.media_dir, for this source; null: that"
    )
    pictures: PicturesSection | None = Field(
        default=None,
        description=(
            "with `objective: diffusion`: what differs for the pictures of this source; null: nothing"
        ),
    )

    @model_serializer(mode="wrap")
    def _without_pictures(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the keys of pictures where they are not set: most rows have none."""
        unset = [key for key in ("pictures", "media_dir") if getattr(self, key) is None]
        return {key: value for key, value in dump(self).items() if key not in unset}


class MixSection(Section):
    """How the sources of `data.train` are combined."""

    strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] = Field(
        default="concat",
        description=(
            "concat: all rows of all sources; interleave: rows are taken from the sources in turn, until the"
            " first is exhausted (under), until all are, the others starting over (over), or until all are,"
            " each row once (once)"
        ),
    )
    probabilities: list[Positive] | None = Field(
        default=None,
        description=(
            "with interleave: the probability of each source, which is then drawn with the seed instead of"
            " taken in turn; the probabilities sum to 1"
        ),
    )


class DataSection(Section):
    """The rows: sources, format, and which tokens count in the loss."""

    train: Annotated[
        str | list[str | SourceSection],
        Takes("a path, a glob, a URL, a hub id, or a list of these and of sections"),
        NamesFile(),
    ] = Field(description="a path, glob, URL (fsspec), hub id, or a list of sources")
    eval: Annotated[
        Annotated[float, Field(gt=0.0, lt=1.0)]
        | Annotated[int, Field(ge=1)]
        | str
        | list[str | SourceSection]
        | None,
        BeforeValidator(float_of_yaml),
        Takes("a share between 0 and 1 (e.g. 0.05), a number of rows, a path, a list of sources, or null"),
        NamesFile(),
    ] = Field(
        default=None,
        description=(
            "a share (0.05) or a number of rows (500), split off with the run's seed; or a path, or a list of"
            " sources; or null"
        ),
    )
    mix: MixSection = MixSection()
    format: Format = Field(default="auto", description="the format of a row; auto: detected and reported")
    template: Annotated[str | None, NamesFile()] = Field(
        default=None,
        description=(
            "a file with a chat template (Jinja); or `lf:NAME`, a template of LLaMA-Factory, which encodes"
            " rows as it does, e.g. `lf:qwen3_nothink`; null: the tokenizer's own"
        ),
    )
    thinking: Thinking = Field(
        default=True,
        description=(
            "with `lf:` templates of reasoning models: an answer without a thought gets an empty one, which"
            " counts in the loss (true), or belongs to the prompt (false, null); false also removes thoughts;"
            " preserve: like true, but earlier answers keep their thoughts where only the last one counts"
        ),
    )
    thoughts: Literal["loss", "ignore", "strip"] = Field(
        default="loss",
        description=(
            "what happens to an answer whose thought (`reasoning_content`, or `<think>` in its text) the chat"
            " template does not render. loss: it does not count in the loss; ignore: it counts without its"
            " thought; strip: thoughts are removed from all rows"
        ),
    )
    control_tokens: Literal["keep", "escape", "bad"] = Field(
        default="keep",
        description=(
            "control tokens of the tokenizer (e.g. `<|im_end|>`) in the text of a row. keep: they are read as"
            " such, and such rows are counted; escape: they are read as text; bad: the row cannot be used"
        ),
    )
    date: DateText | None = Field(
        default=None,
        description=(
            "the date in the tool prompt of `lf:llama3` and `lf:llama4`, as YYYY-MM-DD; null: the day on"
            " which rows are tokenized"
        ),
    )
    system: str | None = Field(
        default=None,
        description=(
            "with `lf:` templates: the system message of rows without one, instead of the template's own;"
            " null: the template's own"
        ),
    )
    resolution: Resolution | None = Field(
        default=None,
        description=(
            "with `objective: diffusion`: the side of a square of pixels, or [width, height]; null: that of"
            " the model"
        ),
    )
    pixels: PixelsSection = Field(
        default=PixelsSection(),
        description="bounds of the pictures in rows; the model's processor may resize them further",
    )
    media_dir: Annotated[str | None, NamesFile()] = Field(
        default=None,
        description=(
            "the directory where relative paths of pictures in rows begin; null: that of the file with the"
            " rows, else the working directory"
        ),
    )
    cache_bytes: BytesText | None = Field(
        default=None,
        description=(
            "host memory of a node in which pictures of rows are kept: their pixels, or their features if the"
            " vision part is not trained; null: a quarter of what is available for features, 256 MiB per rank"
            " for pixels"
        ),
    )
    frames: FramesSection = Field(
        default=FramesSection(), description="which frames of the videos in rows are used"
    )
    image_hosts: list[HostText] = Field(
        default=[],
        description=(
            "hosts from which pictures that rows name by their http and https URLs are fetched, once; `HOST:PORT`"
            " for other ports than 80 and 443; empty: such rows are bad"
        ),
    )
    boxes: Literal["tokens", "list"] = Field(
        default="tokens",
        description=(
            "how boxes of the column `objects` (ms-swift) are written. tokens: with those of the model's family,"
            " e.g. `<|box_start|>(x1,y1),(x2,y2)<|box_end|>`; list: `[x1, y1, x2, y2]`, as in ms-swift with"
            " `QWENVL_BBOX_FORMAT=new`"
        ),
    )
    max_length: int = Field(default=1024, ge=8, description="tokens of a row, and of a packed sequence")
    too_long: Literal["error", "cut", "drop", "split", "keep-answer", "balanced"] = Field(
        default="error",
        description=(
            "what happens to longer rows; recorded row by row in the ledger. cut: their end; keep-answer: the"
            " beginning of the prompt, so that the last answer stays whole; balanced: as LLaMA-Factory, turn"
            " by turn, a question and its answer in proportion"
        ),
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="what happens to a row that cannot be read or has no answer"
    )
    ignore: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description=(
            "keys of messages that are not read, with all that they hold; other keys that are not read are an"
            " error"
        ),
    )
    packing: bool = Field(default=True, description="pack rows into one sequence; none attends to another")
    loss_on: Literal["answers", "last-answer", "all"] = Field(
        default="answers", description="tokens that count in the loss; with `objective: pretrain` always all"
    )
    check_template: bool = Field(
        default=True,
        description="reject a template that leaves the stop token of a trained answer out of the loss",
    )


def sources_of(data: DataSection) -> list[tuple[str, SourceSection]]:
    """Key and section of every source, those for training first; `data.format` is applied to those
    without a format of their own.
    """
    sources: list[tuple[str, SourceSection]] = []
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        if isinstance(value, list):
            entries = [(f"{key}.{number}", entry) for number, entry in enumerate(value)]
        else:
            entries = [(key, value)] if isinstance(value, str) else []
        for own_key, entry in entries:
            section = SourceSection.model_construct(path=entry) if isinstance(entry, str) else entry
            if section.format == "auto":
                section = section.model_copy(update={"format": data.format})
            sources.append((own_key, section))
    return sources


def has_evaluation(data: DataSection) -> bool:
    """Whether any rows are for evaluation."""
    shares = [section.pictures.eval for _, section in sources_of(data) if section.pictures is not None]
    return data.eval is not None or any(shares)


def picture_settings(config: "RunConfig") -> list[DiffusionSection]:
    """`diffusion`, and what it is for each source of pictures that has settings of its own."""
    per_source = [section.pictures for _, section in sources_of(config.data) if section.pictures is not None]
    return [config.diffusion, *(pictures.applied_to(config.diffusion) for pictures in per_source)]


def _named_in(named: Callable[[str], object]) -> Callable[[str], str]:
    """A validator of names that a table, or an installed package, has."""

    def check(name: str) -> str:
        try:
            named(name)
        except KeyError:
            raise PydanticCustomError("unknown_name", "unknown") from None
        return name

    return check


def _names(words: Iterable[str]) -> str:
    return f"one of {', '.join(f'`{word}`' for word in words)}"


ScheduleName = Annotated[
    str, AfterValidator(_named_in(schedule_named)), Takes(_names(SCHEDULES), tuple(SCHEDULES))
]
OptimizerName = Annotated[
    str,
    AfterValidator(_named_in(optimizer_named)),
    Takes(f"{_names(OPTIMIZERS)} or a class in a file of yours, `FILE.py:CLASS`", tuple(OPTIMIZERS)),
]
OptionValue = Annotated[bool | int | float | str | list[int | float] | None, BeforeValidator(float_of_yaml)]


class RouterLossSection(Section):
    """Losses of the routers of a mixture of experts, over all tokens of a step; they are added to
    that of the objective. eval_loss has none.
    """

    load_balancing: NotNegative = Field(
        default=0.0,
        description=(
            "coefficient of the load balancing loss (arXiv:2101.03961, equations 4-6), 0.001 to 0.01 is"
            " usual; with equal load it is the number of experts of a token"
        ),
    )
    z_loss: NotNegative = Field(
        default=0.0,
        description="coefficient of the z-loss (arXiv:2202.08906, equation 5), 0.001 is usual",
    )
    layers: Literal["each", "together"] = Field(
        default="each",
        description=(
            "each: the load is balanced in each layer, and the losses of layers are averaged; together: the"
            " load of all layers is added up first, as in transformers"
        ),
    )


ModelPart = Literal["language", "projector", "vision"]
LANGUAGE: tuple[ModelPart, ...] = ("language",)


class OptimSection(Section):
    """The optimizer and its learning rate."""

    kind: OptimizerName = Field(
        default="adamw",
        description=(
            "muon: Muon for matrices, AdamW for the rest (with full fine-tuning or pretraining); adamw_8bit,"
            " lion_8bit: state in 8 bits; paged: state in memory that a GPU pages to the host; prodigy: finds"
            " the learning rate, of which `lr` is a factor; schedule_free: averages weights, for `schedule:"
            " constant`; FILE.py:CLASS: a torch.optim.Optimizer of your own, with `--trust-code`"
        ),
    )
    options: Annotated[
        dict[str, OptionValue],
        Takes("a mapping of names to numbers, texts, true, false, null or lists of numbers"),
    ] = Field(default={}, description="further arguments of an optimizer of a library, or of your own")
    lr: Positive = Field(
        default=2.0e-4, description="peak learning rate; use about a tenth of it for full fine-tuning"
    )
    part_lr: dict[ModelPart, Positive] = Field(
        default={},
        description="learning rates of parts of a vision-language model, e.g. `vision`; others have `lr`",
    )
    muon_lr: Positive = Field(default=0.02, description="learning rate of matrices with `kind: muon`")
    muon_scale: Literal["original", "adamw"] = Field(
        default="original",
        description=(
            "scale of Muon's updates; original: muon_lr × √max(1, rows / columns); adamw (arXiv:2502.16982):"
            " muon_lr × 0.2 × √max(rows, columns), so that muon_lr is about that of AdamW"
        ),
    )
    lora_b_ratio: Positive = Field(
        default=1.0,
        description=(
            "LoRA+ (arXiv:2402.12354): the learning rate of an adapter's B matrices, as a multiple of lr"
        ),
    )
    schedule: ScheduleName = Field(
        default="cosine",
        description=(
            "learning rate schedule after the warmup; wsd: constant, then linear decay over the last fifth"
        ),
    )
    schedule_start: Literal[0, 1] = Field(
        default=1,
        description=(
            "the schedule's position at step 1; 0: as in transformers, where a warmup begins with a learning"
            " rate of 0"
        ),
    )
    cycles: int = Field(
        default=1, ge=1, le=1_000_000, description="number of cosines with `schedule: cosine_with_restarts`"
    )
    power: Positive = Field(default=1.0, description="exponent of the decay with `schedule: polynomial`")
    warmup: WarmupText = Field(default="3%", description="linear warmup of the learning rate")
    min_lr: Share = Field(default=0.0, description="final learning rate, as a share of lr")
    weight_decay: NotNegative = Field(
        default=0.0, description="weight decay of matrices; norms and biases have none"
    )
    betas: Annotated[tuple[Share, Share], Takes("a list of two numbers from 0 to below 1")] = Field(
        default=(0.9, 0.999),
        description="decay rates of the moments of AdamW, and of lion, prodigy and schedule_free",
    )
    eps: Positive = Field(
        default=1.0e-8, description="added to the denominator of AdamW's update, for numerical stability"
    )
    label_smoothing: Share = Field(
        default=0.0,
        description=(
            "share of the target probability that is spread evenly over the vocabulary; eval_loss has none"
        ),
    )
    loss_weight: Literal["uniform", "dft"] = Field(
        default="uniform",
        description=(
            "weight of a token in the loss of sft and pretrain; dft (arXiv:2508.05629): its own probability,"
            " without gradient; eval_loss has none"
        ),
    )
    router_loss: RouterLossSection | None = Field(
        default=None, description="of a mixture of experts; null: no such losses"
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description=(
            "dtype of AdamW's two moments; bfloat16 takes 4 bytes instead of 8 for each trained value, and"
            " rounds at random so that means stay (arXiv:2010.06192)"
        ),
    )
    max_grad_norm: Positive | None = Field(
        default=1.0, description="clip gradients to this norm; null: no clipping"
    )

    @model_validator(mode="before")
    @classmethod
    def _betas_from_list(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("betas"), list):
            return {**value, "betas": tuple(value["betas"])}
        return value


class BatchSection(Section):
    """How many sequences make one optimizer step."""

    global_: int = Field(
        default=16,
        ge=1,
        le=1_000_000,
        alias="global",
        description="sequences per optimizer step over all ranks",
    )
    micro: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="sequences per rank and forward; divides global"
    )
    per_rank: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description=(
            "instead of `global` and `micro`: sequences per rank and forward. The plan sets `global` to"
            " per_rank × accumulate × ranks; a run that resumes on other ranks keeps it"
        ),
    )
    accumulate: int | None = Field(
        default=None, ge=1, le=1_000_000, description="with per_rank: forwards per optimizer step; null: 1"
    )

    @property
    def of_ranks(self) -> tuple[int, int] | None:
        """`per_rank` and `accumulate`; None if `global` says the size."""
        return None if self.per_rank is None else (self.per_rank, self.accumulate or 1)

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Only one of the two forms, so that what was not set does not read as set."""
        other = ("per_rank", "accumulate") if self.per_rank is None else ("global", "global_", "micro")
        return {key: value for key, value in dump(self).items() if key not in other}


class EvalSection(Section):
    """When the model is evaluated, and what follows from it."""

    every: DurationText | None = Field(default="200 steps", description="a period; null: only at the end")
    stop_after: int | None = Field(
        default=None,
        ge=1,
        description=(
            "early stopping: stop after this many evaluations in a row without an improvement of eval_loss,"
            " or of the metric in checkpoint.best"
        ),
    )
    exact_match: bool = Field(
        default=False,
        description=(
            "generate answers for all evaluation rows before step 1 and at the end, and compare them with the"
            " references"
        ),
    )
    metrics: list[MetricSection] = Field(
        default=[],
        description=(
            "metrics of answers that are generated for all evaluation rows in each evaluation, before step 1,"
            " too: functions like those of `rewards`, each with its mean"
        ),
    )
    samples: int = Field(
        default=0,
        ge=0,
        le=100,
        description=(
            "number of evaluation rows to generate sample answers for, or sample pictures of their captions"
        ),
    )
    sample_tokens: int = Field(default=64, ge=1, description="maximum number of tokens of a sample answer")


class CheckpointSection(Section):
    """When checkpoints are saved, and which are kept."""

    every: DurationText = Field(
        default="200 steps", description="a period; the end of the run is always saved"
    )
    keep: int = Field(default=3, ge=1, description="number of recent checkpoints to keep")
    best: Annotated[
        Literal["eval_loss", "reward_accuracy", "reward", "accuracy", "f1"] | str | None,
        Takes(
            "`eval_loss`, `reward_accuracy`, `reward`, `accuracy`, `f1`, the name of a metric in `eval.metrics`, or"
            " null"
        ),
    ] = Field(
        default=None,
        description=(
            "the best checkpoint by this metric is kept, too, and becomes the result; reward_accuracy: share"
            " of pairs whose chosen answer has the higher reward; reward: the mean reward of `objective: grpo`;"
            " accuracy, f1: of `objective: classify`; accuracy: also of `objective: embed`; a metric of"
            " `eval.metrics`: higher is better"
        ),
    )
    storage: StorageText | None = Field(
        default=None,
        description=(
            "a URL for copies of all checkpoints, e.g. `s3://bucket/runs` or `file:///mnt/copies`;"
            " credentials come from the environment"
        ),
    )
    keep_every: DurationText | None = Field(
        default=None, description="a period, e.g. `1000 steps`: checkpoints at its multiples are kept forever"
    )
    max_shard_size: BytesText = Field(
        default="1 GB",
        description="maximum size of a file of the final weights; larger models are split into several files",
    )
    read_back: bool = Field(
        default=True,
        description=(
            "at the end load the written result in transformers and peft, and compare its logits with those"
            " of the trained model"
        ),
    )


class ParallelSection(Section):
    """How several ranks share the work."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = Field(
        default="auto",
        description=(
            "single: one rank; ddp: each rank has the full model; fsdp: each rank has a shard of every"
            " tensor; auto: ddp if the model fits on one device, else fsdp"
        ),
    )


class MemorySection(Section):
    """Settings that trade speed for memory."""

    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="recompute activations instead of storing them; auto: if they do not fit",
    )


class WatchSection(Section):
    """Settings of the monitor during training."""

    stall_after: PatienceText = Field(
        default="auto",
        description=(
            "a rank without progress for this long ends the run, e.g. `5 minutes`; auto: at least 30 s, and"
            " five times the longest duration of the phase so far"
        ),
    )
    digest_every: DurationText | None = Field(
        default="100 steps",
        description=(
            "a period: ranks that each hold the full model (ddp) compare a digest of their trained weights,"
            " and stop if one differs; null: never"
        ),
    )


_OF_GRPO = ("rewards", "rollout", "grpo")


class RunConfig(Section):
    """A complete config."""

    model: ModelSection
    adapter: AdapterSection | None = Field(
        default=AdapterSection(), description="null: all weights are trained (full fine-tuning)"
    )
    freeze: list[Pattern] = Field(
        default=[],
        description="with `adapter: null`: parameters with a matching name are not trained",
    )
    train_only: TrainOnlySection | None = Field(
        default=None, description="with `adapter: null`: the parts that are trained; null: all"
    )
    train_parts: Annotated[list[ModelPart], Field(min_length=1)] = Field(
        default=["language"],
        description=(
            "the parts of a vision-language model that are trained, with rows that have pictures. With an"
            " adapter, language and vision get it on their linear layers, and the projector between them is"
            " trained in full; with `adapter: null` all are, and `freeze` and `train_only` apply inside"
        ),
    )
    data: DataSection
    objective: Objective | OwnObjective = Field(
        default="sft",
        description=OBJECTIVES_TEXT,
    )
    preference: PreferenceSection = Field(
        default=PreferenceSection(),
        description="settings of dpo, kto, orpo and simpo; each objective accepts only the keys that it uses",
    )
    rewards: list[RewardSection] = Field(
        default=[], description="with `objective: grpo`: the rewards of answers, which are added up"
    )
    rollout: RolloutSection = Field(
        default=RolloutSection(), description="with `objective: grpo`: how answers are sampled"
    )
    grpo: GrpoSection = Field(
        default=GrpoSection(), description="with `objective: grpo`: the loss on sampled answers"
    )
    classify: ClassifySection = Field(
        default=ClassifySection(),
        description="with `objective: classify`: the labels, and how they count",
    )
    embed: EmbedSection = Field(
        default=EmbedSection(),
        description="with `objective: embed`: the embeddings, and the loss that compares them",
    )
    diffusion: DiffusionSection = Field(
        default=DiffusionSection(),
        description="settings of `objective: diffusion`, which no other objective accepts",
    )
    optim: OptimSection = OptimSection()
    duration: DurationText = Field(default="3 epochs", description="length of the run")
    batch: BatchSection = BatchSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    parallel: ParallelSection = ParallelSection()
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the first visible accelerator, else the CPU"
    )
    memory: MemorySection = MemorySection()
    watch: WatchSection = WatchSection()
    restarts: int = Field(
        default=2, ge=0, le=100, description="how many times a failed run restarts automatically"
    )
    grace: SecondsText = Field(
        default="25 seconds", description="time from SIGTERM to the exit, including a checkpoint"
    )
    reasons: dict[str, str] = Field(
        default={},
        description=(
            "why an environment variable was set by hand, by name; recorded in plan.json with its value"
        ),
    )
    track: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(
        default=[],
        description=(
            "trackers for metrics besides metrics.jsonl; each needs the package of its name;"
            " wandb and swanlab are configured by their own environment variables"
        ),
    )
    deterministic: bool = Field(
        default=False, description="bit-exact results on GPUs, too; on CPUs results are always bit-exact"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="seed of the split, the order, dropout and new weights"
    )
    output_dir: Annotated[str, NamesFile(is_output=True)] = Field(
        min_length=1, description="the directory to which the run writes everything"
    )

    @property
    def best_metric(self) -> str:
        """The metric of evaluations by which steps are compared."""
        return self.checkpoint.best or ("reward" if self.objective == GRPO else "eval_loss")

    @property
    def trains_head(self) -> bool:
        """Whether the model gives values of rows, by a head that is trained."""
        return self.objective in HEADS

    @property
    def uses_logits(self) -> bool:
        """Whether the loss is one of the logits of tokens."""
        return not self.trains_head and self.objective != EMBED

    @property
    def rows_per_step(self) -> int:
        """Rows of a global batch: sequences, or the prompts of its answers."""
        return self.batch.global_ // (self.rollout.group if self.objective == GRPO else 1)

    @model_validator(mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("model"), str):
            return {**value, "model": {"path": value["model"]}}
        return value

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        problems = contradictions(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """The values, of `preference` and `diffusion` only those that the objective uses, so that a
        written config can be read again.
        """
        values: dict[str, Any] = dump(self)
        used = keys_of(self.objective)
        if "preference" in values:
            values["preference"] = {key: value for key, value in values["preference"].items() if key in used}
            if not used:
                del values["preference"]
        if self.objective != GRPO:
            values = {key: value for key, value in values.items() if key not in _OF_GRPO}
        if self.objective != CLASSIFY:
            values.pop("classify", None)
        if self.objective != EMBED:
            values.pop("embed", None)
        if self.objective != DIFFUSION:
            values.pop("diffusion", None)
            if isinstance(values.get("data"), dict):
                values["data"].pop("resolution", None)
        return values


def contradictions(config: RunConfig) -> list[str]:
    """Keys that contradict each other, each as `key: problem; remedy` on one line."""
    batch, set_in_batch = config.batch, config.batch.model_fields_set
    has_adapter, has_eval = config.adapter is not None, has_evaluation(config.data)
    micro, global_batch = config.batch.micro, config.batch.global_
    optimizer = optimizer_named(config.optim.kind)
    shards = config.parallel.strategy == "fsdp"
    rules = [
        (
            batch.per_rank is not None and "global_" in set_in_batch,
            "batch.per_rank: `global` already sets the number of sequences per step; remove one of them",
        ),
        (
            batch.per_rank is not None and micro != "auto",
            "batch.micro: `per_rank` already sets the number of sequences per forward; remove one of them",
        ),
        (
            batch.per_rank is None and batch.accumulate is not None,
            (
                "batch.accumulate: it counts forwards of `per_rank` sequences; set `batch.per_rank`, or"
                " remove it"
            ),
        ),
        (
            micro != "auto" and batch.per_rank is None and global_batch % micro != 0,
            (
                f"batch.micro: {micro} does not divide the global batch of {global_batch} sequences; "
                f"set batch.micro to {_divisors(global_batch)}"
            ),
        ),
        (
            has_adapter and set(config.train_parts) == {"projector"},
            "train_parts: the projector is trained in full, and nothing is left for the adapter; set `adapter: null`",
        ),
        (
            len(set(config.train_parts)) < len(config.train_parts),
            "train_parts: a part is named twice; name it once",
        ),
        (
            not config.optim.part_lr.keys() <= set(config.train_parts),
            (
                "optim.part_lr: it has a part that is not trained; remove"
                f" {', '.join(sorted(config.optim.part_lr.keys() - set(config.train_parts)))}, or add it to"
                " `train_parts`"
            ),
        ),
        (
            bool(config.optim.part_lr) and config.optim.kind == "muon",
            "optim.part_lr: Muon has one learning rate for all matrices; set `optim.kind: adamw`, or remove it",
        ),
        *(
            (
                optimizer.has_one_rate and is_set,
                (
                    f"{key}: {config.optim.kind} finds one learning rate for all parameters; set `optim.kind:"
                    " adamw`, or remove it"
                ),
            )
            for key, is_set in (
                ("optim.part_lr", bool(config.optim.part_lr)),
                ("optim.lora_b_ratio", config.optim.lora_b_ratio != 1),
                ("diffusion.text_lr", config.diffusion.text_lr not in (None, config.optim.lr)),
            )
        ),
        (
            has_adapter and bool(config.freeze),
            "freeze: an adapter already freezes the model; remove `freeze`, or set `adapter: null`",
        ),
        (
            config.adapter is not None
            and config.adapter.init == "pissa"
            and config.adapter.from_ is not None,
            (
                "adapter.init: pissa creates new weights, and `adapter.from` continues with those of another"
                " adapter; remove one of them"
            ),
        ),
        (
            config.adapter is not None
            and config.adapter.init == "pissa"
            and config.adapter.kind not in ("lora", "rslora"),
            "adapter.init: pissa needs `kind: lora` or `rslora`",
        ),
        *(
            (
                config.adapter is not None and not config.adapter.is_of_pairs and is_set,
                f"{key}: it is for adapters with matrices A and B; set `adapter.kind: lora`, or remove it",
            )
            for key, is_set in (
                ("adapter.dropout", config.adapter is not None and config.adapter.dropout != 0),
                ("adapter.from", config.adapter is not None and config.adapter.from_ is not None),
                ("adapter.merge", config.adapter is not None and bool(config.adapter.merge)),
                ("optim.lora_b_ratio", config.optim.lora_b_ratio != 1),
                ("model.quantize", config.model.quantize is not None),
            )
        ),
        (
            config.adapter is not None and not config.adapter.is_of_pairs and shards,
            (
                "parallel.strategy: fsdp does not shard the matrices of this adapter; set `parallel.strategy:"
                " ddp`, or `adapter.kind: lora`"
            ),
        ),
        (
            has_adapter and config.train_only is not None,
            "train_only: an adapter already freezes the model; remove `train_only`, or set `adapter: null`",
        ),
        (
            config.train_only is not None and config.train_only.spread and config.train_only.layers < 1,
            "train_only.spread: it needs a number of layers; set `train_only.layers` to 1 or more",
        ),
        (
            config.train_only is not None and bool(config.freeze),
            "train_only: `freeze` also selects the trained parameters; remove one of them",
        ),
        (
            has_adapter and not optimizer.trains_adapters,
            (
                f"optim.kind: {config.optim.kind} orthogonalizes the updates of full matrices, and those of an"
                " adapter are products of two thin ones; set `optim.kind: adamw`, or `adapter: null`"
            ),
        ),
        (
            not has_adapter and config.optim.lora_b_ratio != 1,
            (
                "optim.lora_b_ratio: there are no B matrices without an adapter; set `adapter: {kind: lora}`,"
                " or remove it"
            ),
        ),
        (
            shards and bool(optimizer.needs_full),
            (
                f"parallel.strategy: {optimizer.needs_full}, but fsdp shards them; set `parallel.strategy:"
                " ddp`, or `optim.kind: adamw`"
            ),
        ),
        (
            config.checkpoint.best is not None and not has_eval,
            "checkpoint.best: there is no evaluation data to measure the best checkpoint; set `data.eval`",
        ),
        (
            config.eval.stop_after is not None and not has_eval,
            "eval.stop_after: there is no evaluation data; set `data.eval`",
        ),
        (
            config.data.thoughts != "loss" and lf_name(config.data.template) is not None,
            "data.thoughts: templates of LLaMA-Factory write thoughts as `data.thinking` says; remove it",
        ),
        *(
            (
                getattr(config.data, key) != DataSection.model_fields[key].default
                and lf_name(config.data.template) is None,
                (
                    f"data.{key}: only templates of LLaMA-Factory use it; set `data.template: lf:NAME`, or"
                    " remove it"
                ),
            )
            for key in ("thinking", "date", "system")
        ),
    ]
    problems = [text for is_wrong, text in rules if is_wrong] + _quantization_contradictions(config)
    return (
        problems
        + _objective_contradictions(config)
        + _grpo_contradictions(config)
        + _metric_contradictions(config)
        + _row_contradictions(config)
        + _source_contradictions(config.data)
        + _picture_contradictions(config)
    )


def _picture_contradictions(config: RunConfig) -> list[str]:
    """The keys of pictures that contradict each other."""
    data, adapter, section = config.data, config.adapter, config.diffusion
    if config.objective != DIFFUSION:
        return []
    sources = [entry for value in (data.train, data.eval) if isinstance(value, list) for entry in value]
    periods = ("duration", "eval.every", "checkpoint.every", "checkpoint.keep_every", "watch.digest_every")
    rules = [
        (
            text is not None and Duration.parse(text).unit == "tokens",
            f"{key}: pictures have no tokens; write it in steps or epochs",
        )
        for key, text in ((key, attrgetter(key)(config)) for key in periods)
    ]
    rules += [
        (
            any(not isinstance(entry, str) and not _is_folder(entry) for entry in sources),
            "data.train: a source of pictures is a folder, with a whole number as weight; remove its other keys",
        ),
        (
            adapter is not None
            and isinstance(adapter.targets, str)
            and adapter.targets not in get_args(TargetWord),
            "adapter.targets: it names parts of language models; set it to `unet` or `unet+text`",
        ),
        (
            section.text_lr is not None and (adapter is None or adapter.targets != "unet+text"),
            (
                "diffusion.text_lr: the text encoders are not trained; set `adapter.targets: unet+text`, or"
                " remove it"
            ),
        ),
    ]
    return [text for is_wrong, text in rules if is_wrong]


def _is_folder(source: SourceSection) -> bool:
    """Whether a source has only what a folder of pictures can have; a written config has all keys,
    most at their defaults.
    """
    others = set(SourceSection.model_fields) - {"path", "weight", "pictures"}
    is_plain = all(getattr(source, key) == SourceSection.model_fields[key].default for key in others)
    return is_plain and source.weight == int(source.weight)


def _quantization_contradictions(config: RunConfig) -> list[str]:
    """The keys that do not go with quantized weights."""
    kind, adapter = config.model.quantize, config.adapter
    embeddings = config.model.quantize_embeddings
    if kind is None:
        alone = "embeddings are quantized only if the linear layers are"
        return (
            [f"model.quantize_embeddings: {alone}; set `model.quantize: nf4`, or remove it"]
            if embeddings
            else []
        )
    if adapter is None:
        return [
            f"model.quantize: {kind} weights cannot be trained themselves; set `adapter: {{kind: lora}}`, or"
            " `model.quantize: null`"
        ]
    changed = "it changes the base weights, whose quantized form would no longer be that of the model's files"
    rules = [
        (
            adapter.init == "pissa",
            f"adapter.init: {changed}; set `adapter.init: default`, or `model.quantize: null`",
        ),
        (
            embeddings and config.model.resize_vocabulary,
            (
                "model.resize_vocabulary: it trains embedding and head, which are quantized; set"
                " `model.quantize_embeddings: false`, or remove it"
            ),
        ),
        (
            bool(adapter.merge),
            (
                f"adapter.merge: {changed}; merge them with `unisono export --merge` first, or set"
                " `model.quantize: null`"
            ),
        ),
    ]
    return [text for is_wrong, text in rules if is_wrong]


def _unused_keys(config: RunConfig) -> list[str]:
    """The keys of other objectives, with their names."""
    objective, data, used = config.objective, config.data, keys_of(config.objective)
    unused = {
        f"preference.{key}": [name for name, keys in USED.items() if key in keys]
        for key in sorted(config.preference.model_fields_set - set(used))
    }
    if objective != DIFFUSION:
        of_pictures = [f"diffusion.{key}" for key in sorted(config.diffusion.model_fields_set)]
        of_pictures += ["data.resolution"] * (data.resolution is not None)
        of_pictures += [f"{key}.pictures" for key, source in sources_of(data) if source.pictures is not None]
        unused |= {key: [DIFFUSION] for key in of_pictures}
    if objective != GRPO:
        sections = {"rollout": config.rollout, "grpo": config.grpo}
        of_grpo = [f"{name}.{key}" for name, one in sections.items() for key in sorted(one.model_fields_set)]
        unused |= {key: [GRPO] for key in (*of_grpo, *(["rewards"] if config.rewards else []))}
    if objective != CLASSIFY:
        unused |= {f"classify.{key}": [CLASSIFY] for key in sorted(config.classify.model_fields_set)}
    if objective != EMBED:
        unused |= {f"embed.{key}": [EMBED] for key in sorted(config.embed.model_fields_set)}
    why = f"it uses {', '.join(used)}" if used else ""
    problems = []
    for key, names in unused.items():
        what, fix = (
            f"{key}: objective {objective} does not use it",
            f"remove it (accepted by: {', '.join(names)})",
        )
        problems.append("; ".join((what, why, fix) if why and key.startswith("preference") else (what, fix)))
    return problems


def _objective_contradictions(config: RunConfig) -> list[str]:
    """The keys that the objective does not take, or that do not go with each other."""
    objective, data, section = config.objective, config.data, config.preference
    is_dft, template = config.optim.loss_weight != "uniform", lf_name(data.template)
    keeps_answer = data.too_long == "keep-answer"
    rules = [
        (
            objective == "dpo" and section.loss != "sigmoid" and section.label_smoothing > 0,
            (
                f"preference.label_smoothing: {section.loss} has none; set `preference.loss:"
                " sigmoid`, or remove it"
            ),
        ),
        (
            section.reference != "auto" and config.model.weights == "random",
            (
                "preference.reference: random weights have nothing in common with another model; set it to"
                " auto, or use trained weights"
            ),
        ),
        (
            keeps_answer and template is not None,
            (
                f"data.too_long: {data.template} cuts prompt and answer as LLaMA-Factory does; set it to"
                " balanced"
            ),
        ),
        (
            keeps_answer and (objective == "pretrain" or data.loss_on == "all"),
            (
                "data.too_long: every token counts in the loss, so there is no prompt to cut; set it to"
                " split, cut or drop"
            ),
        ),
        (
            is_dft and config.optim.label_smoothing > 0,
            "optim.loss_weight: dft has no label smoothing; remove one of them",
        ),
    ]
    return (
        [text for is_wrong, text in rules if is_wrong]
        + _unused_keys(config)
        + refused_values(config, objective)
    )


def _grpo_contradictions(config: RunConfig) -> list[str]:
    if config.objective != GRPO:
        return []
    adapter, template = config.adapter, lf_name(config.data.template)
    rules = [
        (
            config.batch.per_rank is not None,
            "batch.per_rank: answers of a step are counted over all ranks; set `batch.global` instead",
        ),
        (
            Duration.parse(config.duration).unit == "tokens",
            "duration: how long answers will be is not known; write it in steps or epochs",
        ),
        (template is not None, "data.template: prompts have chat templates; set it to a file, or null"),
    ]
    return (
        [text for is_wrong, text in rules if is_wrong]
        + grpo_contradictions(
            config.rewards,
            config.rollout,
            answers=config.batch.global_,
            max_length=config.data.max_length,
            section=config.grpo,
        )
        + server_contradictions(
            config.rollout,
            adapter_kind=None if adapter is None else adapter.kind,
            has_whole_modules=adapter is not None and bool(adapter.modules_to_save),
        )
    )


def _metric_contradictions(config: RunConfig) -> list[str]:
    names, best = function_names(config.eval.metrics), config.checkpoint.best
    problems = [
        f"eval.metrics.{number}: the name {name} is taken by a figure of evaluations; rename the function"
        for number, name in enumerate(names)
        if name in _TAKEN_NAMES
    ]
    known = words_in(CheckpointSection.model_fields["best"].annotation)
    if best is not None and best not in (*known, *names):
        listed = ", ".join(f"`{name}`" for name in [*known, *names])
        problems.append(
            f"checkpoint.best: {one_line(best, limit=60)} is not a metric of this run; set it to {listed}"
        )
    if names and not has_evaluation(config.data):
        problems.append("eval.metrics: there is no evaluation data; set `data.eval`")
    for number, metric in enumerate(config.eval.metrics):
        problems += function_contradictions(metric, f"eval.metrics.{number}")
    return problems


_TAKEN_NAMES = ("loss", "exact_match", "perplexity")


def _row_contradictions(config: RunConfig) -> list[str]:
    section, template = config.classify, lf_name(config.data.template)
    if config.objective not in (CLASSIFY, EMBED):
        return []
    columns = (
        "{text: NAME, label: NAME}" if config.objective == CLASSIFY else "{anchor: NAME, positive: NAME}"
    )
    weights, labels = section.class_weights, section.labels
    unknown = sorted({*weights} - {*labels}) if isinstance(weights, dict) and labels is not None else []
    formats = {source.format for _, source in sources_of(config.data)}
    rules = [
        (
            bool(unknown),
            f"classify.class_weights: {', '.join(unknown)} is not in `classify.labels`; add it there, or remove it",
        ),
        (
            labels is not None and len(labels) < 2 and section.multi_label is False,
            "classify.labels: one label alone is always right; add another, or set `classify.multi_label: true`",
        ),
        (
            bool(template),
            "data.template: templates of LLaMA-Factory are for answers; set it to a file, or null",
        ),
        (
            formats != {"auto"},
            (
                f"data.format: rows of objective {config.objective} have one format; remove it, and set the"
                f" source's columns: {columns} if no column has a usual name"
            ),
        ),
    ]
    return [text for is_wrong, text in rules if is_wrong]


_FORMATS_WITH_TAGS = ("sharegpt", "openai", "preference")


def _source_contradictions(data: DataSection) -> list[str]:
    """The contradictions within the sources, and between them and `data.mix`."""
    mix, takes_turns = data.mix, data.mix.strategy != "concat"
    count = len(data.train) if isinstance(data.train, list) else 1
    given = [] if mix.probabilities is None else mix.probabilities
    rules = [
        (
            bool(given) and not takes_turns,
            (
                "data.mix.probabilities: concat takes all rows; set `data.mix.strategy` to interleave_under,"
                " interleave_over or interleave_once"
            ),
        ),
        (
            mix.probabilities is not None and len(given) != count,
            (
                f"data.mix.probabilities: {len(given)} probabilities for {count} sources; set one for each"
                " source of data.train"
            ),
        ),
        (
            bool(given) and abs(sum(given) - 1) > _ROUNDING,
            f"data.mix.probabilities: they sum to {sum(given):g}; make them sum to 1",
        ),
    ]
    for key, source in sources_of(data):
        rules += _rules_of_source(source, key, data)
    return [text for is_wrong, text in rules if is_wrong]


def _rules_of_source(source: SourceSection, key: str, data: DataSection) -> list[tuple[bool, str]]:
    weighted, is_eval = source.weight != 1.0, key.startswith("data.eval")
    pictures = source.pictures or PicturesSection()
    return [
        (
            is_eval and (pictures.prior or pictures.eval > 0),
            f"{key}.pictures: all pictures of data.eval are for evaluation; remove prior and eval",
        ),
        (
            pictures.prior and pictures.eval > 0,
            f"{key}.pictures.eval: regularization pictures are not evaluated; remove it",
        ),
        (
            pictures.eval > 0 and isinstance(data.eval, float | int),
            f"{key}.pictures.eval: data.eval already takes a share of all sources; remove one of them",
        ),
        (
            weighted and is_eval,
            f"{key}.weight: evaluation takes each row once; remove it",
        ),
        (
            weighted and source.samples is not None,
            f"{key}.weight: `samples` already sets the number of rows; remove one of them",
        ),
        (
            weighted and not is_eval and data.mix.strategy != "concat",
            (
                f"{key}.weight: {data.mix.strategy} already sets how often rows occur; remove it, or set"
                " `data.mix.strategy: concat`"
            ),
        ),
        (
            source.tags is not None and source.format not in _FORMATS_WITH_TAGS,
            (
                f"{key}.tags: only {', '.join(_FORMATS_WITH_TAGS)} rows have tags; set `format: sharegpt` in"
                " this source"
            ),
        ),
    ]


def _divisors(number: int) -> str:
    """The divisors of `number`, e.g. `1, 2, 4 or 8`; the first twelve."""
    *others, last = [str(n) for n in range(1, number + 1) if number % n == 0][:12]
    return f"{', '.join(others)} or {last}" if others else last


# ---- the digest by which two configs are the same run

# Moving, extending, monitoring or restarting a run differently does not make it a different run.
_NOT_THE_RUN = {"output_dir", "duration", "restarts", "grace", "reasons", "track", "parallel", "watch"}


def deciding_keys(config: RunConfig) -> dict[str, Any]:
    """The part of a config that identifies the run: all but output_dir, duration, restarts, grace,
    reasons, track, parallel and watch.
    """
    return config.model_dump(mode="json", by_alias=True, exclude=_NOT_THE_RUN)


def config_digest(config: RunConfig) -> str:
    """A hex digest of the deciding keys."""
    return hashlib.sha256(json.dumps(deciding_keys(config), sort_keys=True).encode()).hexdigest()[:32]
