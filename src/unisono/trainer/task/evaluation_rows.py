"""The rows of a file that a model is evaluated on, prepared as for its run."""

import glob
from pathlib import Path

from unisono.base.errors import DataError, UsageError
from unisono.base.events import Reporter
from unisono.base.files import expand, fault_of
from unisono.trainer.batches.table import TableRows
from unisono.trainer.config.data_sections import DataSection
from unisono.trainer.config.heads import EMBED, ClassifySection, EmbedSection
from unisono.trainer.config.model_sections import AdapterSection, ModelSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import GRPO, Objective, PreferenceSection, keys_of
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families import rows_of
from unisono.trainer.families.vision.pixels import PixelLoader
from unisono.trainer.model.quantization import is_quantized
from unisono.trainer.plan import DataSummary
from unisono.trainer.plan.task_requests import (
    PrepareRequest,
)
from unisono.trainer.task.classification import section_for
from unisono.trainer.task.inference import InferenceModel


def require_rows(file: str) -> None:
    """Refuses a local file of rows that cannot be read.

    Raises:
        DataError: with what is wrong.
    """
    fault = fault_of(expand(file), file)
    if fault is not None and "://" not in file and not (fault.is_missing and glob.has_magic(file)):
        raise DataError.of(fault.what, where="--data", why=fault.why, fix=fault.fix)


def prepared_rows(config: RunConfig, cache_dir: Path, report: Reporter) -> tuple[DataSummary, TokenTable]:
    """What the preparation of a file's rows gives, and their token table."""
    report.phase("model", "reading the model's files")
    data, _ = rows_of(config).prepare(PrepareRequest(config, cache_dir), report)
    return data, TokenTable.open(Path(data.cache_dir), "train")


def table_rows(opened: InferenceModel, data: DataSummary, table: TokenTable) -> TableRows:
    """The rows of a table, with their pictures."""
    rows = TableRows(table, opened.device)
    if data.pictures is not None:
        assert opened.processor is not None
        loader = PixelLoader(Path(data.cache_dir), opened.processor, opened.device)
        rows.add_contents(loader, seed=0, global_batch=1)
    return rows


def evaluation_config(opened: InferenceModel, file: str) -> RunConfig:
    """The config for preparing the rows: every row is a sequence of its own, with the loss mask of
    the run.
    """
    plan, target = opened.target.plan, opened.target
    tokenizer = opened.tokenizer.name_or_path or str(target.base)
    # No row depends on it, but quantized weights are refused without one.
    adapter = AdapterSection() if is_quantized(opened.forward.loaded.base) else None
    head = target.head
    if plan is None and target.embeds:
        raise UsageError.of(
            f"{target.name} is an embedding model without its run",
            where="RUN|MODEL",
            why="temperature and batch size come from the run",
            fix="evaluate the run, or use the evaluators of sentence-transformers",
        )
    classify = section_for(head) if head is not None and head.labels else ClassifySection()
    if plan is None:
        data = DataSection(train=file, packing=False, max_length=max(8, opened.context))
        model = ModelSection(path=str(target.base), tokenizer=tokenizer)
        kind: Objective = "sft" if head is None else "classify" if head.labels else "reward"
        return RunConfig(
            model=model, adapter=adapter, data=data, objective=kind, classify=classify, output_dir="unused"
        )
    settings = plan.config.data.model_copy(update={"train": file, "eval": None, "packing": False})
    model = plan.config.model.model_copy(
        update={"path": str(target.base), "tokenizer": tokenizer, "weights": "pretrained"}
    )
    if target.source == "checkpoint":
        model = plan.config.model
    # A model that learned from rewards is measured on rows with answers.
    objective = "sft" if plan.config.objective == GRPO else plan.config.objective
    used = {*keys_of(objective)} - {"reference"}  # which is loaded with the other weights
    settings_of_loss = plan.config.preference.model_dump(include=used)
    return RunConfig(
        model=model,
        adapter=adapter,
        data=settings,
        objective=objective,
        preference=PreferenceSection.model_validate(settings_of_loss),
        classify=classify,
        embed=plan.config.embed if objective == EMBED else EmbedSection(),
        seed=plan.config.seed,
        output_dir="unused",
    )
