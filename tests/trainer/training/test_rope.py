"""Scaled RoPE is that of transformers, and goes wherever the result goes.

Run: pytest tests/trainer/training/test_rope.py
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from tests.logits import logits_of_probe
from unisono.base.errors import ModelError
from unisono.trainer.config.model_sections import RopeSection
from unisono.trainer.model.forward import Rows, choose_forward
from unisono.trainer.model.layers import context_of, scale_rope
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.task.inference import load_target, merge_adapter
from unisono.trainer.task.target import find_target

Train = Callable[..., Any]
_KINDS = ["linear", "dynamic", "yarn", "llama3"]


@pytest.fixture(scope="module")
def short_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, trained on 8 positions: the rows of the tests are longer."""
    directory = tmp_path_factory.mktemp("short")
    for file in model_dir.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    return directory


@pytest.fixture(scope="module")
def plain_loss(
    train_in: Callable[[Path], Train], short_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], float]:
    """The loss of step 1 without it, by the rank of the adapter, 0 for none: each is trained
    once.
    """
    train = train_in(tmp_path_factory.mktemp("plain"))

    @functools.cache
    def loss(rank: int) -> float:
        adapter = {"rank": rank} if rank else None
        found: float = train(model={"path": str(short_model)}, adapter=adapter, optim={"lr": 1e-3}).losses[0]
        return found

    return loss


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("adapter", [{"rank": 4}, None])
def test_it_changes_the_training_resumes_and_is_stored_with_the_result(
    train_here: Train,
    short_model: Path,
    plain_loss: Callable[[int], float],
    kind: str,
    adapter: dict[str, Any] | None,
) -> None:
    sections: dict[str, Any] = {
        "model": {"path": str(short_model), "rope": {"kind": kind, "factor": 8}}, "adapter": adapter,
        "checkpoint": {"every": "3 steps"}, "optim": {"lr": 1e-3},
    }  # fmt: skip
    run = train_here(**sections)
    assert run.losses[0] != plain_loss(adapter["rank"] if adapter else 0)
    assert run.of_kind("ready")[0]["facts"]["layout"] == "flat"
    path = run.directory / "checkpoints" / "step-00000003"
    assert train_here(resume=(3, path), **sections).losses == run.losses[3:]

    (run.directory / "plan.json").write_text(json.dumps(run.plan.model_dump(mode="json", by_alias=True)))
    (run.directory / "result.json").write_text(json.dumps({"outcome": "completed"}))
    result, at_step = (
        load_target(find_target(str(run.directory), step=step), dtype="float32", device=torch.device("cpu"))
        for step in (None, 6)
    )
    for loaded in (result, at_step):
        assert loaded.base.config.rope_parameters["rope_type"] == kind
        assert loaded.base.config.max_position_embeddings == (8 if kind == "dynamic" else 64)
        assert (context_of(loaded.base.config) or 64) == 64
    assert torch.allclose(logits_of_probe(result.model), logits_of_probe(at_step.model), atol=1e-6)
    if adapter is not None:
        by_name = load_target(
            find_target(str(run.directory / "adapter")), dtype="float32", device=torch.device("cpu")
        )
        assert torch.equal(logits_of_probe(by_name.model), logits_of_probe(result.model))
        assert merge_adapter(by_name.model, where="here").config.rope_parameters["rope_type"] == kind


@pytest.mark.parametrize("kind", _KINDS)
def test_the_parameters_are_those_that_transformers_takes(kind: str) -> None:
    config = LlamaConfig(max_position_embeddings=2048, rope_theta=5e5)
    scale_rope(config, RopeSection(kind=kind, factor=4.0), max_length=1)  # type: ignore[arg-type]
    config.validate_rope()
    assert config.rope_parameters["rope_theta"] == 5e5
    again = LlamaConfig.from_dict(config.to_dict())
    assert again.rope_parameters == config.rope_parameters
    rotary = LlamaForCausalLM(LlamaConfig(**_SMALL, rope_parameters=config.rope_parameters)).model.rotary_emb
    assert rotary.rope_type == kind


_SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 8,
}  # fmt: skip


def test_linear_scaling_divides_the_positions() -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**_SMALL)).eval()
    config = LlamaConfig(**_SMALL)
    scale_rope(config, RopeSection(kind="linear", factor=2.0), max_length=1)
    scaled = LlamaForCausalLM(config).eval()
    scaled.load_state_dict(plain.state_dict())
    ids = torch.arange(6)[None]
    with torch.no_grad():
        halves = plain(input_ids=ids, position_ids=torch.arange(6)[None] / 2).logits
        assert torch.allclose(scaled(input_ids=ids).logits, halves, atol=1e-6)


def test_with_dynamic_scaling_each_row_is_computed_as_if_it_were_alone() -> None:
    config = LlamaConfig(**_SMALL)
    scale_rope(config, RopeSection(kind="dynamic", factor=4.0), max_length=1)
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(3.0)
    lengths = [5, 29, 12]
    alone = [torch.randint(0, 60, (n,)) for n in lengths]
    wanted = []
    for ids in alone:  # a fresh model for each row: the one of transformers remembers the longest row
        fresh = LlamaForCausalLM(LlamaConfig.from_dict(config.to_dict())).eval()
        fresh.load_state_dict(base.state_dict())
        with torch.no_grad():
            logits = fresh(input_ids=ids[None], use_cache=False).logits[0, :-1]
        wanted.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    loaded = LoadedModel(base, base, None, dict(base.named_parameters()), 1)
    forward = choose_forward(loaded, dtype="float32", quick_adapter=False, gradient_checkpointing=False)
    assert forward.layout == "flat"
    ids = torch.cat(alone)
    index = torch.tensor([i for i in range(46) if i not in (4, 33, 45)])
    rows = Rows(ids, torch.cat([torch.arange(n) for n in lengths]), lengths, index, ids[index + 1])
    found = forward.loss(rows, count=1)
    assert torch.allclose(found, torch.stack(wanted).sum(), rtol=1e-5)
    with forward.ready_to_generate():
        assert "forward" not in vars(base.model.rotary_emb), "generation has the forward of transformers"
    assert torch.equal(forward.loss(rows, count=1), found)


def test_auto_takes_as_much_as_the_longest_row_needs(train_here: Train, short_model: Path) -> None:
    run = train_here(model={"path": str(short_model), "rope": {"kind": "yarn"}}, adapter=None)
    config = AutoConfig.from_pretrained(run.directory / "model")
    assert config.rope_parameters["factor"] == 8.0, "max_length is 64, and the model has 8 positions"
    assert config.max_position_embeddings == 64
    loaded = AutoModelForCausalLM.from_pretrained(run.directory / "model")
    assert loaded.model.rotary_emb.rope_type == "yarn"


def test_auto_that_is_not_needed_changes_nothing_and_says_so(train_here: Train, model_dir: Path) -> None:
    run = train_here(model={"path": str(model_dir), "rope": {"kind": "yarn"}})
    assert run.losses == train_here().losses
    assert (
        "model.rope has no effect: data.max_length is 64, and the model has 256 positions"
        in run.plan.warnings
    )


def test_a_model_without_rope_is_refused() -> None:
    with pytest.raises(ModelError, match="the RoPE of gpt2 cannot be scaled"):
        scale_rope(GPT2Config(), RopeSection(kind="linear", factor=2.0), max_length=1)
