"""A multimodal checkpoint is not trained as another model without a word.

Run: pytest tests/front/talk/test_multimodal.py
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from unisono.base.errors import ModelError
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel
from unisono.trainer.task import export

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
PICTURES = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}


@pytest.fixture
def pictures_and_text(model_dir: Path) -> Path:
    """A model that reads pictures, in the class of its family."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=PICTURES)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(model_dir)
    return model_dir


@pytest.mark.parametrize("adapter", [{"rank": 2}, None], ids=["adapter", "model"])
def test_it_is_refused_before_training_and_the_way_out_trains(
    pictures_and_text: Path,
    train_here: Callable[..., Any],
    tmp_path: Path,
    listening: Any,
    monkeypatch: pytest.MonkeyPatch,
    adapter: dict[str, Any] | None,
) -> None:
    with pytest.raises(ModelError) as caught:
        train_here(adapter=adapter)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2
    assert "Qwen3_5ForConditionalGeneration" in problem.why
    assert problem.where == str(pictures_and_text / "config.json")
    command = re.search(r'python -c "(.*)", and set', problem.fix)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    exec(command[1])
    run = train_here(adapter=adapter, model={"path": str(tmp_path / "TEXT"), "dtype": "float32"})
    exported = export.run(
        ExportRequest(
            model=RequestedModel(str(run.directory)), out=str(tmp_path / "out"), merge=adapter is not None
        ),
        listening,
    )
    assert exported["what"] == ("merged model" if adapter else "model")
    assert (
        type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__
        == "Qwen3_5ForCausalLM"
    )
