"""The losses of the first five steps equal those of plain transformers and peft with the model's own
processor and a collator written by hand, for each family.

Run: pytest tests/trainer/vision/test_parity.py
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES, processor_of
from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families import training_of
from unisono.trainer.plan import RunPlan, SequenceStream

pytestmark = pytest.mark.processes  # pictures are decoded in them

Row = dict[str, Any]
_ATTENTION = "[qkvo]_proj"
LAYERS = _ATTENTION + r"|(gate|up|down)_proj|in_proj_\w+|out_proj|per_layer_(input_gate|(model_)?projection)"


def _parts(content: str) -> list[dict[str, str]]:
    types = {"<image>": "image", "<video>": "video"}
    pieces = [piece for piece in re.split("(<image>|<video>)", content) if piece]
    return [{"type": types[one]} if one in types else {"type": "text", "text": one} for one in pieces]


def frames_by_hand(folder: Path) -> tuple[list[Image.Image], dict[str, Any]]:
    """Eight frames of a directory, evenly, as pictures of a video with two in a second."""
    files = sorted(folder.iterdir())
    numbers = np.linspace(0, len(files) - 1, min(len(files), 8)).astype(int).tolist()
    frames = [Image.open(files[number]).convert("RGB") for number in numbers]
    length = {"total_num_frames": len(files), "duration": len(files) / 2}
    return frames, {"fps": 2.0, **length, "frames_indices": numbers}


class Collator:
    """The batch of rows: all through the processor at once, labels at answers with their end."""

    def __init__(self, processor: Any, folder: Path, *, last_only: bool = False) -> None:
        self._processor, self._folder, self._last_only = processor, folder, last_only

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        messages = [self._messages(row) for row in rows]
        texts = [self._rendered(one) for one in messages]
        batch = self._called(texts, rows)
        labels = torch.full_like(batch["input_ids"], -100)
        for number, (row, turns) in enumerate(zip(rows, messages, strict=True)):
            for last in [len(turns) - 1] if self._last_only else range(1, len(turns), 2):
                before = self._length(row, turns[:last], prompt=True)
                end = self._length(row, turns[: last + 1], prompt=False) - 1  # a newline follows
                labels[number, before:end] = batch["input_ids"][number, before:end]
        return {**batch, "labels": labels}

    def _messages(self, row: Row) -> list[Row]:
        return [{"role": turn["role"], "content": _parts(turn["content"])} for turn in row["messages"]]

    def _rendered(self, turns: list[Row], **more: bool) -> str:
        # SmolVLM's processor has a template of its own for videos unless one is passed.
        template = self._processor.chat_template
        text: str = self._processor.apply_chat_template(turns, template, tokenize=False, **more)
        return text

    def _length(self, row: Row, turns: list[Row], *, prompt: bool) -> int:
        text = self._rendered(turns, add_generation_prompt=prompt)
        types = [part["type"] for turn in turns for part in turn["content"]]
        media = {
            column: row.get(column, [])[: types.count(kind)]
            for column, kind in (("images", "image"), ("videos", "video"))
        }
        return int(self._called([text], [media])["input_ids"].shape[1])

    def _called(self, texts: list[str], rows: list[Row]) -> dict[str, torch.Tensor]:
        images = [
            [Image.open(self._folder / name).convert("RGB") for name in row.get("images", ())] for row in rows
        ]
        more: dict[str, Any] = {"images": images} if any(images) else {}
        clips = [frames_by_hand(self._folder / name) for row in rows for name in row.get("videos", ())]
        if clips:
            films, metadata = zip(*clips, strict=True)
            more |= {"videos": list(films), "video_metadata": list(metadata), "do_sample_frames": False}
        return dict(
            self._processor(text=texts, padding=True, padding_side="right", return_tensors="pt", **more)
        )


def by_hand(plan: RunPlan, file: Path, *, device: str = "cpu", apart: bool = False) -> list[float]:
    """The losses of plain transformers and peft, in the dtype of the plan; `apart`: each row is a
    batch.
    """
    directory = Path(plan.model.directory)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    collate = Collator(processor_of(directory), file.parent)
    base = AutoModelForImageTextToText.from_pretrained(directory, dtype=getattr(torch, plan.dtype))
    assert plan.config.adapter is not None
    layers = _ATTENTION if plan.config.adapter.targets == "attention" else LAYERS
    targets = rf".*(language_model|text_model).*\.({layers})"
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    model = peft.get_peft_model(base, adapter).to(device).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    seed_torch(plan.config.seed, "weights")
    begun = training_of(plan).load(plan, torch.device(device)).trainable
    assert begun.keys() == trained.keys()
    with torch.no_grad():
        for name, value in begun.items():
            trained[name].copy_(value)
    optimizer = torch.optim.AdamW(trained.values(), lr=plan.config.optim.lr, weight_decay=0.0)
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    stream, losses = SequenceStream(table.sequences, plan.config.seed), []
    for step in range(1, plan.total_steps + 1):
        sequences = stream.step(step, global_batch=4, total_sequences=plan.total_sequences)
        numbers = [int(table.columns["number"][i]) for s in sequences for i in table.rows_of(s)]
        chosen = [rows[number - 1] for number in numbers]
        seen = [tuple(bool(row.get(column)) for column in ("images", "videos")) for row in chosen]
        groups = [[row for row, one in zip(chosen, seen, strict=True) if one == kind] for kind in set(seen)]
        groups = [[row] for row in chosen] if apart else groups
        batches = [collate(group) for group in groups if group]
        total = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        losses.append(0.0)
        for batch in batches:
            labels = batch.pop("labels").to(device)
            inputs = {
                n: value.to(device, base.dtype if n.startswith("pixel_values") else None)
                for n, value in batch.items()
            }
            with torch.autocast(device, torch.bfloat16, enabled=plan.dtype == "bfloat16"):
                logits = model(**inputs).logits[:, :-1].float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / total
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(trained.values(), plan.config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "alone"])
def test_losses_are_those_of_transformers_with_a_collator_by_hand(
    gallery: Gallery, picture_rows: Path, family: str, *, packing: bool
) -> None:
    plan = gallery.plan(family, data={"packing": packing})

    losses = gallery.alone(plan).losses

    assert plan.data.ledger["pictures"] == 28
    assert losses == pytest.approx(by_hand(plan, picture_rows), abs=1e-5)
