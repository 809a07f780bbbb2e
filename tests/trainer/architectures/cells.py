"""What each cell of the table of architectures tries on a tiny random model, in this process.

Each gives `yes`, with figures, or how it was refused; anything else is a crash.
"""

import gc
import json
import random
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.conftest import Listening, Trained, training_in
from tests.peft_by_hand import sum_of_rows
from tests.trainer.architectures.tiny_models import WORDS, write_tiny_model
from tests.trainer.ranks.conftest import Workshop
from unisono.base.errors import ModelError, UnisonoError
from unisono.trainer.batches.table import TableRows
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.plan import SequenceStream
from unisono.trainer.plan.task_requests import ExportRequest, GenerateRequest, GgufRequest, RequestedModel
from unisono.trainer.task import export, generation, gguf_export

STEPS = 3
TOLERANCE = 1e-5
DRAWN = 1e-2
_BATCH = 4
_COMMON: dict[str, Any] = {
    "duration": f"{STEPS} steps", "batch": {"global": _BATCH}, "data": {"max_length": 48},
    "optim": {"lr": 3e-4, "warmup": "0 steps", "schedule": "constant", "max_grad_norm": None, "eps": 1e-4, "weight_decay": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """The outcome of one try: yes, refused or crashed; why; and figures."""

    outcome: str
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def rows_file(folder: Path) -> Path:
    """Twelve rows of different lengths."""
    draw, path = random.Random(0), folder / "rows.jsonl"
    rows = [
        {"prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 6))),
         "completion": " ".join(draw.choices(WORDS, k=draw.randint(2, 8)))}
        for _ in range(STEPS * _BATCH)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Architecture:
    """Tries one architecture; runs that several cells need are made once."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self._model_type = model_type
        self._rows = rows_file(folder)

    @property
    def class_name(self) -> str:
        """The class of transformers that it is loaded as."""
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self._model_type]
        return name if isinstance(name, str) else name[0]

    @cached_property
    def config(self) -> transformers.PretrainedConfig:
        """The config of the model, which is written now."""
        return write_tiny_model(self._model_type, self.model)

    @cached_property
    def _train(self) -> Callable[..., Trained]:
        _ = self.config
        return training_in(self.folder, model_dir=self.model, rows_file=self._rows)

    def run(self, **sections: Any) -> Trained:
        """A run of three steps."""
        return self._train(**_COMMON | sections)

    @cached_property
    def lora(self) -> Trained:
        """With an adapter on all linear layers."""
        return self.run(adapter={"rank": 4, "alpha": 8})

    @cached_property
    def full(self) -> Trained:
        """All parameters trained."""
        return self.run(adapter=None)

    @cached_property
    def alone(self) -> Trained:
        """All parameters trained; rows are not packed."""
        return self.run(adapter=None, data=_COMMON["data"] | {"packing": False})


def cells(architecture: Architecture, names: Collection[str] = ()) -> Iterator[tuple[str, Cell]]:
    """Name and outcome of each cell, or of those named."""
    for name, attempt in _ATTEMPTS.items():
        if not names or name in names:
            yield name, _tried(attempt, architecture)
            gc.collect()


def _tried(attempt: Callable[[Architecture], dict[str, float]], architecture: Architecture) -> Cell:
    try:
        with _quiet():
            return Cell("yes", figures=attempt(architecture))
    except UnisonoError as error:
        problem = error.problems[0]
        reason = ": ".join(filter(None, (problem.what, problem.why)))
        return Cell("refused", " ".join(reason.replace(str(architecture.folder), "DIR").split()))
    except AssertionError as error:
        return Cell("wrong", " ".join(str(error).split())[:300])
    except Exception as error:  # noqa: BLE001 - what a user would see as a traceback is what is looked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Cell("crashed", f"{reason} ({Path(last.filename).name}:{last.lineno})")


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        yield


def _lora(architecture: Architecture) -> dict[str, float]:
    run = architecture.lora
    written = run.weights()
    unchanged = [name for name, tensor in written.items() if ".lora_B" in name and not tensor.any()]
    assert len(unchanged) * 2 < len(written), f"no gradient: {unchanged}"
    adapted = {name.rpartition(".lora_")[0] for name in written if ".lora_" in name}
    return {"adapted": len(adapted), "trained": sum(tensor.numel() for tensor in written.values())}


def _full(architecture: Architecture) -> dict[str, float]:
    return {"differs_by": _difference(architecture.alone, architecture.model)}


def _packed(architecture: Architecture) -> dict[str, float]:
    off = _difference(architecture.full, architecture.model)
    (ready,) = architecture.full.of_kind("ready")
    return {"differs_by": off, "flat": float(ready["facts"]["layout"] == "flat")}


def _difference(run: Trained, directory: Path) -> float:
    theirs = plain_losses(run, directory)
    off = max(abs(a - b) for a, b in zip(run.losses, theirs, strict=True))
    assert off <= tolerance(directory), f"losses {run.losses}, of transformers {theirs}"
    return off


def tolerance(directory: Path) -> float:
    """How much losses may differ: by more for a model that draws at random in training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    before = torch.random.get_rng_state()
    with torch.no_grad():
        model(input_ids=torch.arange(40, 80)[None])
    draws = not torch.equal(before, torch.random.get_rng_state())
    return DRAWN if draws else TOLERANCE


def plain_losses(run: Trained, directory: Path) -> list[float]:
    """The losses of transformers alone: each row alone, torch's cross entropy and AdamW."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.plan.config.optim.lr, eps=1e-4, weight_decay=0.0)
    table = TokenTable.open(Path(run.plan.data.cache_dir), "train")
    stream, losses = SequenceStream(table.sequences, run.plan.config.seed), []
    for step in range(1, run.plan.total_steps + 1):
        sequences = stream.step(
            step, global_batch=run.plan.config.batch.global_, total_sequences=run.plan.total_sequences
        )
        rows = TableRows(table, torch.device("cpu")).load(sequences).rows
        loss = sum_of_rows(model, rows) / len(rows.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _two_ranks(architecture: Architecture) -> dict[str, float]:
    """Two processes of gloo, each with half of the batch, have the losses of one."""
    one = architecture.full
    folder = architecture.folder / "ranks"
    folder.mkdir()
    workshop = Workshop(architecture.model, {"sft": architecture.folder / "rows.jsonl"}, folder)
    workshop.kinds = {"full": _COMMON | {"adapter": None, "data": _COMMON["data"] | {"packing": True}}}
    two = workshop.one(workshop.plan("full", world=2, strategy="ddp"))
    if two.result["kind"] != "result":
        raise ModelError.of(f"two ranks: {two.result}")
    off = max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True))
    assert off <= tolerance(architecture.model), f"losses of one {one.losses}, of two {two.losses}"
    return {"differs_by": off}


def _generate(architecture: Architecture) -> dict[str, float]:
    """Greedy answers are those of transformers."""
    adapter = architecture.lora.directory / "adapter"
    prompt = "red green blue"
    request = GenerateRequest(model=RequestedModel(str(adapter)), prompt=prompt, raw=True, max_tokens=6)
    (answer,) = generation.run_generate(request, Listening())["answers"]
    return {"tokens": float(answer["tokens"])}


def _merge(architecture: Architecture) -> dict[str, float]:
    adapter, out = architecture.lora.directory / "adapter", architecture.folder / "merged"
    export.run(ExportRequest(model=RequestedModel(str(adapter)), out=str(out), merge=True), Listening())
    from peft import PeftModel

    wanted = PeftModel.from_pretrained(_loaded(architecture.model), adapter)
    ids = torch.tensor([[7, 9, 40, 41, 42, 43, 44, 45]])
    merged, plain = _loaded(out), _loaded(architecture.model)
    with torch.no_grad():
        ours, theirs = merged(input_ids=ids).logits, wanted(input_ids=ids).logits
        assert not torch.equal(theirs, plain(input_ids=ids).logits), "the adapter changes nothing"
    _same_besides(merged, plain, adapter)
    off = float((ours - theirs).abs().max() / theirs.std())
    assert off <= TOLERANCE, f"differs by {off}"
    return {"differs_by": off}


def _loaded(directory: Path) -> Any:
    """The model of a directory in the class that its config names, in plain transformers, with all
    of its tensors.
    """
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, name).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"], f"tensors are missing: {sorted(info['missing_keys'])[:4]}"
    return model.eval()


def _same_besides(merged: Any, plain: Any, adapter: Path) -> None:
    """Every tensor that the adapter does not name is bit-equal."""
    stored = load_file(adapter / "adapter_model.safetensors")
    adapted = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in stored}
    now = merged.state_dict()
    changed = [
        name
        for name, tensor in plain.state_dict().items()
        if not any(name.startswith(part) for part in adapted) and not torch.equal(tensor, now[name])
    ]
    assert not changed, f"other tensors have changed: {changed[:4]}"


def _gguf(architecture: Architecture) -> dict[str, float]:
    out = architecture.folder / "gguf"
    full = architecture.full.directory / "model"
    gguf_export.run(GgufRequest(model=RequestedModel(str(full)), out=str(out), quantize="f32"), Listening())
    return {}


def _quantized(architecture: Architecture) -> dict[str, float]:
    run = architecture.run(adapter={"rank": 4, "alpha": 8}, model={"quantize": "nf4"})
    assert run.losses[-1] == run.losses[-1]
    return {"loss": run.losses[-1]}


_ATTEMPTS: dict[str, Callable[[Architecture], dict[str, float]]] = {
    "lora": _lora,
    "full": _full,
    "packed": _packed,
    "two_ranks": _two_ranks,
    "generate": _generate,
    "merge": _merge,
    "gguf": _gguf,
    "quantized": _quantized,
}


def to_json(cell: Cell) -> dict[str, Any]:
    """A cell for a file."""
    return {name: value for name, value in asdict(cell).items() if value}
