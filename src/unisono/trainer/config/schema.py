"""The schema of a config. Validators accept or reject; they read nothing from the machine.

They change no value, but a text where a list of texts is expected.

Quantities keep their text (`3 epochs`, `3%`); `Duration`, `Warmup` and similar types parse it where
it is used.
"""

import hashlib
import json
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from unisono.base.text import Duration, one_line
from unisono.trainer.config.answer_functions import function_contradictions, function_names
from unisono.trainer.config.data_sections import DataSection, SourceSection, has_evaluation, sources_of
from unisono.trainer.config.heads import CLASSIFY, EMBED, HEADS, ClassifySection, EmbedSection
from unisono.trainer.config.limits import refused_values
from unisono.trainer.config.model_sections import AdapterSection, ModelPart, ModelSection, TrainOnlySection
from unisono.trainer.config.optimizers import optimizer_named
from unisono.trainer.config.rollout_sections import (
    GrpoSection,
    RewardSection,
    RolloutSection,
    grpo_contradictions,
    server_contradictions,
)
from unisono.trainer.config.sections import (
    DIFFUSION,
    GRPO,
    OBJECTIVES_TEXT,
    PREFERENCE,
    USED,
    DiffusionSection,
    DurationText,
    NamesFile,
    Objective,
    OwnObjective,
    Pattern,
    PicturesSection,
    PreferenceSection,
    SecondsText,
    Section,
    TargetWord,
    keys_of,
    lf_name,
    rows_of,
)
from unisono.trainer.config.training_sections import (
    BatchSection,
    CheckpointSection,
    EvalSection,
    MemorySection,
    OptimSection,
    ParallelSection,
    WatchSection,
)
from unisono.trainer.config.yaml_file import words_in

_ROUNDING = 1e-6  # of a sum of probabilities, which people write with few digits


def picture_settings(config: "RunConfig") -> list[DiffusionSection]:
    """`diffusion`, and what it is for each source of pictures that has settings of its own."""
    per_source = [section.pictures for _, section in sources_of(config.data) if section.pictures is not None]
    return [config.diffusion, *(pictures.applied_to(config.diffusion) for pictures in per_source)]


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
            " trained in full; with `adapter: null` all are trained in full, and `freeze` and `train_only`"
            " apply inside"
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
                "adapter.init: pissa creates new weights, and `adapter.from` continues with another"
                " adapter's weights; remove one of them"
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
                f"optim.kind: {config.optim.kind} orthogonalizes the updates of full matrices, and an"
                " adapter's updates are products of two thin matrices; set `optim.kind: adamw`, or `adapter:"
                " null`"
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
    changed = (
        "it changes the base weights, which would no longer match the quantized weights in the model's files"
    )
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
    of_prompts = ["sft", *PREFERENCE, GRPO]
    if data.plain_texts and rows_of(objective) not in of_prompts:
        unused["data.plain_texts"] = of_prompts
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
            data.plain_texts and template is not None,
            (
                f"data.plain_texts: {data.template} renders texts, too; remove it, or set `data.template` to"
                " a file or null"
            ),
        ),
        (
            data.plain_texts and config.rollout.environment is not None,
            "data.plain_texts: an environment has messages, which a template renders; set it to false",
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
            "duration: the length of answers is not known in advance; write it in steps or epochs",
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
