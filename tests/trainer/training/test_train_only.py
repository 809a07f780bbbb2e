"""Only the named parts of a model are trained. Run: pytest tests/trainer/training/test_train_only.py"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unisono.base.errors import ModelError
from unisono.trainer.config import RunConfig
from unisono.trainer.config.model_sections import TrainOnlySection
from unisono.trainer.model.load import chosen_layers

Train = Callable[..., Any]

_COMMON: dict[str, Any] = {"adapter": None, "optim": {"lr": 1e-3}, "checkpoint": {"every": "3 steps"}}


def _moved(run: Any, model_dir: Path) -> set[str]:
    """The parameters that training has changed."""
    before = load_file(model_dir / "model.safetensors")
    return {name for name, tensor in run.weights().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(
    ("section", "moved"),
    [
        ({"layers": 1}, lambda name: ".layers.1." in name),
        ({"layers": -1}, lambda name: ".layers.0." in name),
        ({"layers": 8}, lambda name: ".layers." in name),
        ({"layers": 1, "modules": ["mlp"]}, lambda name: ".layers.1.mlp." in name),
        ({"layers": 2, "modules": ["q_proj", "mlp.up_proj"]}, lambda name: "q_proj" in name or "up_proj" in name),
        ({"layers": 1, "spread": True}, lambda name: ".layers.1." in name),
        ({"layers": 0, "extra": ["norm"]}, lambda name: name == "model.norm.weight"),
        ({"layers": 0, "extra": ["lm_head"]}, lambda name: "embed_tokens" in name),
        (
            {"layers": 1, "extra": ["norm", "embed_tokens"]},
            lambda name: ".layers.1." in name or ".layers." not in name,
        ),
    ],
)  # fmt: skip
def test_what_is_named_moves_and_the_rest_stays(
    train_here: Train, model_dir: Path, section: dict[str, Any], moved: Callable[[str], bool]
) -> None:
    run = train_here(train_only=section, duration="3 steps", **_COMMON)
    assert _moved(run, model_dir) == {name for name in run.weights() if moved(name)}
    assert [text for text in run.plan.warnings if "train_only" in text] == (
        ["train_only.layers is 8: the model has 2 layers, all are trained"] if section["layers"] == 8 else []
    )


@pytest.mark.parametrize(
    ("layers", "chosen"), [(1, [7]), (2, [3, 7]), (4, [1, 3, 5, 7]), (8, list(range(8)))]
)
def test_spread_layers_are_the_last_of_each_group(layers: int, chosen: list[int]) -> None:
    """As LLaMA-Factory's use_llama_pro: range(L / N - 1, L, L / N)."""
    stack = [torch.nn.Linear(1, 1) for _ in range(8)]
    found = chosen_layers(list(stack), TrainOnlySection(layers=layers, spread=True))
    assert [stack.index(layer) for layer in found] == chosen


@pytest.mark.parametrize("optim", [{"kind": "adamw"}, {"kind": "muon"}])
def test_it_resumes_to_the_same_bits(train_here: Train, optim: dict[str, Any]) -> None:
    sections = {**_COMMON, "train_only": {"layers": 1, "extra": ["norm"]}, "optim": {"lr": 1e-3, **optim}}
    straight = train_here(**sections)
    path = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(resume=(3, path), **sections)
    assert resumed.losses == straight.losses[3:]
    mine, wanted = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"layers": 1, "modules": ["mpl"]}, "did you mean 'mlp'"),
        ({"layers": 1, "extra": ["embed_token"]}, "did you mean 'embed_tokens'"),
        ({"layers": 1, "extra": ["model"]}, "there is no module 'model'"),
        ({"layers": 0}, "no parameter is left to train"),
        ({"layers": 3, "spread": True}, "2 layers are not 3 groups"),
    ],
)
def test_a_name_that_is_not_there_is_refused(train_here: Train, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        train_here(train_only=section, **_COMMON)
    (problem,) = caught.value.problems
    assert words in f"{problem.what}; {problem.fix}"
    assert problem.where.startswith("train_only")


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "set `adapter: null`"), ({"adapter": None, "freeze": ["norm"]}, "remove one of them")],
)
def test_it_contradicts_an_adapter_and_freeze(more: dict[str, Any], words: str) -> None:
    body = {
        "model": "m",
        "data": {"train": "d"},
        "output_dir": "o",
        "train_only": {"layers": 1},
    }
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(body | more)
