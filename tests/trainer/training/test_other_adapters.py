"""OFT, LoHa and LoKr train, resume to the same bits, are loaded by peft, and merged where peft
merges.

Run: pytest tests/trainer/training/test_other_adapters.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from unisono.base.errors import ConfigError
from unisono.base.events import Reporter
from unisono.base.files import write_json
from unisono.trainer.config import build_config
from unisono.trainer.plan.task_requests import ReadBackRequest
from unisono.trainer.task import read_back
from unisono.trainer.task.inference import merge_adapter

Train = Callable[..., Any]
KINDS = ["oft", "loha", "lokr"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_trains_resumes_and_is_loaded_and_merged_by_peft(
    train_here: Train, model_dir: Path, kind: str
) -> None:
    settings: dict[str, Any] = {
        "adapter": {"kind": kind, "rank": 4, "alpha": 8}, "checkpoint": {"every": "3 steps"},
        "optim": {"lr": 5e-2 if kind == "oft" else 2e-2, "schedule": "constant"}, "duration": "9 steps",
    }  # fmt: skip
    straight = train_here(**settings)
    assert min(straight.losses[-3:]) < straight.losses[0] - 0.01
    resumed = train_here(resume=(3, straight.directory / "checkpoints" / "step-00000003"), **settings)
    assert resumed.losses == straight.losses[3:]
    mine, theirs = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    write_json(straight.directory / "plan.json", straight.plan.to_json())
    compared: dict[str, Any] = dict(read_back.run(ReadBackRequest(straight.directory), Reporter(None)))
    assert compared["compared"] == "logits"
    assert compared["differs_by"] < 1e-4
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(straight.directory / "adapter")).eval()
        after = adapted(ids).logits
        merged = merge_adapter(adapted, where="the adapter")(ids).logits
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(merged, after, atol=1e-4)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapter": {"kind": "oft", "dropout": 0.1}}, "adapter.dropout: it is for adapters with matrices A and B"),
        ({"adapter": {"kind": "loha", "init": "pissa"}}, "pissa needs `kind: lora`"),
        ({"adapter": {"kind": "lokr"}, "optim": {"lora_b_ratio": 4}}, "optim.lora_b_ratio: it is for adapters"),
        ({"adapter": {"kind": "lokr"}, "model": {"path": "m", "quantize": "nf4"}}, "model.quantize: it is for adapters"),
        ({"adapter": {"kind": "oft"}, "parallel": {"strategy": "fsdp"}}, "fsdp does not shard"),
    ],
)  # fmt: skip
def test_what_they_do_not_have_is_refused(sections: dict[str, Any], words: str) -> None:
    raw = {"model": "m", "data": {"train": "d"}, "output_dir": "o"} | sections
    with pytest.raises(ConfigError, match=words):
        build_config(raw, lines={}, name="c.yaml")
