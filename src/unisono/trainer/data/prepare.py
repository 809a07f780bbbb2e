"""From a config to a DataSummary: finds the token table of its rows in the cache, or builds it.

The cache has a directory for each set of ingredients, written completely or not at all:

    CACHE/tables/KEY/        a token table (see data.token_table); KEY is the ingredients' digest
    CACHE/index/SOURCES.json the ingredients of the last table of these sources, so that a cache
    miss can report what changed

Ingredients are the bytes of the data files, the settings that shape rows, the template, the
tokenizer's files and what transformers makes of them, the encoder's version, and the versions of
the packages that encode.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import xxhash

from unisono.base.child import loading_modules
from unisono.base.errors import (
    DataError,
    ModelError,
    UnfitError,
    cache_remedy,
    storage_reason,
    storage_words,
)
from unisono.base.events import Reporter
from unisono.base.files import expand, fsync_dir, read_json, whole_file, write_json
from unisono.base.text import Duration, one_line
from unisono.trainer.config.data_sections import sources_of
from unisono.trainer.config.heads import CLASSIFY, EMBED
from unisono.trainer.config.named_templates import lf_version, local_day
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import GRPO, WITH_PICTURES, lf_name, rows_of
from unisono.trainer.data import flat_total
from unisono.trainer.data.encode import ENCODER_VERSION
from unisono.trainer.data.pictures.processor import PictureProcessor, processor_digests
from unisono.trainer.data.pictures.row_pictures import row_hosts
from unisono.trainer.data.pictures.store import PictureStore, changed_picture, read_pictures
from unisono.trainer.data.sources import RowSource, find_sources
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers
from unisono.trainer.data.tokenizer import RunTokenizer, digest_file, tokenizer_files
from unisono.trainer.plan.run_plan import (
    DataSummary,
    LabelSummary,
    PictureSummary,
    SplitSummary,
    steps_for_tokens,
)

_LOADED = "the loaded tokenizer's "
_PACKAGES = ("tokenizers", "transformers", "jinja2", "pyarrow")

Ingredients = dict[str, object]


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """The cache entry for a set of ingredients.

    Attributes:
        directory: of the table, whether or not it exists.
        hit: whether the table exists and is complete.
        reason: one line for the user.
    """

    directory: Path
    hit: bool
    reason: str


def gather_ingredients(
    config: RunConfig,
    sources: list[RowSource],
    *,
    tokenizer: RunTokenizer,
    limit_rows: int | None = None,
    today: str | None = None,
    processor: Path | None = None,
) -> Ingredients:
    """Everything that determines the table of a config.

    Args:
        config: of the run.
        sources: its sources.
        tokenizer: its tokenizer.
        limit_rows: rows to read of each source.
        today: the date that prompts state if data.date does not say. Without it, a run that is
            resumed on a later day has the rows of its first day, as long as the cache has them.
        processor: the directory of the model's processor of pictures, if it has one.

    Raises:
        DataError: if a file cannot be read.
        ModelError: if the tokenizer cannot be read.
    """
    data = config.data
    split_off = data.eval if isinstance(data.eval, float | int) else None
    ingredients: Ingredients = {"encoder version": ENCODER_VERSION, "objective": rows_of(config.objective)}
    ingredients |= {f"the version of {name}": version(name) for name in _PACKAGES}
    keys = ("max_length", "too_long", "on_bad_row", "packing", "loss_on", "check_template", "control_tokens")
    ingredients |= {f"data.{key}": getattr(data, key) for key in keys}
    ingredients["data.eval"] = split_off
    ingredients |= _answer_ingredients(config) | _label_ingredients(config)
    ingredients |= {"data.plain_texts": True} if data.plain_texts else {}
    if data.ignore:
        ingredients["data.ignore"] = sorted(data.ignore)
    if data.mix.strategy != "concat":
        ingredients["data.mix"] = data.mix.model_dump(mode="json")
    if limit_rows is not None:
        ingredients["limit_rows"] = limit_rows
    draws = [source.section.weight % 1 or source.section.samples is not None for source in sources]
    if split_off is not None or any(draws) or data.mix.probabilities is not None:
        ingredients["seed"] = config.seed
    for number, source in enumerate(sources):
        settings = source.section.model_dump(mode="json", exclude={"path"})
        ingredients[f"the settings of source {number + 1} ({source.section.path})"] = settings | {
            "role": source.role
        }
        ingredients |= {
            f"the file {file.name} (source {number + 1})": digest_file(file.path, file.name)
            for file in source.files
        }
    if lf_name(data.template) is not None:
        ingredients["data.template"] = data.template
        ingredients["encoder version"] = f"{ENCODER_VERSION}, {lf_version()}"
        ingredients["data.thinking"], ingredients["data.date"] = data.thinking, data.date or today
        if data.system is not None:
            ingredients["data.system"] = data.system
    else:
        ingredients["data.thoughts"] = data.thoughts
    if data.template is not None and lf_name(data.template) is None:
        ingredients["data.template"] = digest_file(expand(data.template), data.template)
    ingredients |= _picture_ingredients(config, processor)
    for file in tokenizer_files(tokenizer.directory):
        ingredients[f"the tokenizer's {file.relative_to(tokenizer.directory)}"] = digest_file(file, str(file))
    return ingredients | {f"{_LOADED}{name}": value for name, value in tokenizer.traits().items()}


def _picture_ingredients(config: RunConfig, processor: Path | None) -> Ingredients:
    """What decides the tokens of pictures, if the model reads them."""
    if processor is None:
        return {}
    data = config.data
    bounds, folder = data.pixels.model_dump(mode="json"), data.media_dir
    frames = data.frames.model_dump(mode="json")
    hosts = {"data.image_hosts": sorted(data.image_hosts)} if data.image_hosts else {}
    digests = {f"the processor's {name}": value for name, value in processor_digests(processor).items()}
    return {
        "data.pixels": bounds,
        "data.media_dir": folder,
        "data.boxes": data.boxes,
        "data.frames": frames,
        **hosts,
        **digests,
    }


def _answer_ingredients(config: RunConfig) -> Ingredients:
    """Of prompts: the room for an answer, and whether they may have pictures."""
    if config.objective != GRPO:
        return {}
    room: Ingredients = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    room |= {"rollout.engine": config.rollout.engine} if config.rollout.engine != "own" else {}
    return room | ({"rollout.environment": "any"} if config.rollout.environment is not None else {})


def _label_ingredients(config: RunConfig) -> Ingredients:
    """What decides the labels of rows to classify, and the texts of rows to embed."""
    if config.objective == EMBED:
        return {
            f"embed.{name}_prefix": getattr(config.embed, f"{name}_prefix") for name in ("query", "document")
        }
    if config.objective != CLASSIFY:
        return {}
    return {f"classify.{key}": getattr(config.classify, key) for key in ("labels", "multi_label")}


def look_up_table(cache_dir: Path, ingredients: Ingredients, sources: list[RowSource]) -> CacheLookup:
    """Looks the table up; on a miss the reason names the ingredients that changed."""
    key = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:32]
    directory = cache_dir / "tables" / key
    damage = _damage(directory)
    if damage is None:
        return CacheLookup(
            directory, hit=True, reason="the same rows, settings, template and tokenizer as before"
        )
    if directory.exists():
        return CacheLookup(directory, hit=False, reason=f"the cached table is damaged: {damage}")
    try:
        last = read_json(_index_file(cache_dir, sources))
    except (OSError, ValueError):
        return CacheLookup(directory, hit=False, reason="first use of these sources")
    return CacheLookup(directory, hit=False, reason=_difference(last, ingredients))


def store_ingredients(cache_dir: Path, ingredients: Ingredients, sources: list[RowSource]) -> None:
    """Stores the ingredients, so that the next miss can report what changed."""
    path = _index_file(cache_dir, sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, ingredients)


@contextlib.contextmanager
def writing_table(directory: Path) -> Iterator[Path]:
    """Gives an empty directory to write a table to; at the end it is synced and renamed to
    `directory`.

    If another process was faster, its table, which is identical, stays.

    Raises:
        UnfitError: if the cache cannot be written.
    """
    root = directory.parent
    temporary = root / f".tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        temporary.mkdir(mode=0o700)
        yield temporary
        _seal(temporary)
        if _damage(directory) is not None and directory.exists():
            directory.rename(temporary.with_name(temporary.name + "-old"))
        with contextlib.suppress(FileExistsError):
            _publish(temporary, directory)
        fsync_dir(root)
    except OSError as error:
        raise UnfitError.of(
            f"the cache of token tables cannot be written: {storage_words(error)}",
            where=str(root),
            why=storage_reason(error),
            fix=cache_remedy(error),
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_name(temporary.name + "-old"), ignore_errors=True)


def _publish(temporary: Path, directory: Path) -> None:
    try:
        temporary.rename(directory)
    except OSError:
        if _damage(directory) is not None:
            raise


def _seal(temporary: Path) -> None:
    """Syncs all files, and writes their sizes to meta.json, so that an incomplete table can be
    detected.
    """
    meta = read_json(temporary / "meta.json")
    files = sorted(path for path in temporary.iterdir() if path.name != "meta.json")
    meta["sizes"] = {path.name: path.stat().st_size for path in files}
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    write_json(temporary / "meta.json", meta)
    fsync_dir(temporary)


def _damage(directory: Path) -> str | None:
    """The problem with a table, or None if it is complete."""
    try:
        sizes = read_json(directory / "meta.json")["sizes"]
        wrong = [name for name, size in sizes.items() if (directory / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)
    return f"{wrong[0]} has a different size" if wrong else None


def _sweep(root: Path) -> None:
    """Removes temporary directories of processes on this machine that no longer exist."""
    prefix = f".tmp-{socket.gethostname()}-"
    for path in root.glob(prefix + "*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _index_file(cache_dir: Path, sources: list[RowSource]) -> Path:
    names = [[source.role, source.section.path] for source in sources]
    return cache_dir / "index" / (hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32] + ".json")


def _difference(old: Ingredients, new: Ingredients) -> str:
    """The names of the ingredients that differ, with their values if short."""
    changed = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name not in old or name not in new:
            changed.append(f"{name} is {'new' if name not in old else 'gone'}")
        elif (
            name.startswith(("data.", "seed", "objective", "the version", "encoder", f"{_LOADED}class"))
            and name != "data.template"
        ):
            changed.append(f"{name} was {before}, is {now}")
        else:
            changed.append(f"{name} changed")
    shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
    return shown or "it is no longer in the cache"


def prepare_data(
    config: RunConfig,
    *,
    tokenizer: Path,
    vocab_size: int | None,
    cache_dir: Path,
    report: Reporter,
    ledger: Path | None = None,
    limit_rows: int | None = None,
    is_preview: bool = False,
    processor: Path | None = None,
) -> DataSummary:
    """The summary of a config's rows; afterwards their token table is in the cache.

    Args:
        config: of the run.
        tokenizer: the directory of its tokenizer.
        vocab_size: rows of the model's embedding; None if it is resized to the tokenizer.
        cache_dir: the directory of tables and downloads.
        report: receives progress.
        ledger: where to write data.json, if anywhere.
        limit_rows: rows to read of each source; for a rehearsal.
        is_preview: whether rows are only shown: then tokens that the model does not have are a
            warning, and a date is today's.
        processor: the directory of the model's processor of pictures; None if it reads text only.

    Raises:
        DataError: if sources, rows or the template are refused.
        ModelError: if the tokenizer cannot be read, or does not fit the model.
        UnfitError: if the cache cannot be written.
    """
    report.phase("data", "looking up the rows in the cache")
    _refuse_media_dirs(config)
    sources = find_sources(config.data, cache_dir=cache_dir)
    gather = partial(
        gather_ingredients,
        config,
        sources,
        limit_rows=limit_rows,
        today=local_day().isoformat() if is_preview else None,
        processor=processor,
    )
    of_run = RunTokenizer(tokenizer, config.model.trust_remote_code, cache_dir)
    ingredients = gather(tokenizer=of_run)
    lookup = _with_same_pictures(look_up_table(cache_dir, ingredients, sources))
    if not lookup.hit:
        report.phase("tokenize", f"tokenizing: {lookup.reason}")
        with writing_table(lookup.directory) as temporary:
            _build(config, sources, of_run, temporary, report, limit_rows=limit_rows, processor=processor)
            _refuse_if_changed(ingredients, gather(tokenizer=replace(of_run)))
        if limit_rows is None:
            store_ingredients(cache_dir, ingredients, sources)
    meta = read_json(lookup.directory / "meta.json")
    warnings: list[str] = meta["warnings"]
    if meta["has_shares"]:
        _refuse_weights(config)
    try:
        _check_vocabulary(meta["absent_tokens"], meta["highest_id"], vocab_size, tokenizer, config)
    except ModelError as error:
        if not is_preview or lf_name(config.data.template) is None:
            raise
        warnings += [f"training will refuse this: {problem.what}" for problem in error.problems]
    if ledger is not None:
        with whole_file(ledger) as temporary:
            shutil.copyfile(lookup.directory / "ledger.json", temporary)
    return _summary(config, lookup, ingredients, warnings=warnings)


def _refuse_media_dirs(config: RunConfig) -> None:
    """Refuses a `media_dir` that is not a directory.

    Raises:
        DataError: with its key.
    """
    named = [("data", config.data.media_dir)]
    named += [(key, section.media_dir) for key, section in sources_of(config.data)]
    for key, folder in named:
        if folder is not None and not expand(folder).is_dir():
            raise DataError.of(
                f"{folder} is not a directory",
                where=f"{key}.media_dir",
                why="relative paths of pictures begin there",
                fix="check the path",
            )


def _build(
    config: RunConfig,
    sources: list[RowSource],
    tokenizer: RunTokenizer,
    directory: Path,
    report: Reporter,
    *,
    limit_rows: int | None,
    processor: Path | None,
) -> None:
    with loading_modules():
        from unisono.trainer.data.build import build_table, make_encoder
        from unisono.trainer.data.ingest import PicturesFound

    make = partial(make_encoder, config, tokenizer.loaded, tokenizer.directory)
    refuses = _why_no_pictures(config, processor)
    build = partial(build_table, config, sources, directory=directory, report=report, limit_rows=limit_rows)
    try:
        build(make(), refuses_pictures=refuses)
    except PicturesFound:
        assert processor is not None
        report.phase("tokenize", "loading the model's processor of pictures")
        loaded = PictureProcessor(processor, trust_remote_code=config.model.trust_remote_code)
        for file in directory.iterdir():
            file.unlink()
        store = PictureStore(
            loaded,
            config.data.pixels,
            cache_dir=directory.parent.parent,
            hosts=row_hosts(config.data),
            frames=config.data.frames,
        )
        with contextlib.closing(store.videos):
            build(make(pictures=store))


def _why_no_pictures(config: RunConfig, processor: Path | None) -> str:
    """Why rows with pictures are refused; "" if they are not."""
    if processor is None:
        return "this model reads text only"
    if config.objective not in WITH_PICTURES:
        return f"objective {config.objective} trains on text only"
    if config.objective == GRPO and config.rollout.engine == "vllm":
        return "rollout.engine: vllm gets prompts of text"
    if config.objective == GRPO and config.rollout.environment is not None:
        return "conversations in rollout.environment are of text"
    if lf_name(config.data.template) is not None and config.data.control_tokens == "escape":
        return f"data.control_tokens: with {config.data.template} it would escape the tokens of pictures, too"
    return ""


def _with_same_pictures(lookup: CacheLookup) -> CacheLookup:
    """The lookup; a miss if a picture is not the one that was prepared. Its table is removed."""
    why = changed_picture(lookup.directory) if lookup.hit else None
    if why is None:
        return lookup
    shutil.rmtree(lookup.directory, ignore_errors=True)
    return replace(lookup, hit=False, reason=why)


def _refuse_if_changed(before: Ingredients, after: Ingredients) -> None:
    """Refuses files that changed while they were read: their rows would be cached under the wrong
    digest.
    """
    changed = [name for name in before if before[name] != after.get(name)]
    if changed:
        raise DataError.of(
            f"{changed[0]} changed while it was read",
            where="data.train",
            fix="run again when no process writes to it",
        )


def _refuse_weights(config: RunConfig) -> None:
    """Refuses answers that count in part where the loss has no weights of tokens.

    Raises:
        DataError: with what to change.
    """
    smoothed = bool(config.optim.label_smoothing)
    if config.objective == "sft" and not smoothed:
        return
    raise DataError.of(
        "answers have a weight between 0 and 1, and this loss has no weights of tokens",
        where="optim.label_smoothing" if smoothed else "objective",
        why="weights are those of objective sft, without label smoothing",
        fix="set the weights to 0 or 1, or skip them with data.ignore: [weight, loss]",
    )


def _check_vocabulary(
    absent: list[str], highest: int, vocab_size: int | None, tokenizer: Path, config: RunConfig
) -> None:
    if absent:
        raise ModelError.of(
            f"the tokenizer has no token {' and no token '.join(absent)}",
            where=str(tokenizer),
            why=f"{config.data.template} writes it",
            fix="set data.template to the template of the model's family",
        )
    if vocab_size is None or highest < vocab_size:
        return
    raise ModelError.of(
        f"the tokenizer does not match the model: it gives token {highest}, but the model has {vocab_size}"
        f" tokens (0 to {vocab_size - 1})",
        where=str(tokenizer),
        why="the embedding has no row for it",
        fix="set model.tokenizer to the model's own, or set model.resize_vocabulary: true",
    )


def _summary(
    config: RunConfig, lookup: CacheLookup, ingredients: Ingredients, *, warnings: list[str]
) -> DataSummary:
    meta = read_json(lookup.directory / "meta.json")
    labels = _label_summary(lookup.directory) if meta.get("labels") else None
    if labels is not None:
        warnings = [*warnings, *_label_warnings(labels)]
        _refuse_unknown_weights(config, labels)
    splits = {name: SplitSummary(**figures) for name, figures in meta["splits"].items()}
    tokenizer_parts = sorted(
        f"{name} {value}" for name, value in ingredients.items() if name.startswith("the tokenizer's")
    )
    tokenizer_traits = sorted(
        f"{name} {value}" for name, value in ingredients.items() if name.startswith(_LOADED)
    )
    contents = [
        str(value)
        for name, value in ingredients.items()
        if name.startswith("the file ") or name == "data.template"
    ]
    return DataSummary(
        cache_dir=str(lookup.directory),
        cache_hit=lookup.hit,
        cache_reason=lookup.reason,
        train=splits["train"],
        eval=splits.get("eval"),
        ledger=flat_total(meta["total"]),
        formats=meta["formats"],
        template=meta["template"],
        total_steps=_total_steps(config, splits["train"], lookup.directory),
        digest=digest_text(meta["digest"], *tokenizer_parts),
        rows_digest=meta["digest"],
        files_digest=digest_text(*contents),
        tokenizer_digest=digest_text(*tokenizer_parts),
        tokenizer_traits=digest_text(*tokenizer_traits),
        warnings=warnings,
        pictures=_picture_summary(lookup.directory),
        labels=labels,
        sides=meta["sides"],
    )


def _label_summary(directory: Path) -> LabelSummary:
    """The labels of a table, and how many rows of its training have each."""
    labels, table = read_json(directory / "meta.json")["labels"], TokenTable.open(directory, "train")
    return LabelSummary(
        names=labels["names"],
        multi_label=labels["multi_label"],
        rows=table.rows_of_labels().tolist(),
        train_rows=len(table.sequence_rows),
    )


def _label_warnings(labels: LabelSummary) -> list[str]:
    """A warning if rows of the training lack a label: the model can learn only when not to give
    it.
    """
    absent = [
        one_line(name, limit=40) for name, rows in zip(labels.names, labels.rows, strict=True) if not rows
    ]
    if not absent:
        return []
    some = ", ".join(absent[:8]) + (f", and {len(absent) - 8} more" if len(absent) > 8 else "")
    return [f"no row for training has the label {some}"]


def _refuse_unknown_weights(config: RunConfig, labels: LabelSummary) -> None:
    """Refuses weights of labels that no row has.

    Raises:
        DataError: with the label.
    """
    weights = config.classify.class_weights
    unknown = [name for name in weights if name not in labels.names] if isinstance(weights, dict) else []
    if unknown:
        raise DataError.of(
            f"{unknown[0]} has a weight, and is not among the labels",
            where="classify.class_weights",
            why=f"the labels are {', '.join(one_line(name, limit=40) for name in labels.names[:12])}",
            fix="correct it, or remove it",
        )


def _picture_summary(directory: Path) -> PictureSummary | None:
    """The figures of a table's pictures; None if its rows are text."""
    pictures = read_pictures(directory)
    if not pictures:
        return None
    table, of_rows = TokenTable.open(directory, "train"), read_picture_numbers(directory)
    of_table = [of_rows[stored] for stored in table.columns["stored"].tolist()]
    counts = sorted(sum(pictures[n].tokens for n in numbers) for numbers in of_table if numbers) or [0]
    values = [sum(pictures[n].values for n in numbers) for numbers in of_table]
    return PictureSummary(
        number=len(pictures),
        median_tokens=counts[len(counts) // 2],
        p99_tokens=counts[min(len(counts) - 1, int(0.99 * len(counts)))],
        most_tokens=counts[-1],
        largest_values=max(picture.values for picture in pictures),
        most_values=max(sum(values[row] for row in table.rows_of(s)) for s in range(table.sequences)),
    )


def digest_text(*parts: str) -> str:
    """The xxh3-128 of texts."""
    return xxhash.xxh3_128("\n".join(parts).encode()).hexdigest()


def _total_steps(config: RunConfig, train: SplitSummary, directory: Path) -> int:
    duration = Duration.parse(config.duration)
    batch = 1 if config.batch.per_rank is not None else config.rows_per_step  # the plan divides by it
    if duration.unit == "steps":
        return int(duration.amount)
    if duration.unit == "epochs":
        return math.ceil(math.ceil(duration.amount * train.sequences) / batch)
    lengths = TokenTable.open(directory, "train").sequence_tokens().tolist()
    return steps_for_tokens(lengths, target=int(duration.amount), global_batch=batch, seed=config.seed)
