"""A run reports which layers compute padded rows, and the share of padding in them.

Run: pytest tests/trainer/training/test_padding.py
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.conftest import Trained
from unisono.trainer.data.token_table import TokenTable

Train = Callable[..., Trained]


def _with_weights(kind: Any, config: Any, model_dir: Path, folder: Path) -> Path:
    """A directory with the tokenizer of another model."""
    without = shutil.ignore_patterns("*.safetensors")
    directory = Path(shutil.copytree(model_dir, folder / "model", ignore=without))
    torch.manual_seed(0)
    kind(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def lfm2_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer of convolutions and one of attention."""
    config = transformers.Lfm2Config(
        vocab_size=319, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return _with_weights(transformers.Lfm2ForCausalLM, config, model_dir, tmp_path_factory.mktemp("lfm2"))


@pytest.mark.parametrize("packing", [False, True])
def test_the_share_of_padding_is_that_of_the_micro_batches(
    train_here: Train, lfm2_dir: Path, *, packing: bool
) -> None:
    run = train_here(
        model={"path": str(lfm2_dir)},
        data={"packing": packing},
        batch={"global": 60, "micro": 60},
        duration="1 steps",
    )
    (ready,) = run.of_kind("ready")
    assert ready["facts"]["layout"] == "flat"
    assert ready["facts"]["padded"] == "layers with a state: 1 × Lfm2ShortConv"
    # The only micro batch has all rows of an epoch, and of packed ones those that follow.
    lengths = TokenTable.open(Path(run.plan.data.cache_dir), "train").row_lengths()
    share = 1 - lengths.sum() / (len(lengths) * lengths.max())
    assert ready["facts"]["padding"] == pytest.approx(share, abs=0.05 if packing else 1e-9)


def test_a_norm_with_a_gate_keeps_its_own_forward_in_bfloat16(
    train_here: Train, model_dir: Path, tmp_path: Path
) -> None:
    """Qwen3.5 has one in its linear attention."""
    config = transformers.Qwen3_5TextConfig(
        vocab_size=319, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    directory = _with_weights(transformers.Qwen3_5ForCausalLM, config, model_dir, tmp_path)
    losses = {
        dtype: train_here(model={"path": str(directory), "dtype": dtype}, duration="2 steps").losses
        for dtype in ("float32", "bfloat16")
    }
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-3)


def test_a_model_without_padded_rows_reports_none(train_here: Train) -> None:
    (ready,) = train_here(duration="1 steps").of_kind("ready")
    assert (ready["facts"]["padded"], ready["facts"]["padding"]) == ("", None)
