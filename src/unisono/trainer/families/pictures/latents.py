"""Latents of pictures and embeddings of captions: on disk, by content, and as the uses of a micro
batch.

    CACHE/pictures/latents/ENCODER/PICTURE-WIDTHxHEIGHT.safetensors
        `mean` and `std` of the VAE's distribution, (C, H, W) float32
    CACHE/pictures/latents/ENCODER/PICTURE-WIDTHxHEIGHT-flipped.safetensors
        likewise, of the mirrored picture
    CACHE/pictures/text/ENCODER/CAPTION.safetensors
        `states` (S, E) and, for SDXL, `pooled` (P,), float32
    CACHE/pictures/decoded.json
        size or fault of each picture that was decoded, by its digest

They are computed once, and verified whenever they are read. ENCODER is the digest of the weights
and settings that compute them, PICTURE and CAPTION that of the contents. Each file has the digest
of its tensors in its metadata.

What is drawn for a use, its noise and its timestep, depends on the seed of its place in the order
of the run alone, so it is the same for any micro batch and number of ranks, with caches or without.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unisono.base.errors import IntegrityError, UnfitError, storage_reason, storage_remedy, storage_words
from unisono.base.files import read_json, whole_file
from unisono.base.text import Warmup
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.pictures.captions import varied_caption
from unisono.trainer.families.pictures.picture_folders import Picture, Pixels, caption_digest, read_pixels
from unisono.trainer.families.pictures.pipeline import (
    TextEncoding,
    TextStates,
    load_component,
    needs_text_encoders,
)
from unisono.trainer.families.pictures.pipeline_files import read_pipeline

PICTURES = "pictures.json"
"""The file beside a token table that lists its pictures."""
EVAL_NOISES = 8
"""Noises and timesteps at which each evaluation picture is measured, the same in each
evaluation.
"""
_METADATA = "xxh3_64"
_MASK = (1 << 63) - 1
_IN_MEMORY_BYTES = 1 << 28

Tensors = dict[str, torch.Tensor]


def content_digest(tensors: Mapping[str, torch.Tensor]) -> int:
    """A digest of the bytes of tensors, 63 bits."""
    total = xxhash.xxh3_64()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.intdigest() & _MASK


def read_entry(path: Path) -> tuple[Tensors, int] | None:
    """The tensors of a file and their digest; None if it is missing or damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            wanted = (file.metadata() or {}).get(_METADATA)
    except (OSError, SafetensorError, ValueError):
        return None
    digest = content_digest(tensors)
    return (tensors, digest) if wanted == str(digest) else None


def write_entry(path: Path, tensors: Tensors) -> int:
    """Writes a file, reads it back, and gives the digest of its tensors.

    Raises:
        UnfitError: if the storage fails, or gives back something else.
    """
    digest = content_digest(tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_bytes(save(tensors, metadata={_METADATA: str(digest)}))
    except OSError as error:
        raise UnfitError.of(
            f"the cache of pictures cannot be written: {storage_words(error)}",
            where=str(path),
            why=storage_reason(error),
            fix=storage_remedy(
                error,
                full=(
                    "free space there, set XDG_CACHE_HOME to a disk with free space, or set diffusion.cache:"
                    " false"
                ),
                else_="fix that file system, or set XDG_CACHE_HOME to a different place",
            ),
        ) from error
    back = read_entry(path)
    if back is None or back[1] != digest:
        raise UnfitError.of(
            "the cache of pictures returns different values than were written",
            where=str(path),
            why="the storage is damaged",
            fix="set XDG_CACHE_HOME to a different disk",
        )
    return digest


@dataclass(frozen=True)
class Places:
    """Where the entries of a pipeline are.

    Attributes:
        root: CACHE/pictures.
        encoder: digest of the VAE.
        text: digest of tokenizers, text encoders and the layer that is used.
    """

    root: Path
    encoder: str
    text: str

    def latents(self, digest: str, size: tuple[int, int], *, flipped: bool = False) -> Path:
        """The file of a picture in a bucket, or of the mirrored one."""
        name = f"{digest}-{size[0]}x{size[1]}{'-flipped' if flipped else ''}.safetensors"
        return self.root / "latents" / self.encoder / name

    def caption(self, caption: str) -> Path:
        """The file of a caption."""
        return self.root / "text" / self.text / f"{caption_digest(caption)}.safetensors"


def encode_pixels(vae: Any, pixels: Pixels, *, flipped: bool = False) -> Tensors:
    """`mean` and `std` (C, H, W) float32 of the latents of one picture, or of the mirrored one,
    scaled as the UNet sees them.
    """
    values = torch.tensor(pixels, device=vae.device).permute(2, 0, 1)[None].float() / 127.5 - 1
    values = values.flip(3) if flipped else values
    with torch.no_grad():
        distribution = vae.encode(values.to(vae.dtype)).latent_dist
    shift, scale = getattr(vae.config, "shift_factor", None) or 0.0, vae.config.scaling_factor
    mean, std = (distribution.mean[0].float() - shift) * scale, distribution.std[0].float() * scale
    return {"mean": mean.cpu().contiguous(), "std": std.cpu().contiguous()}


def encode_caption(encoding: TextEncoding, caption: str) -> Tensors:
    """`states` and `pooled` of one caption, float32."""
    with torch.no_grad():
        encoded = encoding.encode([caption])
    tensors = {"states": encoded.states[0].float().cpu().contiguous()}
    if encoded.pooled is not None:
        tensors["pooled"] = encoded.pooled[0].float().cpu().contiguous()
    return tensors


def fill(
    paths: Sequence[Path], compute: Callable[[int], Tensors], on_progress: Callable[[int, int], None]
) -> tuple[list[int], int]:
    """The digest of each file, and how many were computed because they were missing or damaged."""
    digests, computed = [], 0
    known: dict[Path, int] = {}
    for number, path in enumerate(paths):
        if path not in known:
            entry = read_entry(path)
            if entry is None:
                computed += 1
                known[path] = write_entry(path, compute(number))
            else:
                known[path] = entry[1]
        digests.append(known[path])
        on_progress(number + 1, len(paths))
    return digests, computed


class Kept:
    """Entries of the cache in memory, the latest ones, up to a number of bytes."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Tensors] = OrderedDict()
        self._bytes = 0

    def get(self, key: str, make: Callable[[], Tensors]) -> Tensors:
        """The tensors of a key, made if they are not in memory."""
        tensors = self._entries.get(key)
        if tensors is None:
            tensors = self._entries[key] = make()
            self._bytes += _bytes_of(tensors)
            while self._bytes > _IN_MEMORY_BYTES and len(self._entries) > 1:
                self._bytes -= _bytes_of(self._entries.popitem(last=False)[1])
        else:
            self._entries.move_to_end(key)
        return tensors


def _bytes_of(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def read_verified(path: Path, digest: int | None) -> Tensors:
    """The tensors of a file.

    Raises:
        IntegrityError: if it is damaged, or has other contents than when the run was prepared.
    """
    entry = read_entry(path)
    if entry is None or (digest is not None and entry[1] != digest):
        raise IntegrityError.of(
            "an entry of the cache of pictures is damaged, or was replaced",
            where=str(path),
            why="its digest does not match the values from the preparation of the run",
            fix="delete the file and run the same command again: it is computed again",
        )
    return entry[0]


def text_states(entries: Sequence[Tensors], device: torch.device) -> TextStates:
    """The embeddings of several captions as one batch."""
    states = torch.stack([entry["states"] for entry in entries]).to(device)
    pooled = (
        torch.stack([entry["pooled"] for entry in entries]).to(device) if "pooled" in entries[0] else None
    )
    return TextStates(states, pooled)


def pixels_of(picture: Picture) -> Pixels:
    """The pixels of a picture in its bucket."""
    return read_pixels(picture.path, picture.digest, picture.size)


@dataclass(frozen=True)
class PictureUse:
    """One use of a picture.

    Attributes:
        latents: (C, H, W) float32.
        noise: (C, H, W), that is added to them.
        timestep: from 0.
        caption: as it is for this use.
        weight: of its loss.
        time_ids: original height and width, top and left of the cut, height and width: what SDXL is
            told of the picture.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    timestep: int
    caption: str
    weight: float
    time_ids: tuple[int, ...]


@dataclass(frozen=True)
class PictureBatch:
    """The uses of a micro batch, and the embeddings of captions that are in the cache."""

    uses: list[PictureUse]
    states: dict[str, dict[str, torch.Tensor]]

    def text(self, captions: Sequence[str], device: torch.device) -> TextStates:
        """The cached embeddings of captions."""
        return text_states([self.states[caption] for caption in captions], device)


class PictureEntry(TypedDict, total=False):
    """What a rank needs to load a picture: how its caption varies, where that is not as in the
    config, the caption as written, where it differs, and the digests of its latents, 0 if not
    cached.
    """

    varied: dict[str, object]
    written: str
    digest: str
    caption: str
    size: list[int]
    original: list[int]
    prior: bool
    latent: int
    flipped: int
    name: str
    path: str


class PictureLoader:
    """Loads the pictures of a run's table.

    Attributes:
        timesteps: number of timesteps of the noise schedule.
        feature_ids: none: no token stands for a part of a picture.
    """

    feature_ids: Sequence[int] = ()

    def __init__(
        self,
        config: RunConfig,
        table: Path,
        *,
        directory: Path,
        device: torch.device,
        timesteps: int,
        total_steps: int,
    ) -> None:
        body = read_json(table / PICTURES)
        self._config = config
        self._entries: list[PictureEntry] = body["pictures"]
        self._places = Places(table.parent.parent / "pictures", body["encoder"], body["text"])
        self._captions_are_cached = not needs_text_encoders(config)
        self._vae = None
        if not config.diffusion.cache:
            self._vae = load_component(read_pipeline(directory), "vae").to(device)
        self._kept = Kept()
        self.timesteps = timesteps
        self._total_steps = total_steps

    def load(self, pictures: Sequence[int], seeds: Sequence[int], steps: Sequence[int]) -> PictureBatch:
        """The uses of some pictures of the table in training, one for each seed, each in a step,
        from 0.
        """
        return self._batch(
            [
                self._use(self._entries[i], seed, step=step)
                for i, seed, step in zip(pictures, seeds, steps, strict=True)
            ]
        )

    def load_evaluation(self, pictures: Sequence[int], seeds: Sequence[int]) -> PictureBatch:
        """The uses of evaluation pictures: each with several noises at timesteps that are spread
        evenly, and its caption as it is.
        """
        uses = []
        for i, seed in zip(pictures, seeds, strict=True):
            for number in range(EVAL_NOISES):
                timestep = int((number + 0.5) * self.timesteps / EVAL_NOISES)
                uses.append(
                    self._use(
                        self._entries[i], seed + number, step=0, timestep=timestep, share=1 / EVAL_NOISES
                    )
                )
        return self._batch(uses)

    def sample(self, picture: int) -> tuple[str, tuple[int, int]]:
        """The caption and the size of a picture."""
        entry = self._entries[picture]
        return entry["caption"], (entry["size"][0], entry["size"][1])

    @property
    def usual_size(self) -> tuple[int, int]:
        """The most frequent size of pictures."""
        sizes = [self.sample(i)[1] for i in range(len(self._entries))]
        return max(sizes, key=sizes.count)

    def _batch(self, uses: list[PictureUse]) -> PictureBatch:
        captions = {use.caption for use in uses} if self._captions_are_cached else ()
        return PictureBatch(uses, {caption: self._states(caption) for caption in captions})

    def _use(
        self, entry: PictureEntry, seed: int, *, step: int, timestep: int | None = None, share: float = 1.0
    ) -> PictureUse:
        generator = torch.Generator().manual_seed(seed & ((1 << 63) - 1))
        flipped = timestep is None and "flipped" in entry and _draws_flipped(seed)
        moments = self._moments(entry, flipped=flipped)
        shape = moments["mean"].shape
        # All of these are drawn, also those that the config does not use: a use then draws the same
        # for any of its settings.
        latents = moments["mean"] + moments["std"] * torch.randn(shape, generator=generator)
        drop, order = torch.rand(2, generator=generator).tolist()
        drawn = int(torch.randint(self.timesteps, (1,), generator=generator))
        noise = torch.randn(shape, generator=generator)
        offset = torch.randn((shape[0], 1, 1), generator=generator)
        section = self._config.diffusion
        caption = entry["caption"]
        if timestep is None:
            noise = noise + section.noise_offset * offset if section.noise_offset else noise
            varied = section.model_copy(update=entry.get("varied"))
            steps = Warmup.parse(varied.tag_warmup).steps(self._total_steps)
            caption = varied_caption(
                entry.get("written", caption),
                varied,
                drop=drop,
                order=order,
                warm=step / steps if step < steps else 1.0,
            )
        return PictureUse(
            latents,
            noise,
            drawn if timestep is None else timestep,
            caption,
            share * (section.prior_weight if entry["prior"] else 1.0),
            _time_ids(entry, flipped=flipped),
        )

    def _moments(self, entry: PictureEntry, *, flipped: bool) -> dict[str, torch.Tensor]:
        size = entry["size"][0], entry["size"][1]
        vae = self._vae
        if vae is not None:
            pixels = read_pixels(Path(entry["path"]), entry["digest"], size)
            return encode_pixels(vae, pixels, flipped=flipped)
        path = self._places.latents(entry["digest"], size, flipped=flipped)
        digest = entry["flipped"] if flipped else entry["latent"]
        return self._kept.get(str(path), lambda: read_verified(path, digest))

    def _states(self, caption: str) -> dict[str, torch.Tensor]:
        path = self._places.caption(caption)
        return self._kept.get(str(path), lambda: read_verified(path, None))


def _draws_flipped(seed: int) -> bool:
    """Whether a use has the mirrored picture; of a generator of its own, since it decides which
    latents are read.
    """
    return random.Random(seed).random() < 0.5  # noqa: S311 - not for secrets


def _time_ids(entry: PictureEntry, *, flipped: bool) -> tuple[int, ...]:
    """What SDXL is told of a picture; the left of the mirrored cut is what was cut from the
    right.
    """
    size, original = entry["size"], entry["original"]
    scale = max(own / side for own, side in zip(size, original, strict=True))
    excess = [max(0, round(side * scale) - own) for own, side in zip(size, original, strict=True)]
    left, top = excess[0] // 2, excess[1] // 2
    return original[1], original[0], top, excess[0] - left if flipped else left, size[1], size[0]
