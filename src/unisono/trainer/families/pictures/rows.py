"""Pictures as rows; their preparation needs torch, which computes the caches."""

from unisono.base.child import loading_modules
from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.trainer.families.family import make_ledger
from unisono.trainer.families.pictures.picture_folders import need_pillow
from unisono.trainer.families.pictures.single_file import open_files, single_file
from unisono.trainer.plan import DataSummary, ModelFacts
from unisono.trainer.plan.task_requests import PrepareRequest


def prepare(request: PrepareRequest, report: Reporter) -> tuple[DataSummary, ModelFacts]:
    """Writes the table of captions, and computes latents and embeddings into the cache."""
    config = request.config
    need_pillow()
    if single_file(config) is not None:
        report.phase("model", "reading the model's file; the first time it is converted to a pipeline")
    pipeline, facts, digests = open_files(config, cache_dir=request.cache_dir)
    with loading_modules():
        from unisono.trainer.families.pictures.prepare import prepare_pictures
    ledger = make_ledger(request)
    data = prepare_pictures(
        config, pipeline, digests, cache_dir=request.cache_dir, report=report, ledger=ledger
    )
    return data, facts


def check_preview() -> None:
    """Refuses pictures."""
    raise UsageError.of(
        "data preview shows rows of text",
        where="objective",
        why="the rows of this config are pictures",
        fix="`unisono train CONFIG --dry-run` shows their number and sizes; data.json of the run lists each file",
    )
