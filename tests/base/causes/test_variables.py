"""Values and names of variables that are right, and those that only look so.

Run: pytest tests/base/causes/test_variables.py
"""

import re

import pytest

from unisono.base.causes.variables import VALUES
from unisono.guard.agree.environment_rules import unknown_names


def takes(name: str, value: str) -> bool:
    return re.fullmatch(VALUES[name].pattern, value, re.IGNORECASE) is not None


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_torchs_allocator_reads_is_right(name: str) -> None:
    """From torch's own page on CUDA memory, and with the blanks that its reader skips."""
    for value in (
        "expandable_segments:True",
        "expandable_segments:True,max_split_size_mb:128",
        "expandable_segments: True, garbage_collection_threshold: 0.8",
        "backend:cudaMallocAsync",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[256:1,>:8],max_split_size_mb:512,",
    ):
        assert takes(name, value), value


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_it_fails_on_is_wrong(name: str) -> None:
    for value in (
        "expandable_segments=True",
        "expandable_segments",
        "max_split_size_mb:128;expandable_segments:True",
        "roundup_power2_divisions:[256:1,>:8",
        ",",
    ):
        assert not takes(name, value), value


def test_names_that_the_libraries_know_are_not_taken_for_misspelt_ones() -> None:
    right = [
        "NCCL_IGNORE_DISABLED_P2P",
        "NCCL_NVB_DISABLE",
        "NCCL_IB_PKEY",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "NCCL_VERSION",
    ]
    assert unknown_names(right) == {}
    assert unknown_names(["NCCL_IB_DISABEL"]) == {"NCCL_IB_DISABEL": "NCCL_IB_DISABLE"}
