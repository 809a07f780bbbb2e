"""A multimodal checkpoint is trained on text in its own class, and nothing of it is lost.

Run: pytest tests/front/talk/test_multimodal.py
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from tests.front.talk.multimodal_families import FAMILIES
from unisono.base.errors import ModelError
from unisono.trainer.config import RunConfig
from unisono.trainer.model.directory import inspect_model
from unisono.trainer.model.forward import Rows, choose_forward
from unisono.trainer.model.load import LoadedModel, load_base
from unisono.trainer.model.result_logits import fixed_rows
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel
from unisono.trainer.task import export
from unisono.trainer.task.inference import load_target, open_for_inference
from unisono.trainer.task.target import find_target

QUICK = ("qwen3_5", "gemma3", "llava")
each_family = pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        pytest.param(name, name, marks=[] if name in QUICK else pytest.mark.long, id=name)
        for name in FAMILIES
        if name != "paligemma"
    ],
    indirect=["checkpoint"],
)
PROCESSOR = {"image_processor_type": "CLIPImageProcessor", "size": 28}
ROWS = fixed_rows(300)


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, model_dir: Path) -> Path:
    """A model that reads pictures or sound, in the class of its family, in several files."""
    torch.manual_seed(0)
    config, _ = FAMILIES[request.param]
    for file in model_dir.glob("*.safetensors"):
        file.unlink()
    model = transformers.AutoModelForMultimodalLM.from_config(config())
    model.save_pretrained(model_dir, max_shard_size="60KB")
    (model_dir / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model_dir


def opened(directory: Path) -> Any:
    model, info = transformers.AutoModelForMultimodalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    for parameter in model.parameters():  # products differ in the last bit by where in a file they begin
        parameter.data = parameter.data.clone()
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS])


def assert_alike(values: torch.Tensor, expected: torch.Tensor) -> None:
    assert (values - expected).square().mean().sqrt() <= 1e-5 * expected.std()


def parts_of(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [part for each in value for part in parts_of(each)]


def seen(model: Any, picture: dict[str, Any]) -> list[torch.Tensor]:
    """What the vision part makes of a picture."""
    if not picture:
        return []
    with torch.no_grad():
        return parts_of(model.get_image_features(**picture).pooler_output)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_whole(directory: Path, original: Path, picture: dict[str, Any], *, text: torch.Tensor) -> None:
    """All tensors and files of the original are there; only the language model may differ."""
    model, before = opened(directory), opened(original)
    assert type(model) is type(before)
    assert_alike(logits(model), text)
    for ours, theirs in zip(seen(model, picture), seen(before, picture), strict=True):
        assert torch.equal(ours, theirs)
    written, kept = tensors(directory), tensors(original)
    assert written.keys() == kept.keys()
    assert {name: t.dtype for name, t in written.items()} == {name: t.dtype for name, t in kept.items()}
    changed = [name for name in kept if not torch.equal(written[name], kept[name])]
    assert changed
    assert not [name for name in changed if any(part in name for part in ("vis", "projector", "audio"))]
    for name in ("preprocessor_config.json", "chat_template.jinja"):
        assert (directory / name).read_bytes() == (original / name).read_bytes()


def trained(run: Any) -> torch.Tensor:
    target = find_target(str(run.directory))
    return logits(load_target(target, dtype="float32", device=torch.device("cpu")).model)


def exported(run: Any, out: Path, listening: Any, *, merge: bool) -> Path:
    request = ExportRequest(model=RequestedModel(str(run.directory)), out=str(out), merge=merge)
    read_back = export.run(request, listening)["read_back"]
    assert read_back is not None
    assert read_back["compared"] == "logits"
    return out


@each_family
def test_an_adapter_works_in_the_own_class_merged_and_not(
    checkpoint: Path, name: str, train_here: Callable[..., Any], tmp_path: Path, listening: Any
) -> None:
    # The router of Llama 4 gives a pair, and its experts change the output of a layer in place.
    targets = ["self_attn"] if name == "llama4" else "all-linear"
    run = train_here(adapter={"rank": 2, "targets": targets}, optim={"lr": 5e-3})
    ours, base = trained(run), opened(checkpoint)
    before = logits(base)
    assert (ours - before).abs().max() > 0.1 * before.std()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of keys that it does not find
        model = PeftModel.from_pretrained(base, str(run.directory / "adapter")).eval()
    assert_alike(logits(model), ours)
    merged = exported(run, tmp_path / "merged", listening, merge=True)
    assert_whole(merged, checkpoint, FAMILIES[name][1], text=ours)


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
def test_modules_that_an_adapter_trains_whole_are_those_of_the_language_model(
    checkpoint: Path, train_here: Callable[..., Any], tmp_path: Path, listening: Any
) -> None:
    """The vision part has norms, too, whose names end alike."""
    run = train_here(adapter={"rank": 2, "kind": "dora", "modules_to_save": ["norm"]}, optim={"lr": 5e-3})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = PeftModel.from_pretrained(opened(checkpoint), str(run.directory / "adapter")).eval()
    assert not [name for name, _ in model.named_modules() if "vision" in name and "modules_to_save" in name]
    ours = trained(run)
    assert_alike(logits(model), ours)
    merged = exported(run, tmp_path / "merged", listening, merge=True)
    assert_whole(merged, checkpoint, FAMILIES["gemma3"][1], text=ours)


@each_family
def test_full_fine_tuning_keeps_what_rows_of_text_do_not_reach(
    checkpoint: Path, name: str, train_here: Callable[..., Any], tmp_path: Path, listening: Any
) -> None:
    run = train_here(adapter=None, optim={"lr": 1e-3}, checkpoint={"max_shard_size": "60KB"})
    ours = trained(run)
    assert_whole(run.directory / "model", checkpoint, FAMILIES[name][1], text=ours)
    copy = exported(run, tmp_path / "copy", listening, merge=False)
    assert_whole(copy, checkpoint, FAMILIES[name][1], text=ours)


@each_family
def test_losses_of_rows_of_text_are_those_of_the_own_class(checkpoint: Path, name: str) -> None:
    base = load_base(checkpoint, dtype=torch.float32)
    everything, here = opened(checkpoint).num_parameters(), base.num_parameters()
    facts = inspect_model(
        RunConfig.model_validate(
            {"model": {"path": str(checkpoint)}, "data": {"train": "-"}, "output_dir": "-"}
        )
    )
    assert (facts.other_parameters > 0) == (here < everything or name == "qwen2_audio")
    trainable = {key: p for key, p in base.named_parameters() if p.requires_grad}
    forward = choose_forward(
        LoadedModel(base, base, None, trainable, here),
        dtype="float32",
        quick_adapter=False,
        gradient_checkpointing=False,
    )
    ids = torch.tensor([token for row in ROWS for token in row])
    lengths = [len(row) for row in ROWS]
    labelled = torch.tensor([i for i in range(len(ids)) if (i + 1) % lengths[0]])
    rows = Rows(ids, torch.arange(lengths[0]).repeat(len(ROWS)), lengths, labelled, ids[labelled + 1])
    base.train()
    ours = forward.loss(rows, count=len(labelled))
    values = logits(opened(checkpoint).train())[labelled]
    assert abs(ours - torch.nn.functional.cross_entropy(values, rows.labels)) <= 1e-5
    ours.backward()
    assert trainable.keys() == {key for key, p in base.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpoint", ["qwen3_5"], indirect=True)
def test_a_checkpoint_of_a_run_is_resumed_and_answers(
    checkpoint: Path, train_here: Callable[..., Any], listening: Any
) -> None:
    run = train_here(checkpoint={"every": "2 steps"})
    answers = []
    for step in (None, 4):
        model = open_for_inference(str(run.directory), step=step, report=listening)
        with model.ready() as ready:
            prompt = torch.tensor([ROWS[0]])
            answers.append(ready.generate(input_ids=prompt, max_new_tokens=4, do_sample=False).tolist())
    assert checkpoint.is_dir()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"objective": "reward"}, "objective: reward"),
        ({"model": {"weights": "random"}}, "model.weights: random"),
    ],
    ids=["reward", "random"],
)
def test_what_would_lose_parts_is_refused(checkpoint: Path, sections: dict[str, Any], where: str) -> None:
    raw = {"data": {"train": "-"}, "output_dir": "-", **sections}
    raw["model"] = {"path": str(checkpoint), **raw.get("model", {})}
    with pytest.raises(ModelError) as caught:
        inspect_model(RunConfig.model_validate(raw))
    assert caught.value.problems[0].where == where


@pytest.mark.parametrize("checkpoint", ["paligemma"], indirect=True)
def test_a_model_that_reads_text_in_both_directions_is_refused(
    checkpoint: Path, train_here: Callable[..., Any]
) -> None:
    del checkpoint
    with pytest.raises(ModelError, match="both directions"):
        train_here()
