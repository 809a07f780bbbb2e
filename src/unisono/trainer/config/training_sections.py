"""The sections of a config that say how a run is trained, evaluated, saved and watched."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from unisono.trainer.config.answer_functions import MetricSection
from unisono.trainer.config.model_sections import ModelPart
from unisono.trainer.config.optimizers import OPTIMIZERS, optimizer_named
from unisono.trainer.config.schedules import SCHEDULES, schedule_named
from unisono.trainer.config.sections import (
    BytesText,
    DurationText,
    NotNegative,
    PatienceText,
    Positive,
    Section,
    Share,
    StorageText,
    WarmupText,
    float_of_yaml,
)
from unisono.trainer.config.yaml_file import Takes


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
    Takes(f"{_names(OPTIMIZERS)} or a class in your own file, `FILE.py:CLASS`", tuple(OPTIMIZERS)),
]
OptionValue = Annotated[bool | int | float | str | list[int | float] | None, BeforeValidator(float_of_yaml)]


class RouterLossSection(Section):
    """Losses of the routers of a mixture of experts, over all tokens of a step; they are added to
    the objective's loss. eval_loss excludes them.
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


class OptimSection(Section):
    """The optimizer and its learning rate."""

    kind: OptimizerName = Field(
        default="adamw",
        description=(
            "muon: Muon for matrices, AdamW for the rest (with full fine-tuning or pretraining); adamw_8bit,"
            " lion_8bit: state in 8 bits; paged: state in memory that a GPU pages to the host; prodigy: finds"
            " the learning rate, of which `lr` is a factor; schedule_free: averages weights, for `schedule:"
            " constant`; FILE.py:CLASS: your own torch.optim.Optimizer, with `--trust-code`"
        ),
    )
    options: Annotated[
        dict[str, OptionValue],
        Takes("a mapping of names to numbers, texts, true, false, null or lists of numbers"),
    ] = Field(default={}, description="further arguments of a library's optimizer, or of your own")
    lr: Positive = Field(
        default=2.0e-4, description="peak learning rate; use about a tenth of it for full fine-tuning"
    )
    part_lr: dict[ModelPart, Positive] = Field(
        default={},
        description="learning rates of parts of a vision-language model, e.g. `vision`; other parts use `lr`",
    )
    muon_lr: Positive = Field(default=0.02, description="learning rate of matrices with `kind: muon`")
    muon_scale: Literal["original", "adamw"] = Field(
        default="original",
        description=(
            "scale of Muon's updates; original: muon_lr × √max(1, rows / columns); adamw (arXiv:2502.16982):"
            " muon_lr × 0.2 × √max(rows, columns), so that muon_lr is comparable to AdamW's learning rate"
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
            "share of the target probability that is spread evenly over the vocabulary; eval_loss ignores it"
        ),
    )
    loss_weight: Literal["uniform", "dft"] = Field(
        default="uniform",
        description=(
            "weight of a token in the loss of sft and pretrain; dft (arXiv:2508.05629): its own probability,"
            " without gradient; eval_loss ignores it"
        ),
    )
    router_loss: RouterLossSection | None = Field(
        default=None, description="losses of the routers of a mixture of experts; null: none"
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
            "metrics of answers that are generated for all evaluation rows in each evaluation, before step"
            " 1, too: functions as in `rewards`, each reported as its mean"
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
            "at the end load the written result in transformers and peft, and compare its logits with the"
            " trained model's"
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
