"""A process that quantizes nothing does not load bitsandbytes.

Run: pytest tests/child/test_without_bitsandbytes.py
"""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
]

_PROGRAM = """
import sys
from unisono.base.child import loading_modules, without_bitsandbytes
with loading_modules():
    import peft
    import unisono.trainer.training.rank_run
    from transformers import LlamaConfig, LlamaForCausalLM
small = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
with without_bitsandbytes():
    peft.get_peft_model(LlamaForCausalLM(small), peft.LoraConfig(target_modules="all-linear"))
print(sorted(name for name in sys.modules if name.startswith("bitsandbytes")))
print(peft.import_utils.is_bnb_available())  # a run that quantizes still finds it
"""


def test_peft_with_an_adapter_loads_no_bitsandbytes_which_stays_importable() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]
