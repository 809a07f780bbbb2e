"""From a config to a DataSummary of pictures: folders, captions, buckets, caches, and a table whose
rows are pictures.

The table is a token table: a row's tokens are those of its caption, its `length` is the number of
its latent positions, and a sequence is one use of a picture in an epoch. `pictures.json` beside it
has what a rank needs to load each picture.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unisono.base.errors import ConfigError, DataError, Problem
from unisono.base.events import Reporter
from unisono.base.files import read_object, whole_file, write_json
from unisono.base.text import Duration, show_bytes
from unisono.trainer.config.data_sections import SourceSection, sources_of
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DIFFUSION, DiffusionSection, PicturesSection
from unisono.trainer.data import Ledger, Place, SourceCounts, flat_total
from unisono.trainer.data.pictures.decoding import BadPictureError
from unisono.trainer.data.prepare import digest_text, writing_table
from unisono.trainer.data.token_table import Encoded, Ints, Split, TokenWriter, write_meta, write_split
from unisono.trainer.data.tokenizer import traits_of
from unisono.trainer.families.pictures.captions import VARIED, longest_caption
from unisono.trainer.families.pictures.latents import (
    PICTURES,
    PictureEntry,
    Places,
    encode_caption,
    encode_pixels,
    fill,
    pixels_of,
)
from unisono.trainer.families.pictures.picture_folders import (
    FolderScan,
    Lost,
    Picture,
    bucket_sizes,
    need_pillow,
    read_folder,
    with_bucket,
)
from unisono.trainer.families.pictures.pipeline import (
    TextEncoding,
    load_component,
    load_tokenizers,
    needs_text_encoders,
    text_encoding,
    token_limit,
)
from unisono.trainer.families.pictures.pipeline_files import Pipeline, PipelineDigests, digest_parts
from unisono.trainer.plan.run_plan import DataSummary, SplitSummary, permutation

_EVAL = -1  # the epoch whose permutation selects the pictures that are split off
_SHOWN = 20
_ORDER = "grouped"  # changes when the same pictures would come in another order
_MOST_DECODED = 200_000


@dataclass
class PictureRows:
    """The pictures of a run, those of the training split first."""

    train: list[Picture]
    eval: list[Picture]
    sequences: list[int]
    """The index of a training picture for each of its uses in an epoch."""
    scan: FolderScan
    sections: list[DiffusionSection]
    """`diffusion` as it is for each folder."""

    def longest_caption(self, picture: Picture) -> str:
        """The longest of a picture's captions, by which it is told that captions are cut."""
        return longest_caption(picture.written, self.sections[picture.source])

    def is_flipped(self, number: int) -> bool:
        """Whether some uses of a picture, those for training first, are mirrored."""
        return number < len(self.train) and self.sections[self.train[number].source].flip


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of pictures, and how they are read.

    Attributes:
        key: the config key that names it.
        named: its path, as in the config.
        role: what its pictures are for.
        times: how often each is used in an epoch, beside the number in the name of its folder.
        section: `diffusion` as it is for this folder.
        own: what only a source has.
        resolution: width and height.
    """

    key: str
    named: str
    role: Literal["train", "prior", "eval"]
    times: int
    section: DiffusionSection
    own: PicturesSection
    resolution: tuple[int, int]


def folders_of(config: RunConfig, pipeline: Pipeline) -> list[Folder]:
    """The folders in the order in which they are numbered: for training, the regularization
    pictures of `diffusion.prior`, for evaluation.

    Raises:
        ConfigError: if latents have no such size.
    """
    section, sources = config.diffusion, sources_of(config.data)
    named = [(key, one) for key, one in sources if key.startswith("data.train")]
    if section.prior is not None:
        named.append(("diffusion.prior", SourceSection.model_construct(path=section.prior)))
    named += [(key, one) for key, one in sources if key.startswith("data.eval")]
    folders = []
    for key, source in named:
        own = source.pictures or PicturesSection()
        is_prior = own.prior or key == "diffusion.prior"
        role: Literal["train", "prior", "eval"] = (
            "prior" if is_prior else "eval" if key.startswith("data.eval") else "train"
        )
        applied = own.applied_to(section)
        value = own.resolution if own.resolution is not None else config.data.resolution
        sizes = _resolution(value, applied, pipeline)
        folders.append(Folder(key, source.path, role, int(source.weight), applied, own, sizes))
    return folders


def _resolution(
    value: int | list[int] | None, section: DiffusionSection, pipeline: Pipeline
) -> tuple[int, int]:
    """Width and height that the config asks for, or the model's."""
    if isinstance(value, list):
        width, height = value
    else:
        width = height = value if value is not None else pipeline.resolution
    step = section.bucket_step if section.buckets else pipeline.factor
    for key, number in (
        ("data.resolution", width),
        ("data.resolution", height),
        ("diffusion.bucket_step", step),
    ):
        if number % pipeline.factor:
            raise ConfigError.of(
                f"{key} is {number}, not a multiple of {pipeline.factor} pixels",
                where=key,
                why=f"each position of the latents is {pipeline.factor} × {pipeline.factor} pixels",
                fix=f"set it to {max(1, round(number / pipeline.factor)) * pipeline.factor}",
            )
    return width, height


def gather(config: RunConfig, pipeline: Pipeline, cache_dir: Path, report: Reporter) -> PictureRows:
    """All pictures with their captions and buckets, the split, and the order of uses before it is
    shuffled.

    Raises:
        DataError: if a folder is missing, a picture is bad and `data.on_bad_row` is error, or
            nothing is left.
    """
    need_pillow()
    folders = folders_of(config, pipeline)
    memory = cache_dir / "pictures" / "decoded.json"
    decoded: dict[str, list[int] | str] = read_object(memory)
    every = FolderScan()
    for number, folder in enumerate(folders):
        report.phase("data", f"reading the pictures of {folder.named}")
        scan = _read(folder, number, decoded)
        every.pictures += scan.pictures
        every.lost += scan.lost
    _remember(memory, decoded)
    _refuse_bad(every, config)
    trained, held_out = _split(every, folders, config)
    prior = [p for p in every.pictures if p.is_prior]
    if not trained:
        raise DataError.of(
            "no picture is left to train on",
            where="data.train",
            why=_reasons(every.lost) or "there is no picture in the folder",
            fix=(
                "put pictures into a folder such as 4_name, each with a caption in a .txt file of the same"
                " name"
            ),
        )
    resolutions = [folder.resolution for folder in folders]
    return PictureRows(
        trained + prior,
        held_out,
        _uses(trained, prior, resolutions),
        every,
        [folder.section for folder in folders],
    )


def _read(folder: Folder, number: int, decoded: dict[str, list[int] | str]) -> FolderScan:
    """The pictures of a folder in their buckets, with all their repeats."""
    section = folder.section
    sizes = bucket_sizes(folder.resolution, section)
    scan = read_folder(
        folder.named,
        section,
        source=number,
        is_prior=folder.role == "prior",
        key=folder.key,
        decoded=decoded,
        own=folder.own,
    )
    fitting = []
    for picture in scan.pictures:
        try:
            sized = with_bucket(picture, sizes, folder.resolution, section)
            fitting.append(replace(sized, repeats=picture.repeats * folder.times))
        except BadPictureError as error:
            scan.lost.append(Lost(picture.name, picture.source, "bad", str(error)))
    return FolderScan(fitting, scan.lost)


def _uses(trained: list[Picture], prior: list[Picture], resolutions: list[tuple[int, int]]) -> list[int]:
    """The index in `trained + prior` of each use of a picture in an epoch.

    The regularization pictures of a resolution fill up to as many uses as its other pictures have.
    """
    uses = [i for i, picture in enumerate(trained) for _ in range(picture.repeats)]
    filled: list[int] = []
    for resolution in dict.fromkeys(resolutions):
        cycle = [
            len(trained) + i
            for i, picture in enumerate(prior)
            if resolutions[picture.source] == resolution
            for _ in range(picture.repeats)
        ]
        count = sum(picture.repeats for picture in trained if resolutions[picture.source] == resolution)
        filled += [cycle[i % len(cycle)] for i in range(count)] if cycle else []
    return uses + filled


def _split(scan: FolderScan, folders: list[Folder], config: RunConfig) -> tuple[list[Picture], list[Picture]]:
    """The pictures to train on without those of prior preservation, and those for evaluation."""
    seed = config.diffusion.eval_seed if config.diffusion.eval_seed is not None else config.seed
    share = config.data.eval
    trained = [p for p in scan.pictures if folders[p.source].role == "train"]
    if isinstance(share, float | int) and trained:
        count = share if isinstance(share, int) else max(1, round(share * len(trained)))
        if count >= len(trained):
            raise DataError.of(
                f"data.eval takes {count} of {len(trained)} pictures",
                where="data.eval",
                why="none is left to train on",
                fix="set it to a smaller number or share",
            )
        trained, held_out = _split_off(trained, count, seed)
        return trained, held_out
    kept: list[Picture] = []
    held_out = []
    for number, folder in enumerate(folders):
        pictures = [p for p in scan.pictures if p.source == number]
        if folder.role == "eval":
            held_out += [replace(p, repeats=1) for p in pictures]
        elif folder.role == "train":
            count = _held(folder.own.eval, len(pictures))
            remaining, taken = _split_off(pictures, count, seed)
            kept += remaining
            held_out += taken
    return kept, held_out


def _held(share: float, count: int) -> int:
    """How many of a source's pictures are held out: at least one, and not the only one unless it is
    all of them.
    """
    return count if share == 1 else min(count - 1, max(1, round(share * count))) if share and count else 0


def _split_off(own: list[Picture], count: int, seed: int) -> tuple[list[Picture], list[Picture]]:
    held = set(permutation(len(own), seed=seed, epoch=_EVAL)[:count]) if count else set()
    kept = [picture for i, picture in enumerate(own) if i not in held]
    return kept, [replace(picture, repeats=1) for i, picture in enumerate(own) if i in held]


def _remember(memory: Path, decoded: dict[str, list[int] | str]) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_json(memory, dict(list(decoded.items())[-_MOST_DECODED:]))


def _refuse_bad(scan: FolderScan, config: RunConfig) -> None:
    bad = [lost for lost in scan.lost if lost.what == "bad"]
    if not bad or config.data.on_bad_row == "skip":
        return
    problems = [Problem(f"{lost.name}: {lost.why}", lost.name) for lost in bad[:_SHOWN]]
    more = f" (the first {_SHOWN} are shown)" if len(bad) > _SHOWN else ""
    problems.append(
        Problem(
            f"{len(bad)} pictures cannot be used{more}",
            "data.train",
            fix="fix or remove them, or set data.on_bad_row: skip; data.json then lists each with its reason",
        )
    )
    raise DataError(*problems)


def _reasons(lost: Sequence[Lost]) -> str:
    return "; ".join(f"{one.name}: {one.why}" for one in lost[:3])


# ---- caches


def text_digest(config: RunConfig, pipeline: Pipeline, digests: PipelineDigests) -> str:
    """The digest of what computes embeddings: the files, and the tokenizers as transformers loads
    them, which changes with its version.
    """
    section = config.diffusion
    traits = [traits_of(tokenizer) for tokenizer in load_tokenizers(pipeline)]
    digest = digest_parts({"files": digests.text, "tokenizers": json.dumps(traits, sort_keys=True)})
    return f"{digest[:24]}-{section.clip_skip or 0}-{section.max_tokens}"


def fill_caches(
    config: RunConfig,
    rows: PictureRows,
    pipeline: Pipeline,
    places: Places,
    report: Reporter,
    device: torch.device,
) -> tuple[dict[Path, int], int, int]:
    """Computes the latents and embeddings that are missing; gives the digest of each file of
    latents, how many were computed, and bytes on disk.
    """
    pictures = rows.train + rows.eval
    if not config.diffusion.cache:
        return {}, 0, 0
    vae: list[Any] = []
    views = [(number, False) for number in range(len(pictures))]
    views += [(number, True) for number in range(len(pictures)) if rows.is_flipped(number)]

    def latents(view: int) -> dict[str, torch.Tensor]:
        number, flipped = views[view]
        if not vae:
            report.phase("load_model", "loading the VAE")
            vae.append(load_component(pipeline, "vae").to(device))
        try:
            return encode_pixels(vae[0], pixels_of(pictures[number]), flipped=flipped)
        except BadPictureError as error:
            raise DataError.of(
                f"{pictures[number].name}: {error}",
                where=pictures[number].name,
                fix="run again when no process writes to it",
            ) from error

    paths = [
        places.latents(pictures[number].digest, pictures[number].size, flipped=flipped)
        for number, flipped in views
    ]
    entry_digests, computed = fill(paths, latents, _progress(report, "latents of the pictures"))
    digests = dict(zip(paths, entry_digests, strict=True))
    vae.clear()
    if not needs_text_encoders(config):
        encoding: list[TextEncoding] = []
        captions = list(dict.fromkeys([*(picture.caption for picture in pictures), ""]))

        def states(number: int) -> dict[str, torch.Tensor]:
            if not encoding:
                report.phase("load_model", "loading the text encoders")
                encoders = [load_component(pipeline, name).to(device) for name in pipeline.text_encoders]
                encoding.append(text_encoding(config, pipeline, encoders))
            return encode_caption(encoding[0], captions[number])

        texts = [places.caption(caption) for caption in captions]
        computed += fill(texts, states, _progress(report, "embeddings of the captions"))[1]
        paths += texts
    return digests, computed, sum(path.stat().st_size for path in set(paths))


def _progress(report: Reporter, text: str) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        if done % 32 == 0 or done == total:
            report.phase("latents", text, done=done, total=total)

    return show


def cache_device(config: RunConfig) -> torch.device:
    """The device on which caches are computed."""
    usable = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", 0) if usable else torch.device("cpu")


# ---- the table


def prepare_pictures(
    config: RunConfig,
    pipeline: Pipeline,
    digests: PipelineDigests,
    *,
    cache_dir: Path,
    report: Reporter,
    ledger: Path | None = None,
) -> DataSummary:
    """The summary of a config's pictures; afterwards their table is in the cache, with the caches
    that the config asks for.

    Raises:
        DataError: if pictures are refused.
        UnfitError: if the cache cannot be written.
    """
    rows = gather(config, pipeline, cache_dir, report)
    places = Places(cache_dir / "pictures", digests.encoder, text_digest(config, pipeline, digests))
    latents, computed, size = fill_caches(config, rows, pipeline, places, report, cache_device(config))
    entries = [
        _entry(
            picture,
            _varied(rows.sections[picture.source], config.diffusion),
            _latents_of(picture, places, latents, has_flipped=rows.is_flipped(number)),
        )
        for number, picture in enumerate(rows.train + rows.eval)
    ]
    contents = json.dumps(
        [[_without_places(entry) for entry in entries], rows.sequences, len(rows.train), _ORDER]
    )
    rows_digest = digest_text(contents)
    files_digest = digest_text(json.dumps([[p.digest, p.written] for p in rows.train + rows.eval]))
    key = hashlib.sha256(
        json.dumps([DIFFUSION, contents, entries, asdict(places) | {"root": ""}, _accounted(rows)]).encode()
    ).hexdigest()[:32]
    directory = cache_dir / "tables" / key
    captions = [rows.longest_caption(picture) for picture in rows.train + rows.eval]
    cuts = caption_cuts(captions, pipeline, config.diffusion.max_tokens)
    counts = _write_table(directory, config, pipeline, rows, entries, places, cuts)
    if ledger is not None:
        with whole_file(ledger) as temporary:
            temporary.write_bytes((directory / "ledger.json").read_bytes())
    train = counts["train"]
    sizes = sorted({picture.size for picture in rows.train})
    shown = ", ".join(f"{w} × {h}" for w, h in sizes[:6]) + (" …" if len(sizes) > 6 else "")
    reason = (
        "nothing is cached: latents and embeddings are computed in each step"
        if not config.diffusion.cache
        else (
            f"{computed} latents and embeddings were computed, {show_bytes(size)} on disk"
            if computed
            else f"the same pictures, captions and encoders as before, {show_bytes(size)} on disk"
        )
    )
    return DataSummary(
        cache_dir=str(directory),
        cache_hit=config.diffusion.cache and not computed,
        cache_reason=reason,
        train=train,
        eval=counts.get("eval"),
        ledger=flat_total(read_object(directory / "ledger.json")["total"]),
        formats=[f"pictures in {len(sizes)} sizes: {shown}"],
        template="captions of pictures",
        total_steps=_total_steps(config, sequences=len(rows.sequences)),
        digest=digest_text(rows_digest + digests.text),
        rows_digest=rows_digest,
        files_digest=files_digest,
        tokenizer_digest=digests.tokenizer,
        warnings=[*_warnings(rows), *_caption_warnings(rows, cuts)],
    )


def _accounted(rows: PictureRows) -> list[Any]:
    """What only the ledger has: the files that are not used, and the lines of captions that are not
    read.
    """
    lost = [[one.name, one.what, one.why] for one in rows.scan.lost]
    return [lost, [picture.unread_lines for picture in rows.train + rows.eval]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens of a caption, without begin and end, and how many of them the text encoder reads."""

    tokens: int
    read: int


def caption_cuts(captions: Sequence[str], pipeline: Pipeline, max_tokens: int) -> dict[str, Cut]:
    """The captions that a text encoder cuts; of several encoders that which cuts most.

    Args:
        captions: any number.
        pipeline: with the tokenizers.
        max_tokens: diffusion.max_tokens.
    """
    cuts: dict[str, Cut] = {}
    for tokenizer in load_tokenizers(pipeline):
        read = token_limit(tokenizer, max_tokens) - 2
        for caption in set(captions):
            tokens = len(tokenizer(caption, truncation=False, verbose=False)["input_ids"]) - 2
            known = cuts.get(caption)
            if tokens > read and (known is None or tokens - read > known.tokens - known.read):
                cuts[caption] = Cut(tokens, read)
    return cuts


def _caption_warnings(rows: PictureRows, cuts: dict[str, Cut]) -> list[str]:
    pictures = rows.train + rows.eval
    cut = [picture for picture in pictures if rows.longest_caption(picture) in cuts]
    long = [picture for picture in pictures if picture.unread_lines]
    partly = [picture for picture in pictures if _has_lines_without_affixes(picture, rows)]
    empty = [picture for picture in pictures if not picture.caption]
    warnings = []
    if empty:
        warnings.append(
            f"{len(empty)} pictures have no caption, and are trained with an empty one, e.g. {empty[0].name}"
        )
    if cut:
        first = cuts[rows.longest_caption(cut[0])]
        warnings.append(
            f"{len(cut)} captions are cut, e.g. of {cut[0].name}: {first.tokens} tokens, of which the text"
            f" encoder reads {first.read}; diffusion.max_tokens can be 75, 150 or 225"
        )
    if long:
        warnings.append(
            f"{len(long)} caption files have more than one line, and only the first is read, as in"
            f" sd-scripts, e.g. of {long[0].name}"
        )
    if partly:
        warnings.append(
            f"{len(partly)} captions have more than one line; as in sd-scripts caption_prefix is before the"
            " first one only, and caption_suffix after the last one: write them into each line, e.g. of"
            f" {partly[0].name}"
        )
    return warnings


def _has_lines_without_affixes(picture: Picture, rows: PictureRows) -> bool:
    """Whether a line that is drawn lacks a prefix or suffix that another line of it has."""
    section = rows.sections[picture.source]
    return (
        section.wildcards
        and "\n" in picture.written
        and bool(section.caption_prefix + section.caption_suffix)
    )


def _warnings(rows: PictureRows) -> list[str]:
    seen = [one for one in rows.scan.lost if one.is_picture]
    lost = {what: [one for one in seen if one.what == what] for what in ("bad", "dropped")}
    return [
        f"{len(files)} files are {what}, e.g. {files[0].name}: {files[0].why}"
        for what, files in lost.items()
        if files
    ]


def _varied(section: DiffusionSection, usual: DiffusionSection) -> PictureEntry:
    """How captions of a folder vary, where that is not as `diffusion` of the config says."""
    own = {key: getattr(section, key) for key in VARIED}
    return {} if own == {key: getattr(usual, key) for key in VARIED} else {"varied": own}


def _latents_of(
    picture: Picture, places: Places, digests: dict[Path, int], *, has_flipped: bool
) -> PictureEntry:
    """The digests of a picture's latents, and of those of the mirrored one; 0 where they are not
    cached.
    """
    views = (places.latents(picture.digest, picture.size, flipped=flipped) for flipped in (False, True))
    latent, flipped = (digests.get(view, 0) for view in views)
    return {"latent": latent, "flipped": flipped} if has_flipped else {"latent": latent}


def _entry(picture: Picture, varied: PictureEntry, latents: PictureEntry) -> PictureEntry:
    """The order of its keys is that of earlier versions, and its digest is theirs."""
    written: PictureEntry = {"written": picture.written} if picture.written != picture.caption else {}
    return {
        **varied,
        **written,
        "digest": picture.digest,
        "caption": picture.caption,
        "size": list(picture.size),
        "original": [picture.width, picture.height],
        "prior": picture.is_prior,
        **latents,
        "name": picture.name,
        "path": str(picture.path.resolve()),
    }


def _without_places(entry: PictureEntry) -> dict[str, object]:
    return {key: value for key, value in entry.items() if key not in ("name", "path")}


def _positions(entry: PictureEntry, factor: int) -> int:
    return entry["size"][0] // factor * (entry["size"][1] // factor)


def _write_table(
    directory: Path,
    config: RunConfig,
    pipeline: Pipeline,
    rows: PictureRows,
    entries: list[PictureEntry],
    places: Places,
    cuts: dict[str, Cut],
) -> dict[Split, SplitSummary]:
    tokenizer = load_tokenizers(pipeline)[0]
    factor, border = pipeline.factor, len(rows.train)
    lengths = [_positions(entry, factor) for entry in entries]
    sizes = sorted({tuple(entry["size"]) for entry in entries})
    groups = [sizes.index(tuple(entry["size"])) for entry in entries]
    with writing_table(directory) as temporary:
        with TokenWriter(temporary / "tokens.arrow") as writer:
            for entry in entries:
                ids = np.asarray(tokenizer(entry["caption"], truncation=True)["input_ids"], dtype=np.int32)
                writer.add(Encoded(ids, np.arange(len(ids)) > 0))
        splits = {"train": _write_rows(temporary, "train", range(border), lengths, groups, rows.sequences)}
        if rows.eval:
            held = range(border, len(entries))
            splits["eval"] = _write_rows(temporary, "eval", held, lengths, groups, list(range(len(held))))
        body = {
            "schema": 1,
            "factor": factor,
            "is_xl": pipeline.is_xl,
            "encoder": places.encoder,
            "text": places.text,
        }
        write_json(temporary / PICTURES, body | {"pictures": entries})
        _write_ledger(temporary, config, rows, lengths, cuts)
        files = [(entry["name"], True) for entry in entries]
        meta = {
            "splits": {name: split.model_dump() for name, split in splits.items()},
            "digest": writer.digest.hexdigest(),
        }
        write_meta(temporary, meta, files=files)
    return splits  # type: ignore[return-value]


def _write_rows(
    directory: Path, split: Split, members: range, lengths: list[int], groups: list[int], sequences: list[int]
) -> SplitSummary:
    numbers: Ints = np.asarray(members, dtype=np.int64)
    own = np.asarray(lengths, dtype=np.int64)[numbers]
    columns = {
        "stored": numbers,
        "length": own,
        "loss": own,
        "file": numbers,
        "number": np.zeros_like(numbers),
        "picture": numbers,
        "group": np.asarray(groups, dtype=np.int64)[numbers],
    }
    write_split(directory, split, columns, [[i] for i in sequences])
    total = int(own[sequences].sum())
    return SplitSummary(
        rows=len(members),
        sequences=len(sequences),
        tokens=total,
        loss_tokens=total,
        longest_sequence=int(own.max()),
        longest_row=int(own.max()),
    )


def _write_ledger(
    directory: Path, config: RunConfig, rows: PictureRows, lengths: list[int], cuts: dict[str, Cut]
) -> None:
    sources = sources_of(config.data)
    paths = {
        role: [s.path for key, s in sources if key.startswith(f"data.{role}")] for role in ("train", "eval")
    }
    prior = [config.diffusion.prior] if config.diffusion.prior is not None else []
    names = [*paths["train"], *prior, *paths["eval"]]
    uses = np.bincount(np.asarray(rows.sequences, dtype=np.int64), minlength=len(rows.train)).tolist()
    with Ledger(directory / ".notes") as ledger:
        ledger.sources = [SourceCounts(name) for name in names]
        for number, picture in enumerate(rows.train + rows.eval):
            counts, held = ledger.sources[picture.source], number >= len(rows.train)
            times = 1 if held else uses[number]
            counts.rows += 1
            counts.used += 1
            counts.eval += held
            counts.tokens += lengths[number] * times
            counts.loss_tokens += lengths[number] * times
            what = f"{picture.size[0]} × {picture.size[1]} pixels, "
            what += (
                "for evaluation"
                if held
                else f"{times} times an epoch" + (", for prior preservation" if picture.is_prior else "")
            )
            if picture.unread_lines:
                what += f"; {picture.unread_lines} more lines of its caption file are not read"
            cut = cuts.get(rows.longest_caption(picture))
            if cut is not None:
                counts.cut += 1
                counts.tokens_cut += cut.tokens - cut.read
                what += f"; its caption has {cut.tokens} tokens, of which the text encoder reads {cut.read}"
            ledger.note(Place(picture.name, 0), "used" if cut is None else "cut", what)
        for lost in rows.scan.lost:
            counts = ledger.sources[lost.source]
            counts.rows += 1
            if lost.what == "bad":
                counts.bad += 1
            else:
                counts.dropped[lost.why] += 1
            ledger.note(Place(lost.name, 0), lost.what, lost.why)
        ledger.write(directory / "ledger.json")
    (directory / ".notes").unlink()


def _total_steps(config: RunConfig, *, sequences: int) -> int:
    """The steps of the duration, or with `batch.per_rank` its sequences.

    `sequences` are those of an epoch.
    """
    duration = Duration.parse(config.duration)
    if duration.unit == "steps":
        return int(duration.amount)
    batch = 1 if config.batch.per_rank is not None else config.batch.global_
    return math.ceil(math.ceil(duration.amount * sequences) / batch)
