"""Optimizers of libraries: each trains, resumes to the same bits, and takes the memory that the plan
says. Several ranks are in tests/trainer/ranks/test_optimizers.py.

Run: pytest tests/trainer/training/test_library_optimizers.py
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unisono.base.errors import ConfigError
from unisono.trainer.checkpoint.state import CheckpointReader
from unisono.trainer.config import build_config
from unisono.trainer.config.optimizers import OPTIMIZERS
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.plan import mean_state_bytes, needed_packages
from unisono.trainer.plan.run_plan import ModelFacts
from unisono.trainer.plan.schedule import beyond_training, unusual_schedule
from unisono.trainer.training.optim import build_optimizers, state_before_a_step

Train = Callable[..., Any]
KINDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(bool(kind.package) and find_spec(kind.package) is None, reason=kind.package),
    )
    for name, kind in OPTIMIZERS.items()
]
RATES = {"prodigy": 1.0, "schedule_free": 2e-2, "lion": 2e-3, "lion_8bit": 2e-3, "muon": 1e-3}
RUN: dict[str, Any] = {
    "duration": "6 steps",
    "checkpoint": {"every": "3 steps"},
    "eval": {"every": "2 steps"},
    "data": {"eval": 4},
}


def optim(kind: str) -> dict[str, Any]:
    options = {"d0": 1e-3} if kind == "prodigy" else {}  # six steps are too few to find it from 1e-6
    lr = RATES.get(kind, 1e-2)
    return {"kind": kind, "lr": lr, "schedule": "constant", "weight_decay": 0.01, "options": options}


def adapter(kind: str) -> dict[str, Any] | None:
    return {"rank": 4, "alpha": 8} if OPTIMIZERS[kind].trains_adapters else None


@pytest.mark.parametrize("kind", KINDS)
def test_each_trains_and_resumes_to_the_same_bits(train_here: Train, kind: str) -> None:
    settings = RUN | {"optim": optim(kind), "adapter": adapter(kind)}
    straight = train_here(**settings)
    assert straight.losses[-1] < straight.losses[0]
    path = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(resume=(3, path), **settings)
    assert resumed.losses == straight.losses[3:]
    assert resumed.result["eval"] == straight.result["eval"]
    mine, theirs = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def matrices(kind: str) -> dict[str, torch.nn.Parameter]:
    """Those of two layers of a model with an adapter, or of the model itself; B begins at zero."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (500, 256),
        "layers.0.down.weight": (256, 768),
        "layers.0.up.weight": (768, 256),
    }
    if adapter(kind) is not None:
        shapes = {"0.lora_A.default.weight": (16, 768), "0.lora_B.default.weight": (256, 16)}
        shapes |= {"1.lora_A.default.weight": (16, 256), "1.lora_B.default.weight": (768, 16)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: torch.nn.Parameter(value * (0 if ".lora_B." in name else 1)) for name, value in values.items()
    }


FACTS = ModelFacts(
    directory="", model_type="llama", parameters=500 * 256 + 2 * 256 * 768, hidden_size=256, layers=1,
    intermediate_size=768, vocab_size=500, linear_parameters=2 * 256 * 768, linear_in_out=2 * (256 + 768),
    weight_bytes=0, digest="", ties_head=True,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_table_counts_the_state_within_a_tenth(kind: str) -> None:
    trainable = matrices(kind)
    section = OptimSection.model_validate(optim(kind))
    made = build_optimizers(section, dict(trainable), not_matrices={id(trainable.get("embed.weight"))})
    for parameter in trainable.values():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    made.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for part in made.parts.values()
        for state in part.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and not key.startswith("qmap")  # shared by all
    }
    trained = sum(parameter.numel() for parameter in trainable.values())
    rank = 16 if adapter(kind) is not None else None
    counted = trained * mean_state_bytes(section, FACTS, adapter_rank=rank)
    assert counted == pytest.approx(sum(storages.values()), rel=0.1)


def test_state_before_a_step_has_the_size_of_that_after_it() -> None:
    parameter = torch.zeros(64, 64)
    sizes = {
        kind: sum(
            t.nbytes for t in state_before_a_step(OptimSection.model_validate({"kind": kind}), parameter)
        )
        for kind in OPTIMIZERS
    }
    values = parameter.numel()
    assert sizes["adamw"] == 8 * values
    assert sizes["adamw_8bit"] == 2 * values
    assert sizes["lion"] == 4 * values
    assert sizes["prodigy"] == 16 * values
    assert sizes["adafactor"] == 0


def test_schedule_free_evaluates_and_stores_the_average(train_here: Train) -> None:
    """The checkpoint has what is trained, y; the result and what is read from a checkpoint are x:
    y = (1 - β₁) z + β₁ x.
    """
    run = train_here(**RUN | {"optim": optim("schedule_free")})
    reader = CheckpointReader(run.directory / "checkpoints" / "step-00000006")
    result = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    for name in reader.groups["trainable"]:
        trained, used = reader.tensor("trainable", name), reader.weight(name)
        z = reader.tensor("optimizer-schedule_free", f"{name}::z")
        assert torch.allclose(trained, 0.1 * z + 0.9 * used, atol=1e-6)
        assert not torch.equal(trained, used)
        assert torch.allclose(result[name.replace(".default", "")], used, atol=1e-7)


def test_weights_are_trained_on_with_the_same_bits_after_the_average_was_used() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    section = OptimSection.model_validate(optim("schedule_free"))
    made = build_optimizers(section, {"w": weight}, not_matrices=set())
    for _ in range(3):
        weight.grad = torch.sign(weight.detach())
        made.step()
    before = weight.detach().clone()
    with made.averaged():
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before)


def config(**sections: Any) -> RunConfig:
    raw = {"model": "m", "data": {"train": "d"}, "output_dir": "o"}
    return build_config(raw | sections, lines={}, name="c.yaml").config


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optim": {"kind": "muon"}}, "an adapter's updates are products of two thin matrices"),
        ({"optim": {"kind": "prodigy", "lora_b_ratio": 4}}, "optim.lora_b_ratio: prodigy finds one learning rate"),
        ({"optim": {"kind": "adamw_8bit"}, "parallel": {"strategy": "fsdp"}}, "the kernels of bitsandbytes need full"),
        ({"optim": {"kind": "adafactor"}, "parallel": {"strategy": "fsdp"}}, "adafactor needs rows and columns"),
    ],
)  # fmt: skip
def test_what_an_optimizer_cannot_do_is_refused_with_its_reason(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        config(**sections)
    assert all(problem.fix for problem in raised.value.problems)


def test_muon_may_shard_its_matrices() -> None:
    assert config(optim={"kind": "muon"}, adapter=None, parallel={"strategy": "fsdp"}).optim.kind == "muon"


def test_the_package_of_an_optimizer_is_named_where_it_is_missing() -> None:
    (needed,) = needed_packages(config(optim={"kind": "prodigy", "lr": 1.0}))
    assert (needed.key, needed.words, needed.names) == ("optim.kind", "optim.kind: prodigy", ("prodigyopt",))


def test_rates_and_schedules_that_take_away_its_purpose_are_named() -> None:
    assert beyond_training(config(optim={"kind": "prodigy", "lr": 1.0})) == []
    (line,) = unusual_schedule(config(optim={"kind": "prodigy", "lr": 2e-4}))
    assert line.startswith("optim.lr is 0.0002, a factor")
    (line,) = unusual_schedule(config(optim={"kind": "schedule_free"}))
    assert line.endswith("`optim.schedule: constant` is usual")


def test_options_reach_the_class_of_a_library(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    section = OptimSection.model_validate({"kind": "adafactor", "options": {"decay_rate": -0.5}})
    (group,) = build_optimizers(section, {"w": weight}, not_matrices=set()).parts["adafactor"].param_groups
    assert group["decay_rate"] == -0.5
    assert group["relative_step"] is False
