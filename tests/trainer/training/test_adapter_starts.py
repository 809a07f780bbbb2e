"""What an adapter begins with: principal components, another adapter's weights, a base with
adapters merged into it.

Run: pytest tests/trainer/training/test_adapter_starts.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from unisono.base.errors import ModelError
from unisono.trainer.checkpoint.state import CheckpointReader
from unisono.trainer.config import RunConfig
from unisono.trainer.model.load import LoadedModel, load_for_training

Train = Callable[..., Any]
_IDS = torch.tensor([[(7 * i) % 300 for i in range(20)]])
_COMMON: dict[str, Any] = {"checkpoint": {"every": "3 steps"}, "optim": {"lr": 1e-3}}


def _loaded(run: Any) -> LoadedModel:
    torch.manual_seed(0)
    directory = Path(run.plan.model.directory)
    return load_for_training(
        run.plan.config, directory=directory, tokenizer_directory=directory, dtype="float32", device=torch.device("cpu")
    )  # fmt: skip


def _trained_logits(run: Any) -> torch.Tensor:
    """Of the model as it was at the last step of training."""
    loaded = _loaded(run)
    (last,) = sorted((run.directory / "checkpoints").iterdir())[-1:]
    reader = CheckpointReader(last)
    with torch.no_grad():
        for name, parameter in loaded.trainable.items():
            parameter.copy_(reader.tensor("trainable", name))
        return loaded.model.eval()(_IDS).logits


def _stored_logits(run: Any, model_dir: Path) -> torch.Tensor:
    """Of the result, as peft loads it on the untouched base model."""
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    model = PeftModel.from_pretrained(base, run.directory / "adapter")
    with torch.no_grad():
        return model.eval()(_IDS).logits


def _resumes(train_here: Train, straight: Any, **sections: Any) -> None:
    path = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(resume=(3, path), **sections)
    assert resumed.losses == straight.losses[3:]
    mine, wanted = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def train_once(train_in: Callable[[Path], Train], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains a run that several tests begin with."""
    return train_in(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def merged(train_once: Train) -> list[str]:
    """Two adapters for one base."""
    first = train_once(adapter={"targets": ["q_proj"], "rank": 2}, optim={"lr": 1e-2})
    second = train_once(adapter={"kind": "rslora", "rank": 3}, optim={"lr": 1e-2})
    return [str(run.directory / "adapter") for run in (first, second)]


@pytest.fixture(scope="module")
def plain(train_once: Train) -> Any:
    """A run with a plain adapter."""
    return train_once(**_COMMON | {"optim": {"lr": 1e-2}})


@pytest.fixture(scope="module")
def first(train_once: Train) -> str:
    """The folder of a run of one step."""
    return str(train_once(duration="1 steps").directory)


@pytest.mark.parametrize("kind", ["lora", "rslora"])
@pytest.mark.parametrize("steps", [None, 4])
def test_pissa_begins_at_the_base_and_is_stored_as_adapter_of_double_rank(
    train_here: Train, plain: Any, model_dir: Path, steps: int | None, kind: str
) -> None:
    adapter = {"init": "pissa", "init_steps": steps, "kind": kind}
    common = {**_COMMON, "optim": {"lr": 1e-2}}
    pissa = train_here(adapter=adapter, **common)
    assert pissa.losses[0] == pytest.approx(plain.losses[0], abs=1e-5), "B is 0 in the plain adapter"
    assert pissa.losses[1:] != pytest.approx(plain.losses[1:], abs=1e-3)
    settings = json.loads((pissa.directory / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["use_rslora"], settings["init_lora_weights"]) == (8, False, True)
    assert torch.allclose(_stored_logits(pissa, model_dir), _trained_logits(pissa), atol=2e-5)
    _resumes(train_here, pissa, adapter=adapter, **common)


def test_pissa_begins_with_the_largest_singular_values(train_here: Train, model_dir: Path) -> None:
    loaded = _loaded(train_here(adapter={"init": "pissa"}, duration="1 steps"))
    fast = _loaded(train_here(adapter={"init": "pissa", "init_steps": 12}, duration="1 steps"))
    original = AutoModelForCausalLM.from_pretrained(model_dir).model.layers[1].mlp.up_proj.weight
    wanted = torch.linalg.svdvals(original)
    for run in (loaded, fast):
        layer = run.base.model.layers[1].mlp.up_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert torch.allclose(torch.linalg.svdvals(2.0 * b @ a)[:4], wanted[:4], rtol=1e-3)
        assert torch.allclose(torch.linalg.svdvals(layer.base_layer.weight)[0], wanted[4], rtol=1e-2)
        assert torch.allclose(layer.base_layer.weight + 2.0 * b @ a, original, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_an_adapter_continues_where_another_ended(train_here: Train, model_dir: Path, kind: str) -> None:
    adapter: dict[str, Any] = {"kind": kind, "modules_to_save": ["norm"]}
    first = train_here(adapter=adapter, duration="3 steps", optim={"lr": 1e-2})
    again = {**adapter, "from": str(first.directory / "adapter")}
    second = train_here(adapter=again, **_COMMON)
    assert torch.equal(_loaded_logits(second), _stored_logits(first, model_dir))
    assert second.losses[0] != train_here(adapter=adapter, **_COMMON).losses[0]
    assert torch.allclose(_stored_logits(second, model_dir), _trained_logits(second), atol=1e-5)
    by_run = {**adapter, "from": str(first.directory)}
    assert train_here(adapter=by_run, **_COMMON).losses == second.losses, "a run means its adapter"
    _resumes(train_here, second, adapter=again, **_COMMON)


def _loaded_logits(run: Any) -> torch.Tensor:
    """Of the model as it is before step 1."""
    with torch.no_grad():
        return _loaded(run).model.eval()(_IDS).logits


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("init", ["default", "pissa"])
def test_merged_adapters_are_part_of_the_base_and_of_the_result(
    train_here: Train, merged: list[str], model_dir: Path, kind: str, init: str
) -> None:
    if (kind, init) == ("dora", "pissa"):
        return
    adapter = {"kind": kind, "init": init, "merge": merged}
    third = train_here(adapter=adapter, **_COMMON)

    base = AutoModelForCausalLM.from_pretrained(model_dir)
    for place in merged:
        base = PeftModel.from_pretrained(base, place).merge_and_unload()
    with torch.no_grad():
        assert torch.allclose(_loaded_logits(third), base(_IDS).logits, atol=2e-5)
    assert torch.allclose(_stored_logits(third, model_dir), _trained_logits(third), atol=2e-5)
    _resumes(train_here, third, adapter=adapter, **_COMMON)


def test_one_adapter_may_be_merged_and_another_continued(train_here: Train, model_dir: Path) -> None:
    """What LLaMA-Factory does with a list of adapters."""
    first = train_here(optim={"lr": 1e-2})
    second = train_here(adapter={"merge": [str(first.directory)]}, optim={"lr": 1e-2})
    # the second's result contains the first, so it is continued at its rank on the plain base
    third = train_here(adapter={"rank": 8, "alpha": 16, "from": str(second.directory)}, **_COMMON)
    assert torch.allclose(_loaded_logits(third), _stored_logits(second, model_dir), atol=1e-6)
    both = {"rank": 8, "alpha": 16, "from": str(second.directory), "merge": [str(first.directory)]}
    fourth = train_here(adapter=both, **_COMMON)
    assert fourth.losses[0] != third.losses[0]
    assert torch.allclose(_stored_logits(fourth, model_dir), _trained_logits(fourth), atol=2e-5)


@pytest.mark.parametrize(
    ("adapter", "where", "words"),
    [
        ({"rank": 2}, "adapter.rank", "set adapter.rank: 4"),
        ({"alpha": 4}, "adapter.alpha", "set adapter.alpha: 8"),
        ({"kind": "rslora"}, "adapter.kind", "set adapter.kind: lora"),
        ({"modules_to_save": ["norm"]}, "adapter.modules_to_save", "set adapter.modules_to_save: []"),
        ({"targets": ["q_proj"]}, "adapter.targets", "set adapter.targets to"),
        ({"from": "/nowhere"}, "adapter.from", "there is no adapter in /nowhere"),
        ({"from": None, "merge": ["FIRST"], "targets": ["q_proj"]}, "adapter.targets", "all-linear"),
        ({"from": None, "init": "pissa", "rank": 33, "alpha": 66}, "adapter.rank", "set adapter.rank to 16"),
    ],
)
def test_what_does_not_agree_is_refused_with_the_key_to_set(
    train_here: Train, first: str, adapter: dict[str, Any], where: str, words: str
) -> None:
    section = {"from": first, **adapter}
    if "merge" in section:
        section["merge"] = [first]
    with pytest.raises(ModelError) as caught:
        train_here(adapter=section)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert words in f"{problem.what}; {problem.fix}"


def test_an_adapter_that_is_more_than_a_product_is_not_merged(train_here: Train) -> None:
    for adapter in ({"kind": "dora"}, {"modules_to_save": ["norm"]}):
        first = train_here(adapter=adapter, duration="1 steps")
        with pytest.raises(ModelError, match="cannot be merged in memory"):
            train_here(adapter={"merge": [str(first.directory)]})


@pytest.mark.parametrize("adapter", [{"init": "pissa", "from": "x"}, {"init": "pissa", "kind": "dora"}])
def test_contradictions_are_refused(adapter: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"adapter\.init"):
        RunConfig.model_validate(
            {"model": "m", "data": {"train": "d"}, "output_dir": "o", "adapter": adapter}
        )
