"""From a config to a DataSummary: finds the table of its rows in the cache, or builds it."""

import math
import shutil
from pathlib import Path
from typing import Any

import xxhash

from unisono.child import loading_modules
from unisono.config.schema import RunConfig
from unisono.data.cache import Ingredients, Lookup, gather, look_up, remember, writing
from unisono.data.ledger import flat_total
from unisono.data.sources import Source, find_sources
from unisono.data.table import TokenTable
from unisono.errors import DataError, ModelError
from unisono.events import Reporter
from unisono.files import read_json, whole_file
from unisono.plan.run_plan import DataSummary, SplitSummary
from unisono.plan.sequences import steps_for_tokens
from unisono.text import library_words
from unisono.units import Duration


def prepare_data(
    config: RunConfig,
    *,
    tokenizer: Path,
    vocab_size: int | None,
    cache_dir: Path,
    report: Reporter,
    ledger: Path | None = None,
    limit_rows: int | None = None,
) -> DataSummary:
    """The summary of a config's rows, whose token table is in the cache afterwards.

    Args:
        config: the run's.
        tokenizer: the directory of its tokenizer.
        vocab_size: rows of the model's embedding; None where it grows with the tokenizer.
        cache_dir: where tables and downloads are kept.
        report: told about progress.
        ledger: where data.json is to be written, if anywhere.
        limit_rows: only so many rows of each source are read; for a rehearsal.

    Raises:
        DataError: if sources, rows or the template are refused.
        ModelError: if the tokenizer cannot be read, or does not fit the model.
        UnfitError: if the cache cannot be written.
    """
    report.phase("data", "looking for the rows in the cache")
    sources = find_sources(config.data, cache_dir=cache_dir)
    ingredients = gather(config, sources, tokenizer=tokenizer, limit_rows=limit_rows)
    found = look_up(cache_dir, ingredients, sources)
    if not found.hit:
        report.phase("tokenize", f"tokenizing: {found.reason}")
        with writing(found.directory) as temporary:
            _build(config, sources, tokenizer, temporary, report, limit_rows=limit_rows)
            _refuse_if_changed(
                ingredients, gather(config, sources, tokenizer=tokenizer, limit_rows=limit_rows)
            )
        if limit_rows is None:
            remember(cache_dir, ingredients, sources)
    meta = read_json(found.directory / "meta.json")
    _check_vocabulary(meta, vocab_size, tokenizer, config)
    if ledger is not None:
        with whole_file(ledger) as temporary:
            shutil.copyfile(found.directory / "ledger.json", temporary)
    return _summary(config, found, meta, ingredients)


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory.

    Raises:
        ModelError: if transformers cannot read it.
    """
    with loading_modules():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (
        Exception
    ) as error:  # tokenizers raises Exception itself where tokenizer.json is not as it should be
        usual = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
        if type(error) is not Exception and not isinstance(error, usual):
            raise
        raise ModelError.of(
            "the tokenizer cannot be read", where=str(directory), why=library_words(error),
            fix="copy its files again, or set model.tokenizer",
        ) from error  # fmt: skip


def _build(
    config: RunConfig,
    sources: list[Source],
    tokenizer: Path,
    directory: Path,
    report: Reporter,
    *,
    limit_rows: int | None,
) -> None:
    with loading_modules():
        from unisono.data.build import build_table
        from unisono.data.encode import Encoder

    pretrain = config.objective == "pretrain"
    encoder = Encoder(
        load_tokenizer(tokenizer, trust_remote_code=config.model.trust_remote_code),
        directory=tokenizer,
        template_file=config.data.template,
        loss_on="all" if pretrain else config.data.loss_on,
        check_template=config.data.check_template and not pretrain,
    )
    build_table(config, sources, encoder, directory=directory, report=report, limit_rows=limit_rows)


def _refuse_if_changed(before: Ingredients, after: Ingredients) -> None:
    """Else rows of one file would be kept under the digest of another."""
    changed = [name for name in before if before[name] != after.get(name)]
    if changed:
        raise DataError.of(
            f"{changed[0]} changed while it was read", where="data.train", fix="start again when nothing writes to it any more"
        )  # fmt: skip


def _check_vocabulary(
    meta: dict[str, Any], vocab_size: int | None, tokenizer: Path, config: RunConfig
) -> None:
    highest = meta["highest_id"]
    if vocab_size is None or highest < vocab_size:
        return
    grow = "" if config.adapter else ", or set model.resize_vocabulary: true"
    raise ModelError.of(
        f"the tokenizer does not fit the model: it makes token {highest}, and the model knows {vocab_size} (0 to {vocab_size - 1})",
        where=str(tokenizer), why="the embedding has no row for it", fix=f"set model.tokenizer to the model's own{grow}",
    )  # fmt: skip


def _summary(config: RunConfig, found: Lookup, meta: dict[str, Any], ingredients: Ingredients) -> DataSummary:
    splits = {name: SplitSummary(**figures) for name, figures in meta["splits"].items()}
    tokenizer_parts = sorted(
        f"{name} {value}" for name, value in ingredients.items() if name.startswith("the tokenizer's")
    )
    contents = [
        str(value) for name, value in ingredients.items() if name.startswith("the file ") or name == "data.template"
    ]  # fmt: skip
    return DataSummary(
        cache_dir=str(found.directory),
        cache_hit=found.hit,
        cache_reason=found.reason,
        train=splits["train"],
        eval=splits.get("eval"),
        ledger=flat_total(meta["total"]),
        formats=meta["formats"],
        template=meta["template"],
        total_steps=_total_steps(config, splits["train"], found.directory),
        digest=_digest(meta["digest"], *tokenizer_parts),
        rows_digest=meta["digest"],
        files_digest=_digest(*contents),
        tokenizer_digest=_digest(*tokenizer_parts),
        warnings=meta["warnings"],
    )


def _digest(*parts: str) -> str:
    return xxhash.xxh3_128("\n".join(parts).encode()).hexdigest()


def _total_steps(config: RunConfig, train: SplitSummary, directory: Path) -> int:
    duration = Duration.parse(config.duration)
    batch = config.batch.global_
    if duration.unit == "steps":
        return int(duration.amount)
    if duration.unit == "epochs":
        return math.ceil(math.ceil(duration.amount * train.sequences) / batch)
    lengths = TokenTable.open(directory, "train").sequence_tokens().tolist()
    return steps_for_tokens(lengths, target=int(duration.amount), global_batch=batch, seed=config.seed)
