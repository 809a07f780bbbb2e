"""A run reports which layers compute padded rows, and the share of padding in them.

Run: pytest tests/trainer/training/test_padding.py
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.conftest import Trained
from unisono.trainer.data.token_table import TokenTable

Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def lfm2_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer of convolutions and one of attention."""
    folder = tmp_path_factory.mktemp("lfm2")
    directory = Path(
        shutil.copytree(model_dir, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    )
    torch.manual_seed(0)
    transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            vocab_size=319, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    ).save_pretrained(directory)  # fmt: skip
    return directory


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


def test_a_model_without_padded_rows_reports_none(train_here: Train) -> None:
    (ready,) = train_here(duration="1 steps").of_kind("ready")
    assert (ready["facts"]["padded"], ready["facts"]["padding"]) == ("", None)
