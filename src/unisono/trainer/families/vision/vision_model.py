"""Training of language models that read pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.base.text import parse_bytes
from unisono.guard.facts.limits import available_memory
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families.text.trained_model import read_outputs, write_result
from unisono.trainer.families.vision.pixels import PixelLoader
from unisono.trainer.families.vision.sight import (
    WrittenVisionModel,
    drawn,
    probe_of_rows,
    row_with_picture,
)
from unisono.trainer.model.directory import locate_model, locate_tokenizer
from unisono.trainer.model.forward import Forward, PictureProbe
from unisono.trainer.model.forward import choose_forward as choose_text_forward
from unisono.trainer.model.frozen_vision import reached_by_pictures
from unisono.trainer.model.load import DTYPES, LoadedModel, load_for_training
from unisono.trainer.model.result_logits import ResultLogits
from unisono.trainer.plan import RunPlan

__all__ = [
    "choose_forward",
    "load",
    "open_contents",
    "outputs",
    "probe",
    "read_outputs",
    "write_result",
    "written",
]

_PROBED_ROWS = 2
_SHARE = 0.25  # of the host memory that is available, for features of all ranks of a node


def load(plan: RunPlan, device: torch.device) -> LoadedModel:
    """The model with its vision part; of sharded weights it is known what pictures alone reach."""
    loaded = load_for_training(
        plan.config,
        directory=Path(plan.model.directory),
        tokenizer_directory=locate_tokenizer(plan.config),
        dtype=plan.dtype,
        device=device,
        keeps_parts=True,
    )
    if plan.mesh.shards_weights:
        sample = {name: value.to(device) for name, value in _processor(plan).inputs(drawn()).items()}
        enabled = plan.dtype != "float32"
        with torch.autocast(device.type, dtype=DTYPES[plan.dtype], enabled=enabled):
            loaded.of_pictures = reached_by_pictures(loaded.base, loaded.trainable, sample)
    return loaded


def choose_forward(plan: RunPlan, loaded: LoadedModel, root: torch.nn.Module | None) -> Forward:
    """The forward of flat or padded rows, tested with rows of the run that have pictures."""
    adapter = plan.config.adapter
    return choose_text_forward(
        loaded,
        dtype=plan.dtype,
        gradient_checkpointing=plan.gradient_checkpointing,
        quick_adapter=adapter is not None and adapter.is_plain,
        root=root,
        router_loss=plan.config.optim.router_loss,
        pictures=probe(plan, loaded.base.device),
    )


def probe(plan: RunPlan, device: torch.device) -> PictureProbe | None:
    """The shortest rows with pictures, the first one with a video if any has; the second one may be
    the first again. None if the training has no picture.
    """
    loader = _loader(plan, device)
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    stored, lengths = table.columns["stored"].tolist(), table.row_lengths().tolist()
    seeing = [i for i, number in enumerate(stored) if loader.pictures_of(number)]
    if not seeing:
        return None
    ordered = sorted(seeing, key=lengths.__getitem__)
    chosen = ([i for i in ordered if loader.has_video(stored[i])][:1] + ordered)[:_PROBED_ROWS]
    chosen += chosen[: _PROBED_ROWS - len(chosen)]
    rows = [table.row(i)[0].tolist() for i in chosen]
    seen = [loader.load([stored[i]], [], []) for i in chosen]
    return probe_of_rows(rows, [one for one in seen if one is not None], device)


def open_contents(
    plan: RunPlan, forward: Forward, device: torch.device, *, draws: bool
) -> tuple[PixelLoader, None]:
    """The loader of pictures; of a vision part that is not trained it keeps the features."""
    del draws
    loader = _loader(plan, device)
    processor = loader.processor
    samples = [
        {name: value.to(device) for name, value in one.items()}
        for one in (processor.inputs(drawn()), *loader.sample_video())
    ]
    loader.vision = forward.frozen_vision(samples)
    ranks = max(len(plan.on_node(node.node_rank)) for node in plan.nodes)
    limit = plan.config.data.cache_bytes
    if loader.vision is not None:
        loader.vision.most_bytes = _node_bytes(limit) // ranks
    if limit is not None:
        loader.most_bytes = 0 if loader.vision is not None else parse_bytes(limit) // ranks
    return loader, None


def _node_bytes(limit: str | None) -> int:
    """Bytes of features on a node: `data.cache_bytes`, else a share of what is available."""
    return parse_bytes(limit) if limit is not None else int(_SHARE * available_memory())


def outputs(model: Any, plan: RunPlan, examples: Callable[[], list[list[int]]]) -> ResultLogits:
    """The logits of two rows, and of one with a picture."""
    ids, picture = row_with_picture(_processor(plan))
    return ResultLogits.of(model, [*examples()[:2], ids], dtype=plan.dtype, pictures={2: picture})


def written(directory: Path, base: Path, config: RunConfig) -> WrittenVisionModel:
    """A model, or an adapter of `base`."""
    original = locate_model(config.model.path, config.model.revision)
    return WrittenVisionModel(directory, base, config, has_head=False, original=original)


def _processor(plan: RunPlan) -> PictureProcessor:
    return PictureProcessor(Path(plan.model.directory), trust_remote_code=plan.config.model.trust_remote_code)


def _loader(plan: RunPlan, device: torch.device) -> PixelLoader:
    return PixelLoader(Path(plan.data.cache_dir), _processor(plan), device)
