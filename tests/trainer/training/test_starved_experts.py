"""Experts that get no token for many steps are reported once for each layer, also over a resume.

Run: pytest tests/trainer/training/test_starved_experts.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM

from unisono.trainer.training.router_step import STARVED_STEPS, newly_starved
from unisono.trainer.training.run import TrainState

Train = Callable[..., Any]


def test_an_expert_is_reported_after_so_many_steps_in_a_row_and_once_for_its_layer() -> None:
    state = TrainState()
    for step in range(1, 3 * STARVED_STEPS):
        state = TrainState.from_json(json.loads(json.dumps(state.to_json())))  # resumed after every step
        used = 0.0 if step != 50 else 1.0
        found = newly_starved(state, {0: [4.0, 4.0], 3: [8.0, used], 4: [0.0, 8.0]})
        expected = {STARVED_STEPS: {4: [0]}, 50 + STARVED_STEPS: {3: [1]}}
        assert found == expected.get(step, {}), step
    assert state.starved_layers == [4, 3]


def test_a_router_that_avoids_two_experts_is_warned_of_and_its_load_recorded(
    train_here: Train, model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config)
    model.model.layers[1].mlp.router.bias.data = torch.tensor([0.0, -99.0, 0.0, -99.0])
    model.save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    run = train_here(
        model={"path": str(tmp_path / "experts"), "dtype": "float32"},
        adapter={"targets": ["q_proj"], "rank": 1}, duration=f"{STARVED_STEPS + 2} steps", batch={"global": 2, "micro": 2},
        data={"max_length": 64}, eval={"every": None},
    )  # fmt: skip
    (warning,) = [message for message in run.of_kind("warning") if message["code"] == "starved_experts"]
    assert "layer 1: 2 (1, 3)" in warning["text"]
    assert run.metrics[0]["experts_idle"] >= 2
    assert run.metrics[0]["expert_load.1"] == run.metrics[0]["expert_load_max"] == 2.0
