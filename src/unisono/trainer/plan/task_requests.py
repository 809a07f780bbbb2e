"""What fronts request of the trainer's tasks, and what these give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NotRequired, TypedDict

from unisono.guard.supervise.task_requests import TaskRequest
from unisono.trainer.config.answer_functions import MetricSection
from unisono.trainer.config.rollout_sections import RewardSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import Thinking


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """What to load.

    Attributes:
        target: RUN|MODEL.
        step: of a checkpoint of the run; None: its result.
        base: the base model of an adapter, instead of the one that it names.
        merged: adapters that are merged into the base model before this one is put on it.
        template: `lf:NAME`, a template of LLaMA-Factory, instead of the one that it was trained
            with.
        thinking: as data.thinking, for such a template.
        default_system: as data.system, for such a template.
    """

    target: str
    step: int | None = None
    base: str | None = None
    merged: tuple[str, ...] = ()
    template: str | None = None
    thinking: Thinking = None
    default_system: str | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are chosen.

    Attributes:
        temperature: 0 selects the most likely token, else the logits are divided by it.
        top_p: only the most likely tokens that together reach this probability can be sampled.
        top_k: only this many of the most likely tokens can be sampled; 0: all.
        min_p: only tokens with at least this share of the largest probability can be sampled.
        repetition_penalty: the logits of all tokens of prompt and answer so far are divided by it,
            or multiplied where negative (arXiv:1909.05858); 1: unchanged.
        presence_penalty: subtracted from the logits of all tokens that the answer has.
        frequency_penalty: subtracted from the logit of a token as often as the answer has it.
        logit_bias: tokens, and what is added to their logits.
        beams: above 1, with temperature 0: the most likely answer that a search with so many
            candidates finds.
        length_penalty: with beams: the exponent of an answer's length, by which its log-probability
            is divided.
        seed: of the random streams.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    beams: int = 1
    length_penalty: float = 1.0
    seed: int = 0


# ---- rows


class PreparedRun(TypedDict):
    """A DataSummary, and ModelFacts, as JSON."""

    data: Mapping[str, object]
    model: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PrepareRequest(TaskRequest[PreparedRun]):
    """The data and the model of a run are to be prepared.

    Attributes:
        output_dir: where data.json is written.
        limit_rows: rows to read of each source, for a rehearsal.
    """

    task: ClassVar = "prepare"
    config: RunConfig
    cache_dir: Path
    output_dir: str | None = None
    limit_rows: int | None = None


class InputDigests(TypedDict, total=False):
    """The files that a run would read on a node: label, bytes and digest of each.

    Attributes:
        note: files that cannot be read.
        parameters, linear_in_out: as in ModelFacts.
    """

    data_files: list[dict[str, str | int]]
    tokenizer_files: list[dict[str, str | int]]
    model_files: list[dict[str, str | int]]
    code: dict[str, str]
    note: str
    parameters: int | None
    linear_in_out: int | None


@dataclass(frozen=True, slots=True)
class ContentsRequest(TaskRequest[InputDigests]):
    """Digests of a run's files; the paths in its config are absolute."""

    task: ClassVar = "contents"
    config: RunConfig
    cache_dir: Path


class Survey(TypedDict):
    """What the rows of a source are.

    Attributes:
        rows: those that can be read, up to MOST_ROWS.
        bad: those that cannot.
        first_bad: the first of these, and why.
        format: of the rows.
        why: what shows it.
        columns: the file's column for each standard one, where it has another name.
        objective: whose rows they are: sft, dpo or kto.
        longest: tokens of the longest row, about.
        max_length: tokens, for all rows or almost all.
        beyond: rows that are longer.
        sequences: of one epoch.
    """

    rows: int
    bad: int
    first_bad: str
    format: str
    why: str
    columns: dict[str, str]
    objective: str
    longest: int
    max_length: int
    beyond: int
    sequences: int


@dataclass(frozen=True, slots=True)
class SurveyRequest(TaskRequest[Survey]):
    """A look at rows for which there is no config yet.

    Attributes:
        path: as in data.train.
        packed: whether rows will share sequences.
    """

    task: ClassVar = "survey"
    path: str
    packed: bool
    cache_dir: Path


class TokenRun(TypedDict):
    """Tokens with the same weight in the loss, and the text that they add."""

    loss: bool
    weight: float
    tokens: int
    text: str


class ShownRow(TypedDict, total=False):
    """A row, or a side of it.

    Attributes:
        runs: joined they give its text.
        ids: None for a token that the tokenizer does not have.
        loss: whether each of `ids` counts in the loss.
        chosen, rejected: of a pair, which has no tokens but these.
        kl: of a rated answer, the same prompt with another row's answer.
        not_rendered: its parts that are in no token.
        columns: of a prompt that the model answers, what rewards get beside it.
        pictures: its pictures in order, in words: name, size and tokens.
    """

    row: str
    tokens: int
    loss_tokens: int
    runs: list[TokenRun]
    ids: list[int | None]
    loss: list[bool]
    chosen: "ShownRow"
    rejected: "ShownRow"
    kl: "ShownRow"
    desirable: bool
    not_rendered: list[str]
    columns: dict[str, object]
    pictures: list[str]


class LengthClass(TypedDict):
    """The number of rows that have `first` to `last` tokens."""

    first: int
    last: int
    rows: int


class SourceCountsJson(TypedDict):
    """The ledger of a source of rows."""

    path: str
    rows: int
    used: int
    cut: int
    split: int
    not_rendered: int
    dropped: dict[str, int]
    bad: int
    eval: int
    tokens_cut: int


class LedgerCounts(TypedDict):
    """The ledger of all sources."""

    sources: list[SourceCountsJson]
    total: Mapping[str, object]


class RowNote(TypedDict):
    """A row that was dropped or changed."""

    file: str
    line: int
    what: str
    why: str


class Preview(TypedDict):
    """Rows as the model sees them.

    Attributes:
        data: a DataSummary as JSON.
        lengths: of the training rows; of two sides, both.
        notes: the first rows that were dropped or changed.
    """

    data: Mapping[str, object]
    rows: list[ShownRow]
    lengths: list[LengthClass]
    ledger: LedgerCounts
    notes: list[RowNote]


@dataclass(frozen=True, slots=True)
class PreviewRequest(TaskRequest[Preview]):
    """The first `rows` rows of a config are to be shown, with token ids if `ids`."""

    task: ClassVar = "preview"
    config: RunConfig
    cache_dir: Path
    rows: int
    ids: bool = False


# ---- answers


class GeneratedText(TypedDict):
    """The answer to a prompt.

    Attributes:
        where: the row of the prompt; empty for the command line.
        ended: stop or length.
    """

    where: str
    prompt: str | Sequence[Mapping[str, object]]
    answer: str
    tokens: int
    ended: str


class Generated(TypedDict):
    """The answers to all prompts."""

    description: str
    answers: list[GeneratedText]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(TaskRequest[Generated]):
    """Answers to a prompt, or to those of a file.

    Attributes:
        raw: whether to continue texts without a chat template.
        max_tokens: None: 256, or what the model has room for.
        stop: texts before which an answer ends.
        images: files of pictures of the prompt.
    """

    task: ClassVar = "generate"
    model: RequestedModel
    prompt: str | None = None
    file: str | None = None
    system: str | None = None
    raw: bool = False
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest:
    """A conversation over stdin."""

    model: RequestedModel
    system: str | None
    max_tokens: int
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter of a model that is served under a name of its own; `target`: RUN|MODEL."""

    name: str
    target: str


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Answers to requests from stdin, `rows` of them computed together.

    Attributes:
        adapters: of the model, which must be a base model then.
        takes_adapters: whether adapters may come later, too.
        prompt_cache_bytes: of memory for keys and values of earlier prompts.
        answers: whether the model has to write answers, so that others are refused.
    """

    model: RequestedModel
    rows: int
    adapters: tuple[NamedAdapter, ...] = ()
    takes_adapters: bool = False
    prompt_cache_bytes: int = 0
    answers: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether adapters share the model, which writes answers then."""
        return bool(self.adapters) or self.takes_adapters


class Drawn(TypedDict):
    """The files of drawn pictures."""

    description: str
    files: list[str]
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest(TaskRequest[Drawn]):
    """Pictures of an image model.

    Attributes:
        target: RUN|MODEL.
        negative: what pictures should not show.
        out: a directory.
        number: of pictures, with the seeds from `seed` on.
        width, height: None: as trained.
        tokenizer, prediction: of a whole model in one file.
    """

    task: ClassVar = "draw"
    target: str
    step: int | None = None
    prompt: str
    negative: str | None = None
    out: Path
    number: int = 1
    seed: int = 0
    steps: int = 30
    guidance: float = 7.5
    width: int | None = None
    height: int | None = None
    tokenizer: str | None = None
    prediction: str | None = None


class LabelFigures(TypedDict):
    """How a classifier does on one label.

    Attributes:
        rows, predicted, right: rows that have the label, that the model gives it to, and of these
            the right ones.
    """

    label: str
    rows: int
    predicted: int
    right: int
    precision: float
    recall: float
    f1: float


class Evaluated(TypedDict):
    """Loss and scores on the rows of a file.

    Attributes:
        figures: by name.
        rows: the answers, or the figures of each row.
        labels: of a classifier the figures of each label.
        ledger, formats: as in DataSummary.
    """

    description: str
    figures: dict[str, float | None]
    rows: list[Mapping[str, object]]
    labels: NotRequired[list[LabelFigures]]
    ledger: dict[str, int]
    formats: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRequest(TaskRequest[Evaluated]):
    """Loss and scores on the rows of a file.

    Attributes:
        limit: only the first rows.
        each: whether a preference run gives the figures of each row.
        metrics: of answers; empty: those of the run.
        trust_code: execute functions of the user's own files.
    """

    task: ClassVar = "eval"
    model: RequestedModel
    data: str
    cache_dir: Path
    limit: int | None = None
    each: bool = False
    metrics: tuple[MetricSection, ...] = ()
    trust_code: bool = False


class TasksEvaluated(TypedDict):
    """Benchmarks of lm-eval.

    Attributes:
        figures: of each task, by name.
        results: as lm-eval writes them.
        samples: each question with the answer and its figures; empty: not requested.
    """

    description: str
    figures: dict[str, dict[str, float]]
    results: Mapping[str, object]
    samples: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateTasksRequest(TaskRequest[TasksEvaluated]):
    """Benchmarks of lm-eval.

    Attributes:
        tasks: names of its tasks, or task files.
        shots: examples before each question; None: as each task has it.
        limit: only the first questions of each task.
        chat: whether questions are written in the chat template.
        samples: whether each question with its answer is wanted.
        trust_code: read task files, which can have code, and run tasks that execute answers.
    """

    task: ClassVar = "eval_tasks"
    model: RequestedModel
    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    chat: bool = False
    samples: bool = False
    trust_code: bool = False


class RewardsEvaluated(TypedDict):
    """Rewards of answers to held-out prompts.

    Attributes:
        source: of the prompts, for people.
        samples: answers to each prompt.
        temperature: of the sampling; 0: the most likely answer.
        threshold: least reward of an answer that passes.
        figures: by name.
        rows: the answers.
        ledger, formats: as in DataSummary.
    """

    description: str
    source: str
    samples: int
    temperature: float
    threshold: float
    figures: dict[str, float | None]
    rows: list[Mapping[str, object]]
    ledger: dict[str, int]
    formats: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRewardsRequest(TaskRequest[RewardsEvaluated]):
    """Rewards of answers to held-out prompts.

    Attributes:
        data: the file of the prompts; None: those that the run holds out.
        rewards: instead of those of the run.
        samples: answers to each prompt.
        threshold: least reward of an answer that passes.
        temperature: None: that of the run's rollouts, and 0 for a single answer.
        max_tokens: of an answer; None: as many as in the run.
        limit: only the first prompts.
        trust_code: execute functions of the user's own files.
    """

    task: ClassVar = "eval_rewards"
    model: RequestedModel
    data: str | None
    cache_dir: Path
    rewards: tuple[RewardSection, ...] = ()
    samples: int = 1
    threshold: float = 1.0
    temperature: float | None = None
    max_tokens: int | None = None
    limit: int | None = None
    trust_code: bool = False


class Predicted(TypedDict):
    """Answers to the rows of a LLaMA-Factory file.

    Attributes:
        rouge: "LLaMA-Factory's" or "ours".
        figures: as in predict_results.json.
    """

    description: str
    rouge: str
    out: str
    files: list[str]
    rows: int
    figures: dict[str, float]
    ledger: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictRequest(TaskRequest[Predicted]):
    """Answers to the rows of a LLaMA-Factory file, written to `out`."""

    task: ClassVar = "predict"
    model: RequestedModel
    config: RunConfig
    cache_dir: Path
    max_tokens: int
    sampling: SamplingParams
    skip_special_tokens: bool
    out: str


# ---- files of models


class ReadBackJson(TypedDict):
    """How written files compare with the model that they are of; see `task.read_back.ReadBack`."""

    compared: str
    why: str
    differs_by: float | None
    tolerance: float


class ResultComparison(ReadBackJson):
    """How the result of a run compares with the trained model."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReadBackRequest:
    """The result of a run is to be loaded again."""

    output_dir: Path


class _Written(TypedDict):
    out: str
    what: str
    description: str
    base: str
    files: list[str]
    bytes: int
    read_back: ReadBackJson | None


class MergeFigures(TypedDict, total=False):
    """How a merged model compares with base plus adapter."""

    dtype: str
    logits_differ_by: float
    dequantized: bool


class Exported(_Written, MergeFigures):
    """A written model, adapter or LoRA file; `base` is empty where it is not known.

    Attributes:
        reward: whether it is a reward model.
        labels: of a classifier, in the order of its outputs.
        embeds: whether it is an embedding model.
        multimodal: whether its class has vision or audio parts.
        pictures, format, file: of the LoRA of an image model.
    """

    merged: bool
    reward: bool
    labels: list[str]
    embeds: NotRequired[bool]
    multimodal: NotRequired[bool]
    pictures: NotRequired[bool]
    format: NotRequired[str]
    file: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest(TaskRequest[Exported]):
    """A model, an adapter or a LoRA is to be written for other libraries.

    Attributes:
        format: of a LoRA of an image model: diffusers (None) or kohya.
        half: whether a LoRA of kohya is written in float16.
    """

    task: ClassVar = "export"
    model: RequestedModel
    out: str
    merge: bool = False
    read_back: bool = True
    max_shard_size: str | None = None
    format: str | None = None
    half: bool = False


class ConvertedJson(TypedDict):
    """Tensors that llama.cpp's converter has written: how many are those of the model, and names of
    those that it has joined, split or computed.
    """

    equal: int
    others: list[str]


class GgufExported(_Written):
    """A written GGUF file; `differs_by`: of a quantized tensor, at most."""

    file: str
    architecture: str
    dtype: str
    differs_by: float
    has_template: bool
    converted: ConvertedJson | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRequest(TaskRequest[GgufExported]):
    """A model, or an adapter alone, is to be written as GGUF.

    Attributes:
        quantize: f32, f16, bf16, or a type of llama.cpp, for which `tool` is the path of
            llama-quantize.
        converter: the path of llama.cpp's convert_hf_to_gguf.py, which is to write the file.
    """

    task: ClassVar = "gguf"
    model: RequestedModel
    out: str
    quantize: str
    adapter: bool = False
    tool: str | None = None
    converter: str | None = None
    read_back: bool = True


# ---- checkpoints


@dataclass(frozen=True, slots=True)
class RehearsedRequest:
    """The first checkpoint of a run is to be read back."""

    path: Path
    run_id: str


class NewestCopy(TypedDict):
    """A complete copy, and the text of its manifest; all None: there is none."""

    run_id: str | None
    step: int | None
    manifest: str | None


class Timed(TypedDict):
    """How long it took."""

    seconds: float


class Fetched(Timed):
    """How much was fetched."""

    bytes: int


class Uploaded(Fetched):
    """How much was uploaded; `deleted`: steps; `pruned`: whether it was gone here."""

    checksum: str
    deleted: list[int]
    pruned: bool


class CopyRead(Fetched):
    """How much was read; `steps`: all complete copies; `free_bytes`: None: unknown."""

    steps: list[int]
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TryStorage:
    """All operations of an upload are to be tried."""

    action: Literal["try"] = "try"
    url: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCopy(TaskRequest[NewestCopy]):
    """The newest copy of a run, or of the newest run, before a step is wanted."""

    task: ClassVar = "storage"
    action: Literal["look"] = "look"
    url: str
    run_id: str | None
    before: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCheckpoint:
    """A checkpoint is to be copied.

    Attributes:
        best: the metric by which the best stays.
        beside: the run's directory.
    """

    action: Literal["upload"] = "upload"
    url: str
    run_id: str
    path: Path
    keep: int
    keep_every: int | None
    best: str | None
    beside: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCopy(TaskRequest[Fetched]):
    """A copy is to be fetched to one directory, and the run's other files to another."""

    task: ClassVar = "storage"
    action: Literal["fetch"] = "fetch"
    url: str
    run_id: str
    step: int
    to: Path
    beside: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCopy:
    """A copy is to be read back; `checksum`: of its manifest."""

    action: Literal["read_back"] = "read_back"
    url: str
    run_id: str
    step: int
    checksum: str


StorageRequest = TryStorage | FindCopy | UploadCheckpoint | FetchCopy | ReadCopy
