"""The section `data` of a config, its sources and how they are mixed."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from unisono.base.text import nearest, one_line
from unisono.trainer.config.sections import (
    BytesText,
    DateText,
    FramesSection,
    HostText,
    NamesFile,
    PicturesSection,
    PixelsSection,
    Positive,
    Resolution,
    Section,
    Thinking,
    float_of_yaml,
)
from unisono.trainer.config.yaml_file import Takes

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
        default={}, description="mapping from our column names to the file's; null: not read"
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
    plain_texts: bool = Field(
        default=False,
        description=(
            "`prompt` and its answers, where they are texts and not messages, are tokenized as they are, one"
            " behind the other, as in TRL; false: they are turns of the chat template"
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
